"""The record of channel scales that were folded from a norm into the weights behind it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from nearplane.errors import FormatError

FIRST, LAST, ZERO = "A", "Y", "M"  # letters of exponents -12 to 12; that of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Powers of two by which the outputs of a norm were multiplied, and the columns of the weights that read them divided.

    Products of the two are the same numbers, so that the network is the same to the bit. If the norm multiplies by 1 + its
    weight, it gets the nearest such weight in its dtype, and the others are divided by what it then multiplies by: the network
    is the same but for rounding in float32.

    Args:
        norm: Name of the norm's module, "model.layers.0.input_layernorm".
        weights: Names of all parameters that multiply its outputs.
        exponents: A letter for each channel: M for 0, N for 1, L for -1, from A (-12) to Y (12).
        offset: What the norm adds to its weight before it multiplies: 0 or 1.
    """

    norm: str
    weights: tuple[str, ...]
    exponents: str
    offset: float = 0.0

    def __post_init__(self) -> None:
        if wrong := {*self.exponents} - {chr(each) for each in range(ord(FIRST), ord(LAST) + 1)}:
            raise FormatError(
                f"The scales of {self.norm[:80]} have the letter {min(wrong)!r}; expected {FIRST} to {LAST}."
            )
        if self.offset not in (0, 1):
            raise FormatError(f"The norm {self.norm[:80]} adds {self.offset} to its weight; expected 0 or 1.")

    @classmethod
    def of(cls, norm: str, weights: tuple[str, ...], powers: list[int], offset: float = 0.0) -> Fold:
        """Return the fold of these exponents, which lie between -12 and 12."""
        letters = "".join(chr(ord(ZERO) + each) for each in powers)
        return cls(norm=norm, weights=weights, exponents=letters, offset=offset)

    @property
    def powers(self) -> list[int]:
        """The exponent of every channel."""
        return [ord(each) - ord(ZERO) for each in self.exponents]
