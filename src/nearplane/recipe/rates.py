"""Codes without limits, entropy-coded at any rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nearplane.errors import RecipeError
from nearplane.recipe.scheme import (
    Allocation,
    Format,
    Rows,
    Scheme,
    Solver,
    one_of,
    true_or_false,
    within,
)
from nearplane.recipe.sizes import bytes_in


@dataclass(frozen=True, slots=True, kw_only=True)
class RateScheme(Scheme):
    """Codes without limits, entropy-coded: as many bits as they are told to take, in nearplane's own format.

    Args:
        rate: Bits per quantized weight, 0.5 to 7, every byte of the layers' tensors counted.
        size: Of the whole checkpoint folder, tokenizer and all, instead of a rate: "3.1GB", "800MiB" or a number of bytes. A
            limit that is not exceeded. With --format gguf, layers get types of llama.cpp that add up to it, by measuring.
        include_head: Quantize the output embeddings too, last of all.
        include_embeddings: Quantize the input embeddings too, before the blocks, which make up for it. Where they are also the
            head (tied), it is one matrix, which either option includes. Both get the mean rate, whatever layers are allocated.
        rows: Whether rows whose errors the network minds more get finer steps (sensitivity), or all the same (equal).
    """

    rate: float | None = None
    size: str | None = None
    include_head: bool = False
    include_embeddings: bool = False
    rows: Rows = "sensitivity"

    FORMATS: ClassVar[tuple[Format, ...]] = ("nearplane",)

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if (self.rate is None) == (self.size is None):
            given = "neither" if self.rate is None else "both"
            raise RecipeError(f"Entropy-coded weights take a --rate or a --size, found {given}: give one of them.")
        numeric = isinstance(self.rate, int | float)
        within("rate", self.rate, self.rate is None or (numeric and 0.5 <= float(self.rate or 0) <= 7), "0.5 to 7 bits")
        if self.size is not None:
            object.__setattr__(self, "size", str(self.size))
            self.bytes()
        true_or_false("include_head", self.include_head)
        true_or_false("include_embeddings", self.include_embeddings)
        one_of("rows", self.rows, Rows)

    @property
    def default_solver(self) -> Solver:
        """A beam, which pays where steps cannot be refitted."""
        return "k-best"

    @property
    def title(self) -> str:
        """How weights are stored, in words."""
        return "entropy-coded"

    @property
    def default_allocation(self) -> Allocation:
        """By measured slopes, which rounding to nearest, without calibration, does not have."""
        return "slope" if self.calibrated else "uniform"

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return self.include_embeddings, self.include_head

    @property
    def asked(self) -> tuple[float, str] | None:
        """How much the checkpoint was to take, in bits per weight or bytes."""
        return (self.rate, "bits per weight") if self.rate is not None else (float(self.bytes() or 0), "bytes")

    @property
    def entropy_coded(self) -> bool:
        """Whether codes take as many bits as they hold."""
        return True

    @property
    def weighs_rows(self) -> bool:
        """Whether rows whose errors the network minds more get finer steps."""
        return self.rows == "sensitivity"

    def bytes(self) -> int | None:
        """Return the size asked for, in bytes.

        Raises:
            RecipeError: see `bytes_in`.
        """
        return None if self.size is None else bytes_in(self.size)
