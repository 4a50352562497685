"""Codes of a fixed number of bits: on grids that existing runtimes load, and on the blocks of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil, gcd
from typing import Any, ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.lattice.number_formats import (
    FLOATS,
    INTEGERS,
    TYPES,
    BlockType,
    NumberFormat,
    find_format,
    integers,
    number_format,
)
from nearplane.recipe.scheme import (
    FITTING,
    POLISH,
    ROUNDS,
    Allocation,
    Format,
    GridName,
    Scale,
    Scheme,
    one_of,
    true_or_false,
    whole,
    within,
)
from nearplane.recipe.sizes import bytes_in

BITS = 4  # of a code by default
CHOSEN = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # types that layers get by measuring, by rising rate
Dense = Literal["f32", "f16", "bf16"]
Ends = Literal[
    "auto", "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScheme(Scheme):
    """Codes of a fixed number of bits on a grid of steps, which existing runtimes load.

    Args:
        grid: Name of a number format that says bits, group size and symmetry; None where these say it.
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

    grid: str | None = None
    bits: float = BITS  # an int where it is whole; not `int | float`, of which command lines take the first that fits
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    scale: Scale = "mse"
    polish: int | None = None
    rounds: int | None = None
    two_sided: bool = False

    FORMATS: ClassVar[tuple[Format, ...]] = ("compressed-tensors", "gptq", "gptq_v2", "gguf")

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if self.grid is not None:
            self._take_grid(self.grid)
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

    def _take_grid(self, grid: str) -> None:
        """Set bits, group size and symmetry to what the grid says; of integers they say all of it, and the name goes.

        Raises:
            RecipeError: there is no such number format, or one of the three is another.
        """
        format = number_format(str(grid))
        object.__setattr__(
            self,
            "grid",
            None if format == integers(format.bits, format.group, symmetric=format.symmetric) else format.name,
        )
        for each in fields(self):
            if each.name in (said := options_of(format)):
                if getattr(self, each.name) not in (each.default, said[each.name]):
                    raise RecipeError(_contradiction(each.name, getattr(self, each.name), format))
                object.__setattr__(self, each.name, said[each.name])

    @property
    def joins_rows(self) -> bool:
        """Whether rows make up for each other's errors."""
        return self.two_sided

    @property
    def default_allocation(self) -> Allocation:
        """A fraction of bits is what layers get on average."""
        return "uniform" if isinstance(self.bits, int) else "slope"

    @property
    def number_format(self) -> NumberFormat:
        """The number format that layers get; of a fraction of bits, which is their average, that of the next whole number."""
        assert self.group_size != "auto", "the scheme's group is not chosen yet"
        if self.grid is not None:
            return number_format(self.grid)
        return integers(ceil(self.bits), self.group_size, symmetric=self.symmetric)

    def with_bits(self, bits: int | None) -> Self:
        """Return the scheme of a layer whose codes have so many bits."""
        return self if bits is None else replace(self, bits=bits)

    @property
    def tunable(self) -> bool:
        """Integers can be trained, numbers of levels so far not."""
        return self.grid is None

    @property
    def unfit(self) -> str:
        """What to say of inputs that groups do not divide."""
        return f"are not a multiple of --group-size {self.group_size}. Use one that divides them, or none for one step a row."

    def storing(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format: widths may differ."""
        return self.with_bits(format.bits or None)

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
        grid: A number format by its name (int4-g128, int8-row, int3-g64-asym, mxfp4). Or, in a GGUF, a type of blocks of
            llama.cpp (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k), or one of its mixes (q2_k_m, q3_k_m, q4_k_m,
            q5_k_m), or bits per weight in blocks, steps and all (4.5): every layer gets a type of its own, by measuring. Rows that
            blocks of 256 do not divide get the type that llama.cpp takes in its place.
        size: Of the whole checkpoint folder, tokenizer and all, instead of a rate: "3.1GB", "800MiB" or a number of bytes. A
            limit that is not exceeded. With --format gguf, layers get types of llama.cpp that add up to it, by measuring.
        embeddings: Type of embeddings and head, which are quantized too; f32, f16 or bf16 leaves them as they are, in that type.
            auto is as llama.cpp: q6_k for the head, also where it is the embeddings; for other embeddings the type of --grid, or
            where that is a number the largest within it.
        polish: Sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Passes of coordinate descent over steps, by least squares, and codes together; then codes are solved once more on
            the fitted steps, and the better ones of every row are kept. Default: 3.
    """

    grid: str | None = field(default=None, kw_only=False)
    size: str | None = None
    embeddings: Ends = "auto"
    polish: int | None = None
    rounds: int | None = None

    FORMATS: ClassVar[tuple[Format, ...]] = ("gguf",)

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if self.size is not None:
            object.__setattr__(self, "size", str(self.size))
            bytes_in(self.size)
        if self.grid is not None:
            self._check_grid()
        elif self.size is None:
            raise RecipeError(
                "Weights in blocks of llama.cpp take a --grid or a --size, found neither: give one of them."
            )
        if self.measured and not self.calibrated:
            asked = f"grid is {self.grid}" if self.grid else f"size is {self.size}"
            raise RecipeError(f"{asked}, for which layers are measured on text; solver {self.solver!r} has none.")
        one_of("embeddings", self.embeddings, Ends)
        _settle_refits(self)

    def _check_grid(self) -> None:
        """Refuse a grid that is neither a type, nor a mix, nor a rate that types have."""
        object.__setattr__(self, "grid", str(self.grid).lower())
        try:
            bits = float(str(self.grid))
        except ValueError:
            if self.grid not in GridName.__args__:  # type: ignore[attr-defined]
                named = ", ".join([*GridName.__args__, *(each.name for each in FLOATS)])  # type: ignore[attr-defined]
                raise RecipeError(f"grid is {self.grid!r}; expected one of {named}, or {INTEGERS}.") from None
            return
        rates = [TYPES[name].rate for name in CHOSEN]
        expected = f"{rates[0]} to {rates[-1]} bits per weight, or a type"
        within("grid", self.grid, rates[0] <= bits <= rates[-1], expected)

    @property
    def title(self) -> str:
        """How weights are stored, in words."""
        return f"on llama.cpp's grids ({self.grid or 'types by measuring'})"

    @property
    def measured(self) -> bool:
        """Whether layers get types by measuring, for so many bits per weight or a size."""
        return self.grid is None or self.grid[0] != "q"

    @property
    def budget(self) -> float | None:
        """Bits per weight in blocks that layers get together; None where the type is given, or a size leaves them."""
        return float(self.grid) if self.grid is not None and self.measured else None

    @property
    def asked(self) -> tuple[float, str] | None:
        """How much the checkpoint was to take, in bytes; None where the grid says it."""
        return None if self.size is None else (float(bytes_in(self.size)), "bytes")

    @property
    def default_allocation(self) -> Allocation:
        """Whether types are chosen by measuring."""
        return "slope" if self.measured else "uniform"

    @property
    def number_format(self) -> BlockType:
        """The type of blocks; of a mix the one that most layers have, of a budget the largest that it has room for.

        Of a size it is the smallest, until it is known what the size leaves.
        """
        if self.measured:
            budget = self.budget or TYPES[CHOSEN[0]].rate
            return TYPES[[name for name in CHOSEN if TYPES[name].rate <= budget][-1]]
        return TYPES[str(self.grid).removesuffix("_m")]

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

    @property
    def types_vary(self) -> bool:
        """Whether a layer may have another type: where blocks do not divide its inputs, and in mixes."""
        return True

    @property
    def unfit(self) -> str:
        """What to say of inputs that blocks do not divide."""
        kind = self.number_format
        return f"on {self.grid}. Expected a type of llama.cpp whose blocks divide them; {kind.name} has blocks of {kind.columns}."

    def storing(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format: types of blocks may differ."""
        return replace(self, grid=format.name) if format.name in TYPES else self


def options_of(format: NumberFormat) -> dict[str, Any]:
    """Return the options that a number format stands for."""
    return {"bits": format.bits, "group_size": format.group, "symmetric": format.symmetric}


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those that a grid of integers stands for in its place.

    Raises:
        RecipeError: one is given besides, as another.
    """
    format = find_format(str(options.get("grid")).lower())
    if format is None or format.name in TYPES:
        return dict(options)
    said, rest = options_of(format), {name: value for name, value in options.items() if name != "grid"}
    for name in said:
        if options.get(name) not in (None, said[name]):
            raise RecipeError(_contradiction(name, options[name], format))
    return rest | (
        said if format == integers(format.bits, format.group, symmetric=format.symmetric) else {"grid": format.name}
    )


def _contradiction(name: str, value: object, format: NumberFormat) -> str:
    return f"{name} is {value!r}, but --grid {format.name} says all of how weights are stored: leave out one of them."


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
