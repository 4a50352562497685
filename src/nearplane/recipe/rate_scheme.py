"""Scheme of entropy-coded weights, by a rate or the size of the folder. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from nearplane.errors import RecipeError
from nearplane.recipe.file_formats import FILE_FORMATS, Format
from nearplane.recipe.scheme import Scheme, Solver
from nearplane.system.arguments import check_fields, within

Rows = Literal["sensitivity", "equal"]

MIN_RATE, MAX_RATE = 0.5, 7  # bits per weight that may be asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RateScheme(Scheme):
    """Entropy-coded codes without limits, for a given rate or size, in nearplane's own format.

    Args:
        rate, size, include_head, include_embeddings: See `quantize`.
        rows: Steps of rows: sensitivity gives finer steps to rows to whose errors the network is more sensitive; equal does not.
    """

    rate: float | None = None
    size: str | None = None
    include_head: bool = False
    include_embeddings: bool = False
    rows: Rows = "sensitivity"

    FORMATS: ClassVar[tuple[Format, ...]] = ("nearplane",)
    default_solver: ClassVar[Solver] = "k-best"  # worth its time where steps cannot be refitted
    entropy_coded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if (self.rate is None) == (self.size is None):
            given = "neither" if self.rate is None else "both"
            raise RecipeError(f"Entropy-coded weights need either --rate or --size; found {given}.")
        numeric = isinstance(self.rate, int | float)
        known = self.rate is None or (numeric and MIN_RATE <= float(self.rate or 0) <= MAX_RATE)
        within("rate", self.rate, known, f"{MIN_RATE:g} to {MAX_RATE:g} bits")
        check_fields(self, "include_head", "include_embeddings", "rows")

    def unfit(self, format: str) -> str:
        """Return the error message for a format that cannot hold such weights, with the alternatives."""
        given = f"--rate {self.rate:g}" if self.size is None else f"--size {self.size}"
        instead = "Use --bits, --grid, or --size without --rate" if FILE_FORMATS[format].block_types else "Use --bits"
        return self._unfit(format, "fixed grids", f"{given} is for entropy-coded weights", instead)
