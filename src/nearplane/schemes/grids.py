"""Codes of a fixed number of bits: on grids that existing runtimes load, and on the blocks of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import gcd
from typing import ClassVar, Literal, Self

from nearplane.block_types import TYPES, BlockType
from nearplane.errors import RecipeError
from nearplane.schemes.base import (
    FITTING,
    POLISH,
    ROUNDS,
    Allocation,
    Format,
    GridName,
    LayerGrid,
    Scale,
    Scheme,
    one_of,
    true_or_false,
    whole,
    within,
)

CHOSEN = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # types that layers get by measuring, by rising rate
Dense = Literal["f32", "f16", "bf16"]
Ends = Literal[
    "auto", "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScheme(Scheme):
    """Codes of a fixed number of bits on a grid of steps, which existing runtimes load.

    Args:
        bits: Bits of a code, 2 to 8; a fraction (3.5) is what layers get on average, each a whole number of its own.
        group_size: Weights that share a step, or none for one step a row. auto is 128, or the largest of 64, 32 and 16 that
            divides the inputs of all layers, or none where 16 does not.
        symmetric: Whether grids have no zero-point.
        scale: How steps are found: range of the weights, or p-norm error search.
        polish: Sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Passes of coordinate descent over steps, by least squares, and codes together; then codes are solved once more on
            the fitted steps, and the better ones of every row are kept. Default: 3.
        two_sided: Whether rows make up for each other's errors too, as the network's gradients say, not only columns. Takes a
            backward pass; no bound of a sweep holds for such codes.
    """

    bits: float = 4  # an int where it is whole; not `int | float`, of which command lines take the first that fits
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    scale: Scale = "mse"
    polish: int | None = None
    rounds: int | None = None
    two_sided: bool = False

    FORMATS: ClassVar[tuple[Format, ...]] = ("compressed-tensors", "gptq", "gptq_v2", "gguf")

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if self.group_size == -1:  # how other tools write it
            object.__setattr__(self, "group_size", None)
        within("bits", self.bits, isinstance(self.bits, int | float) and 2 <= self.bits <= 8, "a number from 2 to 8")
        if self.bits == int(self.bits):
            object.__setattr__(self, "bits", int(self.bits))
        size = self.group_size
        known = size in (None, "auto") or (isinstance(size, int) and size > 0)
        within("group_size", size, known, "a positive number, auto or none")
        true_or_false("symmetric", self.symmetric)
        one_of("scale", self.scale, Scale)
        true_or_false("two_sided", self.two_sided)
        if self.two_sided and not self.calibrated:
            raise RecipeError(f"two_sided needs calibration, which solver {self.solver!r} does without.")
        _settle_refits(self)

    @property
    def joins_rows(self) -> bool:
        """Whether rows make up for each other's errors."""
        return self.two_sided

    @property
    def default_allocation(self) -> Allocation:
        """A fraction of bits is what layers get on average."""
        return "uniform" if isinstance(self.bits, int) else "slope"

    @property
    def grid_bits(self) -> float:
        """Bits per weight of codes, 16-bit steps and zero-points; one step a row counts as nothing."""
        side = 16 + (0 if self.symmetric else self.bits)
        return self.bits + (side / self.group_size if isinstance(self.group_size, int) else 0.0)

    @property
    def layer_grid(self) -> LayerGrid:
        """The grid that layers get."""
        return LayerGrid(self.bits, self.group_size, self.symmetric)

    def with_bits(self, bits: int | None) -> Self:
        """Return the scheme of a layer whose codes have so many bits."""
        return self if bits is None else replace(self, bits=bits)

    def grouped(self, inputs: Iterable[int]) -> Self:
        """Return the scheme with the group size that auto stands for where layers have so many inputs."""
        if self.group_size != "auto":
            return self
        columns = list(inputs)
        fitting = fitting_group(columns)
        return replace(self, group_size=None if any(n % fitting for n in columns) else fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScheme(Scheme):
    """Codes on the grids of llama.cpp, whose steps are on two levels: files that it runs.

    Args:
        grid: A type of blocks of llama.cpp (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k), or one of its mixes
            (q2_k_m, q3_k_m, q4_k_m, q5_k_m), or bits per weight in blocks, steps and all (4.5): every layer gets a type of its own,
            by measuring. Rows that blocks of 256 do not divide get the type that llama.cpp takes in its place.
        embeddings: Type of embeddings and head, which are quantized too; f32, f16 or bf16 leaves them as they are, in that type.
            auto is as llama.cpp: q6_k for the head, also where it is the embeddings; for other embeddings the type of --grid.
        polish: Sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Passes of coordinate descent over steps, by least squares, and codes together; then codes are solved once more on
            the fitted steps, and the better ones of every row are kept. Default: 3.
    """

    grid: str = field(kw_only=False)
    embeddings: Ends = "auto"
    polish: int | None = None
    rounds: int | None = None

    FORMATS: ClassVar[tuple[Format, ...]] = ("gguf",)

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        object.__setattr__(self, "grid", str(self.grid).lower())
        try:
            bits = float(self.grid)
        except ValueError:
            one_of("grid", self.grid, GridName)
        else:
            rates = [TYPES[name].rate for name in CHOSEN]
            within(
                "grid",
                self.grid,
                rates[0] <= bits <= rates[-1],
                f"{rates[0]} to {rates[-1]} bits per weight, or a type",
            )
            if not self.calibrated:
                raise RecipeError(f"grid is {self.grid}, which is measured on text; solver {self.solver!r} has none.")
        one_of("embeddings", self.embeddings, Ends)
        _settle_refits(self)

    @property
    def title(self) -> str:
        """How weights are stored, in words."""
        return f"on llama.cpp's grids ({self.grid})"

    @property
    def budget(self) -> float | None:
        """Bits per weight in blocks, where types are chosen by measuring; else None."""
        return None if self.grid[0] == "q" else float(self.grid)

    @property
    def default_allocation(self) -> Allocation:
        """Types of a budget are chosen by measuring."""
        return "uniform" if self.budget is None else "slope"

    @property
    def kind(self) -> BlockType:
        """The type of blocks; of a mix the one that most layers have, of a budget the largest that it has room for."""
        if self.budget is not None:
            return TYPES[[name for name in CHOSEN if TYPES[name].rate <= self.budget][-1]]
        return TYPES[self.grid.removesuffix("_m")]

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return (self.dense_ends is None,) * 2

    @property
    def dense_ends(self) -> str | None:
        """The type in which embeddings and head stay as they are; None where they are quantized."""
        return self.embeddings if self.embeddings in Dense.__args__ else None  # type: ignore[attr-defined]

    @property
    def mixed(self) -> bool:
        """Whether layers have types of their own."""
        return self.grid not in TYPES

    def with_blocks(self, blocks: str | None) -> Self:
        """Return the scheme of a layer whose blocks have this type."""
        return self if blocks is None else replace(self, grid=blocks)

    @property
    def layer_grid(self) -> LayerGrid:
        """The grid that layers get, where they have none of their own."""
        kind = self.kind
        return LayerGrid(kind.bits, kind.group, kind.symmetric, blocks=kind.name)


def _settle_refits(scheme: GridScheme | BlockScheme) -> None:
    """Fill in and check what is done after a solve: nothing without calibration."""
    for name, default in (("polish", POLISH), ("rounds", ROUNDS)):
        if (asked := getattr(scheme, name)) and not scheme.calibrated:
            raise RecipeError(f"{name} needs calibration, which solver {scheme.solver!r} does without.")
        if asked is None:
            object.__setattr__(scheme, name, default if scheme.calibrated else 0)
        whole(name, getattr(scheme, name), 0)


def fitting_group(inputs: Iterable[int], most: int = FITTING[0]) -> int:
    """Return the largest group, of `most` weights or half, a quarter, ... of it, that divides all numbers of inputs.

    It is 16 where no group that kernels take does.
    """
    return max(FITTING[-1], gcd(most, *inputs))
