"""How matrices are quantized, as frozen data: on a grid of a fixed number of bits, in the blocks of llama.cpp, or entropy-coded.

Three kinds of scheme, each with only its own options. Needs no torch; what the options lead to is in `matrix/`.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    FILE_FORMATS,
    FITTING,
    Allocation,
    Format,
    Scheme,
    Solver,
    contradiction,
    names_of,
    one_of,
    options_of,
    spelled_out,
    true_or_false,
    whole,
    within,
)
from nearplane.recipe.sizes import bytes_in

Scale = Literal["minmax", "mse"]
Rows = Literal["sensitivity", "equal"]
BlockName = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]  # of llama.cpp
GridName = Literal[BlockName, "q2_k_m", "q3_k_m", "q4_k_m", "q5_k_m"]  # also its mixes of them
Dense = Literal["f32", "f16", "bf16"]
Ends = Literal["auto", Dense, BlockName]
POLISH = 1  # sweeps, on fixed grids
ROUNDS = 3  # over steps and codes, on fixed grids
BITS = 4  # of a code by default
CHOSEN = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # types that layers get by measuring, by rising rate


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
        plain = format == integers(format.bits, format.group, symmetric=format.symmetric)
        object.__setattr__(self, "grid", None if plain else format.name)
        defaults = {each.name: each.default for each in fields(self)}
        for name, said in options_of(format).items():
            if (given := getattr(self, name)) not in (defaults[name], said):
                raise RecipeError(contradiction(name, given, format))
            object.__setattr__(self, name, said)

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
        fitting = fitting_group(columns := list(inputs))
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
    types_vary: ClassVar[bool] = True  # where blocks do not divide its inputs, and in mixes

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
    def unfit(self) -> str:
        """What to say of inputs that blocks do not divide."""
        kind = self.number_format
        return f"on {self.grid}. Expected a type of llama.cpp whose blocks divide them; {kind.name} has blocks of {kind.columns}."

    def storing(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format: types of blocks may differ."""
        return replace(self, grid=format.name) if format.name in TYPES else self


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
    default_solver: ClassVar[Solver] = "k-best"  # which pays where steps cannot be refitted
    entropy_coded: ClassVar[bool] = True

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
    def weighs_rows(self) -> bool:
        """Whether rows whose errors the network minds more get finer steps."""
        return self.rows == "sensitivity"

    def bytes(self) -> int | None:
        """Return the size asked for, in bytes.

        Raises:
            RecipeError: see `bytes_in`.
        """
        return None if self.size is None else bytes_in(self.size)


AnyScheme = GridScheme | BlockScheme | RateScheme


def scheme_of(*, into: str | None = None, spread: str | None = None, **options: Any) -> AnyScheme:
    """Return the scheme that options are of: entropy-coded with a rate or size, of llama.cpp's grids with one, else on a grid.

    Args:
        into: format of the checkpoint; in a GGUF, a size and bits that differ by layer are those of llama.cpp's grids.
        spread: how bits are spread over layers, if that is said.
        options: fields of a scheme.

    Raises:
        RecipeError: an option is one that only another kind has, or none at all.
    """
    if options.get("grid") is None or not {options.get("rate"), options.get("size")} - {None}:
        options = spelled_out(options)  # else the name is refused as it was given
    given = {name: value for name, value in options.items() if value is not None}
    format = find_format(str(given.get("grid")))
    said = f"--grid {given['grid']}" if "grid" in given else f"--size {given.get('size')} of a GGUF"
    in_blocks = FILE_FORMATS.get(into, FILE_FORMATS[None]).for_llama_cpp
    if in_blocks and not given.keys() & {"grid", "size", "rate"}:
        bits = given.get("bits", BITS)
        if spread == "slope" or (isinstance(bits, float) and not bits.is_integer()):
            given = {name: value for name, value in given.items() if name != "bits"} | {"grid": f"{bits:g}"}
            said = f"--bits {bits:g} of a GGUF, for which types are chosen by measuring,"
    blocks = ("grid" in given and (format is None or format.name in TYPES)) or (in_blocks and "size" in given)
    coded = "rate" in given or ("size" in given and not blocks)
    if "grid" in given and ("rate" in given or ("size" in given and not in_blocks)):
        name = "rate" if "rate" in given else "size"
        raise RecipeError(
            f"grid is {given['grid']!r} and {name} {given[name]!r}, but entropy-coded weights have no fixed grid: leave out "
            f"one of them."
        )
    kind: type[AnyScheme] = RateScheme if coded else BlockScheme if blocks else GridScheme
    known = {name for each in (GridScheme, BlockScheme, RateScheme) for name in names_of(each)}
    if unknown := options.keys() - known:
        raise RecipeError(
            f"{min(unknown)} is no option of how layers are quantized; expected one of {', '.join(sorted(names_of(kind)))}. What "
            f"holds for the whole run is given once."
        )
    if wrong := sorted(given.keys() - names_of(kind)):
        if coded:
            why = "entropy-coded weights have no fixed grid; leave it out, or leave out --rate and --size"
        elif blocks:
            why = f"{said} says all of how weights are stored: leave out one of them"
        else:
            why = "only entropy-coded weights have that; give --rate or --size, or leave it out"
        raise RecipeError(f"{wrong[0]} is {given[wrong[0]]!r}, but {why}.")
    nothing = {name: None for name, value in options.items() if value is None and name in names_of(kind)}
    return kind(**nothing | given)


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
