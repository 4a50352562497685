"""Schemes as frozen data: grids of a fixed number of bits, blocks of llama.cpp, or entropy-coded codes.

Each of the three kinds has only its own options. Needs no torch; `matrix/` applies them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from math import ceil, gcd
from typing import Any, ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.number_formats import (
    E2M1,
    FLOATS,
    INTEGERS,
    TYPES,
    BlockType,
    NumberFormat,
    find_format,
    integers,
    number_format,
)
from nearplane.recipe.file_formats import FILE_FORMATS, Format
from nearplane.recipe.scheme import (
    DEFAULT_GROUP_SIZES,
    Scheme,
    Solver,
    contradiction,
    is_integer,
    names_of,
    options_of,
    spelled_out,
)
from nearplane.system.arguments import check_fields, whole, within
from nearplane.system.sizes import bytes_in

Scale = Literal["minmax", "mse"]
Rows = Literal["sensitivity", "equal"]
BlockName = Literal[  # of llama.cpp
    "q4_0", "q4_1", "iq4_nl", "iq4_xs", "mxfp4", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"
]  # fmt: skip
GridName = Literal[BlockName, "q2_k_m", "q3_k_m", "q4_k_m", "q5_k_m"]  # with llama.cpp's mixes of types
Dense = Literal["f32", "f16", "bf16"]
Ends = Literal["auto", Dense, BlockName]
DEFAULT_POLISH = 1  # sweeps of coordinate descent over codes, on fixed grids
DEFAULT_ROUNDS = 3  # passes over steps and codes, on fixed grids
DEFAULT_BITS = 4  # per code
MEASURED_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # types to choose from by measuring, by rising rate


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScheme(Scheme):
    """Codes of a fixed number of bits on a grid of steps, which existing runtimes load.

    Args:
        grid: Name of a number format that implies bits, group size and symmetry. None: these three options apply.
        bits: Bits per code, 2 to 8. A fraction such as 3.5 is the average over layers; every layer gets a whole number of bits.
        group_size: Number of weights that share a step; none is one step per row. auto is 128, or the largest of 64, 32 and 16
            that divides the inputs of all layers, or none if 16 does not divide them.
        symmetric: Whether grids have no zero point. In MLX every group has a minimum instead.
        minimum: Whether every group has a real-valued minimum in place of a zero point, as MLX stores it.
        scale: Choice of the steps: minmax uses the range of the weights; mse searches the step with the smallest p-norm error.
        polish: Number of sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Number of passes of coordinate descent that fit steps (least squares) and codes together. The codes are then
            solved once more on the fitted steps, and each row keeps the better of the two results. Default: 3.
        two_sided: Whether rows compensate each other's errors too, weighted by the network's gradients, and not only columns.
            Needs a backward pass. No bound of a sweep holds for such codes. Default: true for nvfp4 and mxfp4, else false.
        include_head: Whether the output embeddings (head) are quantized too, after all other layers. Needs --rate, --size or
            --format mlx.
        include_embeddings: Whether the input embeddings are quantized too, before the blocks, which then compensate the loss. A
            head that is tied to the embeddings is included by either option. Both always get the average rate. Needs --rate,
            --size or --format mlx.
    """

    grid: str | None = None
    bits: float = DEFAULT_BITS  # an int if whole; not `int | float`, of which command lines take the first that fits
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    minimum: bool = False
    scale: Scale = "mse"
    polish: int | None = None
    rounds: int | None = None
    two_sided: bool | None = None
    include_head: bool = False
    include_embeddings: bool = False

    FORMATS: ClassVar[tuple[Format, ...]] = ("compressed-tensors", "gptq", "gptq_v2", "awq", "mlx", "gguf")

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if self.grid is not None:
            self._take_grid(self.grid)
        if isinstance(self.group_size, int) and self.group_size == -1:  # spelling of other tools
            object.__setattr__(self, "group_size", None)
        within("bits", self.bits, isinstance(self.bits, int | float) and 2 <= self.bits <= 8, "a number from 2 to 8")
        if self.bits == int(self.bits):
            object.__setattr__(self, "bits", int(self.bits))
        size = self.group_size
        known = size in (None, "auto") or (isinstance(size, int) and size > 0)
        within("group_size", size, known, "a positive number, auto or none")
        check_fields(self, "symmetric", "minimum", "scale", "two_sided", "include_head", "include_embeddings")
        if self.minimum:
            object.__setattr__(self, "symmetric", False)
        if self.two_sided is None:
            floats = self.grid is not None and number_format(self.grid).levels == E2M1
            object.__setattr__(self, "two_sided", self.calibrated and floats)
        if self.two_sided and not self.calibrated:
            raise RecipeError(f"two_sided needs calibration, but solver {self.solver!r} uses none.")
        if self.two_sided and self.grid is not None and number_format(self.grid).rows > 1:
            raise RecipeError(
                f"two_sided solves rows apart, but those of --grid {self.grid} share steps. Leave out one of them."
            )
        _settle_refits(self)

    def _take_grid(self, grid: str) -> None:
        """Set bits, group size and symmetry to those of the grid; the name of a grid of integers is then dropped.

        Raises:
            RecipeError: The number format is unknown, or contradicts one of these three options.
        """
        format = number_format(str(grid))
        object.__setattr__(self, "grid", None if is_integer(format) else format.name)
        defaults = {each.name: each.default for each in fields(self)}
        for name, implied in options_of(format).items():
            if (given := getattr(self, name)) not in (defaults[name], implied):
                raise RecipeError(contradiction(name, given, format))
            object.__setattr__(self, name, implied)

    @property
    def measured(self) -> bool:
        """Whether every layer gets bits of its own: if their number is a fraction, an average over layers."""
        return isinstance(self.bits, float)

    @property
    def average(self) -> float | None:
        """Bits that codes of all layers take on average, where layers have bits of their own."""
        return self.bits if self.measured else None

    @property
    def number_format(self) -> NumberFormat:
        """Number format of the layers; if bits is a fraction, the format of the next whole number."""
        assert self.group_size != "auto", "the scheme's group size is not resolved yet"
        if self.grid is not None:
            return number_format(self.grid)
        return integers(ceil(self.bits), self.group_size, symmetric=self.symmetric, minimum=self.minimum)

    @property
    def misfit(self) -> str:
        """End of the error message for inputs that groups do not divide."""
        remedy = "another --grid" if self.grid else "a --group-size that divides them, or none (one step per row)"
        return f"are not a multiple of the group size {self.group_size}. Use {remedy}."

    def stored_in(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format, which may have other bits."""
        return replace(self, bits=format.bits or self.bits)

    def grouped(self, inputs: Iterable[int]) -> Self:
        """Return the scheme with group size "auto" resolved for layers with these numbers of inputs."""
        if self.group_size != "auto":
            return self
        fitting = fitting_group(columns := list(inputs))
        return replace(self, group_size=None if any(n % fitting for n in columns) else fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScheme(Scheme):
    """Codes on the two-level grids of llama.cpp, in files that llama.cpp runs.

    Args:
        grid: Name of a number format, for example int4-g128, int8, int3-g64-asym, nvfp4, mxfp4, fp8, fp8-block or mxfp8. In
            a GGUF it may be a type of llama.cpp (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl,
            iq4_xs, mxfp4) or one of its mixes (q2_k_m, q3_k_m, q4_k_m, q5_k_m). It may also be a number of bits per
            weight with steps, for example 4.5: types of layers are then chosen by measuring. Rows that blocks of 256 do
            not divide get the type that llama.cpp uses instead.
        size: Maximum size of the whole checkpoint folder, including the tokenizer: "3.1GB", "800MiB" or a number of bytes. Used
            instead of --rate. With --format gguf, each layer gets a type of llama.cpp, chosen by measuring.
        embeddings: Type of the embeddings and the head. f32, f16 and bf16 store them unquantized in that type. auto follows
            llama.cpp: q6_k for the head, also where it is tied to the embeddings; other embeddings get the type of --grid or, if
            that is a number, the largest type within it.
        polish: Number of sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Number of passes of coordinate descent that fit steps (least squares) and codes together. The codes are then
            solved once more on the fitted steps, and each row keeps the better of the two results. Default: 3.
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
            raise RecipeError("Weights in blocks of llama.cpp need --grid or --size; found neither.")
        if self.measured and not self.calibrated:
            option = f"grid is {self.grid}" if self.grid else f"size is {self.size}"
            raise RecipeError(
                f"{option}, which measures layers on calibration text, but solver {self.solver!r} uses none."
            )
        check_fields(self, "embeddings")
        _settle_refits(self)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RateScheme(Scheme):
    """Entropy-coded codes without limits, for a given rate or size, in nearplane's own format.

    Args:
        rate: Bits per quantized weight in the file, 0.5 to 7, with every byte of the layers' tensors counted; for example 3.5.
        size: Maximum size of the whole checkpoint folder, including the tokenizer: "3.1GB", "800MiB" or a number of bytes. Used
            instead of --rate. With --format gguf, each layer gets a type of llama.cpp, chosen by measuring.
        include_head: Whether the output embeddings (head) are quantized too, after all other layers. Needs --rate, --size or
            --format mlx.
        include_embeddings: Whether the input embeddings are quantized too, before the blocks, which then compensate the loss. A
            head that is tied to the embeddings is included by either option. Both always get the average rate. Needs --rate,
            --size or --format mlx.
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
        within("rate", self.rate, self.rate is None or (numeric and 0.5 <= float(self.rate or 0) <= 7), "0.5 to 7 bits")
        if self.size is not None:
            object.__setattr__(self, "size", str(self.size))
            bytes_in(self.size)
        check_fields(self, "include_head", "include_embeddings", "rows")


AnyScheme = GridScheme | BlockScheme | RateScheme


def scheme_of(*, into: str | None = None, spread: str | None = None, **options: Any) -> AnyScheme:
    """Return the scheme of these options: entropy-coded with a rate or size, blocks with a grid of llama.cpp, else a grid.

    Args:
        into: Format of the checkpoint; in a GGUF, a size or bits that differ by layer mean grids of llama.cpp.
        spread: Allocation of bits to layers, or None if it is left open.
        options: Fields of a scheme.

    Raises:
        RecipeError: An option is unknown, or belongs to another kind of scheme.
    """
    if options.get("grid") is None or not {options.get("rate"), options.get("size")} - {None}:
        options = spelled_out(options)  # else the error message names the grid as it was given
    given = {name: value for name, value in options.items() if value is not None}
    format = find_format(str(given.get("grid")))
    title = f"--grid {given['grid']}" if "grid" in given else f"--size {given.get('size')} of a GGUF"
    written = isinstance(into, str | None) and into in FILE_FORMATS
    within("format", into, written, f"one of {', '.join(filter(None, FILE_FORMATS))} or None")
    in_blocks = FILE_FORMATS[into].block_types
    if in_blocks and not given.keys() & {"grid", "size", "rate"}:
        bits = given.get("bits", DEFAULT_BITS)
        if spread == "slope" or (isinstance(bits, float) and not bits.is_integer()):
            given = {name: value for name, value in given.items() if name != "bits"} | {"grid": f"{bits:g}"}
            title = f"--bits {bits:g} of a GGUF, for which types are chosen by measuring,"
    of_llama_cpp = format is None or format.only_in_gguf or (in_blocks and format.name in TYPES)
    blocks = ("grid" in given and of_llama_cpp) or (in_blocks and "size" in given)
    coded = "rate" in given or ("size" in given and not blocks)
    if "grid" in given and ("rate" in given or ("size" in given and not in_blocks)):
        name = "rate" if "rate" in given else "size"
        raise RecipeError(
            f"grid is {given['grid']!r} and {name} {given[name]!r}, but entropy-coded weights have no fixed grid. Leave out one."
        )
    kind: type[AnyScheme] = RateScheme if coded else BlockScheme if blocks else GridScheme
    known = {name for each in (GridScheme, BlockScheme, RateScheme) for name in names_of(each)}
    if unknown := options.keys() - known:
        raise RecipeError(
            f"{min(unknown)} is not an option of a scheme; expected one of {', '.join(sorted(names_of(kind)))}. Options of the "
            f"whole run are given only once, outside of schemes."
        )
    if wrong := sorted(given.keys() - names_of(kind)):
        if coded:
            why = "entropy-coded weights have no fixed grid; leave out this option, or --rate and --size"
        elif blocks:
            why = f"{title} determines how weights are stored; leave out one of them"
        else:
            why = "only entropy-coded weights have this option; use --rate or --size, or leave out this option"
        raise RecipeError(f"{wrong[0]} is {given[wrong[0]]!r}, but {why}.")
    if kind is GridScheme and FILE_FORMATS[into].minimum and "grid" not in given:
        if given.get("symmetric"):
            raise RecipeError("symmetric is True, but in MLX every group has a minimum. Leave out this option.")
        given |= {"symmetric": False, "minimum": True}
    unset = {name: None for name, value in options.items() if value is None and name in names_of(kind)}
    return kind(**unset | given)


def _settle_refits(scheme: GridScheme | BlockScheme) -> None:
    """Fill in and check `polish` and `rounds`, which are 0 without calibration."""
    for name, default in (("polish", DEFAULT_POLISH), ("rounds", DEFAULT_ROUNDS)):
        whole(name, asked := getattr(scheme, name), 0, 1000)
        if asked and not scheme.calibrated:
            raise RecipeError(f"{name} needs calibration, but solver {scheme.solver!r} uses none.")
        if asked is None:
            object.__setattr__(scheme, name, default if scheme.calibrated else 0)


def fitting_group(inputs: Iterable[int], most: int = DEFAULT_GROUP_SIZES[0]) -> int:
    """Return the largest of `most`, `most` / 2, `most` / 4, ... that divides all numbers of inputs, at least 16.

    16 is the smallest group that kernels take.
    """
    return max(DEFAULT_GROUP_SIZES[-1], gcd(most, *inputs))
