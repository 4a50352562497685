"""Scheme of weights in blocks of llama.cpp, by a type, a mix of types, or types chosen by measuring. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.number_formats import FLOATS, INTEGERS, TYPES, BlockType, NumberFormat
from nearplane.recipe.file_formats import FileFormat, Format
from nearplane.recipe.scheme import Allocation, Scheme, settle_refits
from nearplane.system.arguments import check_fields, within

BlockName = Literal[  # of llama.cpp
    "q4_0", "q4_1", "iq4_nl", "iq4_xs", "mxfp4", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"
]  # fmt: skip
GridName = Literal[BlockName, "q2_k_m", "q3_k_m", "q4_k_m", "q5_k_m"]  # with llama.cpp's mixes of types
Dense = Literal["f32", "f16", "bf16"]
Ends = Literal["auto", Dense, BlockName]
MEASURED_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # types to choose from by measuring, by rising rate


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScheme(Scheme):
    """Codes on the two-level grids of llama.cpp, in files that llama.cpp runs.

    Args:
        grid: Type of llama.cpp, mix of types, or bits per weight; None: a size is given. See `quantize`.
        size, embeddings, polish, rounds: See `quantize`.
    """

    grid: str | None = field(default=None, kw_only=False)
    size: str | None = None
    embeddings: Ends = "auto"
    polish: int | None = None
    rounds: int | None = None

    FORMATS: ClassVar[tuple[Format, ...]] = ("gguf",)

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if self.grid is not None:
            self._check_grid()
        elif self.size is None:
            raise RecipeError("Weights in blocks of llama.cpp need --grid or --size; found neither.")
        if self.measured and not self.calibrated:
            option = f"grid is {self.grid}" if self.grid else f"size is {self.size}"
            raise RecipeError(
                f"{option}, which measures layers on calibration text, but solver {self.solver!r} uses none."
            )
        check_fields(self, "embeddings")
        settle_refits(self)

    def _check_grid(self) -> None:
        """Refuse a grid that is neither a type, nor a mix, nor a rate between those of the types."""
        object.__setattr__(self, "grid", str(self.grid).lower())
        try:
            bits = float(str(self.grid))
        except ValueError:
            if self.grid not in GridName.__args__:  # type: ignore[attr-defined]
                known = (*GridName.__args__, *(each.name for each in FLOATS))  # type: ignore[attr-defined]
                names = ", ".join(dict.fromkeys(known))
                raise RecipeError(f"grid is {self.grid!r}; expected one of {names}, or {INTEGERS}.") from None
            return
        rates = [TYPES[name].rate for name in MEASURED_TYPES]
        expected = f"{rates[0]} to {rates[-1]} bits per weight, or a type"
        within("grid", self.grid, rates[0] <= bits <= rates[-1], expected)

    def check_allocation(self, allocate: Allocation | None, files: FileFormat) -> None:
        """Refuse a grid together with a size, and an allocation that does not fit the grid.

        Raises:
            RecipeError: Two options contradict each other; the message names them.
        """
        if self.grid is not None and self.size is not None:
            raise RecipeError(
                f"Found both grid {self.grid!r} and size {self.size!r}. Leave out one: a size chooses types by measuring."
            )
        if allocate != self.default_allocation:
            given = "--size" if self.grid is None else f"--grid {self.grid}"
            raise RecipeError(
                f"allocate is {allocate} with {given}. Types are measured (slope) with --size, or where --grid is a number of "
                f"bits per weight, as --grid 4.5; all other grids are uniform."
            )

    def unfit(self, format: str) -> str:
        """Return the error message for a format that cannot hold such weights, with the alternatives."""
        given = f"--size {self.size}" if self.grid is None else f"--grid {self.grid}"
        return self._unfit(format, "other grids", f"{given} is for llama.cpp", "Use --bits")

    @property
    def title(self) -> str:
        """Storage of the weights, as a phrase for the summary."""
        return f"on llama.cpp's grids ({self.grid or 'types by measuring'})"

    @property
    def measured(self) -> bool:
        """Whether types of layers are chosen by measuring, for a number of bits per weight or a size."""
        return self.grid is None or self.grid not in GridName.__args__  # type: ignore[attr-defined]

    @property
    def budget(self) -> float | None:
        """Average bits per weight in blocks; None if the grid names a type, or a size determines the budget."""
        return float(self.grid) if self.grid is not None and self.measured else None

    @property
    def number_format(self) -> BlockType:
        """Type of blocks: of a mix the most frequent one, of a number of bits per weight the largest type within it.

        With a size it is the smallest type, until `folder_size.py` has computed the budget.
        """
        if self.measured:
            budget = self.budget or TYPES[MEASURED_TYPES[0]].rate
            return TYPES[[name for name in MEASURED_TYPES if TYPES[name].rate <= budget][-1]]
        return TYPES[str(self.grid).removesuffix("_m")]

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return (self.dense_ends is None,) * 2

    @property
    def dense_ends(self) -> str | None:
        """Type of embeddings and head that are not quantized; None if they are quantized."""
        return self.embeddings if self.embeddings in Dense.__args__ else None  # type: ignore[attr-defined]

    @property
    def misfit(self) -> str:
        """End of the error message for inputs that blocks do not divide."""
        kind = self.number_format
        return f"are not a multiple of {kind.columns}, the block size of {kind.name}. Use a type with smaller blocks."

    def stored_in(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format, which may be another type of blocks."""
        return replace(self, grid=format.name) if format.name in TYPES else self
