"""Which windows are trained on and which are held out, how many steps are taken, how fast: by rules, measured in docs/log.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearplane.errors import CalibrationError, RecipeError
from nearplane.recipe.sizes import counted
from nearplane.record.record import RunRecord

TIMES = 5  # as many windows as calibration took are looked at by default, a fifth of them held out
NONE = 256  # windows of a run that had none, of which the default is reckoned
HELD = 5  # of so many windows one is held out,
MOST_HELD = 16384  # but no more tokens than tell the figure to a percent
BATCH = 256  # tokens of a step, at least one window: many small steps gained more than few large ones on as many tokens
# in units of 2^-bits, see `parameters.py`
RATES = {"steps": 0.024, "norms": 0.012, "codes": 0.04, "base": 0.024}
CODE_BITS = 3  # most bits of codes on grids that are trained: finer ones have nothing to gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The windows of a tuning.

    Args:
        windows: (windows, seqlen) those that are trained on, shuffled, then those that are held out: whole batches.
        training: how many are trained on.
        batch: windows that pass together.
        samples: windows that were asked for.
        found: windows that the text gave.
        steps: of the optimizer: AdamW without decay, its rates rising first, and falling to nothing along half a cosine.
        rates: first learning rate of each kind of what is trained, see `TunedLayer.trained`.
        looks: how often held-out windows are measured on the way, evenly spaced, the last time at the end.
    """

    windows: Tensor
    training: int
    batch: int
    samples: int
    found: int
    steps: int
    rates: Mapping[str, float] = field(default_factory=lambda: RATES)
    looks: int = 2

    @property
    def held(self) -> int:
        """How many windows are held out."""
        return len(self.windows) - self.training

    def batches(self) -> tuple[range, range]:
        """Return the numbers of the batches that are trained on, and of those that are held out."""
        first, total = self.training // self.batch, len(self.windows) // self.batch
        return range(first), range(first, total)


def split(
    read: Callable[[int, int], Tensor],
    record: RunRecord,
    *,
    samples: int | None = None,
    seqlen: int | None = None,
    steps: int | None = None,
) -> Split:
    """Read the text and deal out its windows: the last fifth is held out.

    Windows of the run that nothing was fitted to, on which its losses are measured besides, are left out here too.

    Args:
        read: windows of the text: (samples, seqlen) -> tokens (windows, seqlen), fewer where it ends before.
        record: of the run.
        samples, seqlen, steps: see `tune`.

    Raises:
        RecipeError: a number is not positive.
        CalibrationError: there are not two windows.
    """
    for name, value, low in (("samples", samples, 2), ("seqlen", seqlen, 2), ("steps", steps, 1)):
        if value is not None and value < low:
            raise RecipeError(f"--{name} is {value}; expected at least {low}.")
    wanted, length = samples or TIMES * (record.windows or NONE), seqlen or record.seqlen
    windows = read(wanted, length)
    found, length = windows.shape
    begin, end = record.windows * record.seqlen, (record.windows + record.extra_windows) * record.seqlen
    starts = torch.arange(len(windows)) * length
    windows = windows[(starts + length <= begin) | (starts >= end)]
    if len(windows) < 2:
        raise CalibrationError(
            f"The text has {counted(len(windows), 'window')} of {length} tokens to tune on, beside those on which losses are "
            f"measured; at least 2 are needed, one of them held out. Pass a longer text with --calibration, or shorter windows "
            f"with --seqlen."
        )
    held = _held(len(windows), length)
    batch = max(1, min(BATCH // length, held, len(windows) - held))
    held -= held % batch
    fitted = windows[: len(windows) - held]
    order = torch.randperm(len(fitted), generator=torch.Generator().manual_seed(record.recipe.calibration.seed))
    steps = steps or max(1, (wanted - _held(wanted, length)) // batch)
    fitted = fitted[order[: min(len(fitted) // batch, steps) * batch]]  # no more than are looked at
    return Split(
        windows=torch.cat([fitted, windows[len(windows) - held :]]),
        training=len(fitted),
        batch=batch,
        samples=wanted,
        found=found,
        steps=steps,
    )


def _held(windows: int, seqlen: int) -> int:
    """Return how many of so many windows are held out."""
    return max(1, min(windows // HELD, math.ceil(MOST_HELD / seqlen)))
