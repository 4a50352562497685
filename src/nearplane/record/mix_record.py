"""What was asked of a mix of number formats, and what it was predicted and measured to cost. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from nearplane.recipe.format_mix import FormatMix


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRecord:
    """A mix of number formats that was chosen by measuring; see `planning/format_mix.py`.

    KL is of the original's predictions from those of a network whose layers are rounded as before the run: with each
    format's own rounding of inputs, without corrected targets and refinement, by which the checkpoint gets better.

    Args:
        formats: The formats, as named in --mix.
        limit, unit: What was asked for: bytes or bits per weight.
        option: The option of the limit, without dashes in front: size, bits-per-weight, served-memory.
        weigh, cost, context: These options; context is 0 where no cache counts.
        spent: What the chosen mix takes, in the unit of the limit, as predicted before the run.
        units: Number of the sets of layers that got a format together.
        unfit: Layers that no format of the mix fits, which stay unquantized.
        estimated: KL of the chosen mix by the sum of what was estimated for its units, in nats per token.
        predicted: The same, measured on the windows of the estimates, which scales these.
        measured: The same, measured on windows that nothing was chosen by.
    """

    formats: tuple[str, ...]
    option: str
    limit: float
    unit: str
    weigh: str
    cost: str
    context: int
    spent: float
    units: int
    unfit: tuple[str, ...]
    estimated: float
    predicted: float
    measured: float

    def is_of(self, mix: FormatMix) -> bool:
        """Return whether this is a choice among the formats of a mix, for its limit."""
        asked = mix.words, mix.option, mix.limit, mix.weigh, mix.cost, mix.context or 0
        return asked == (self.formats, self.option, (self.limit, self.unit), self.weigh, self.cost, self.context)
