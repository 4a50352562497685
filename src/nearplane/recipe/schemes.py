"""The usual scheme, grids of a fixed number of bits, and the choice among it and those of blocks and of rates.

Each of the three kinds has only its own options. Needs no torch; `matrix/` applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, gcd
from typing import Any, ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.number_formats import TYPES, NumberFormat, find_format, integers, number_format
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat, Format
from nearplane.recipe.rate_scheme import MAX_RATE, RateScheme
from nearplane.recipe.scheme import (
    DEFAULT_GROUP_SIZES,
    Allocation,
    Scheme,
    contradiction,
    is_integer,
    names_of,
    options_of,
    settle_refits,
    spelled_out,
)
from nearplane.system.arguments import check_fields, within

Scale = Literal["minmax", "mse"]
DEFAULT_BITS = 4  # per code
ZERO_POINT_BITS = 4  # at most, where vLLM alone is to read them


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScheme(Scheme):
    """Codes of a fixed number of bits on a grid of steps, which existing runtimes load.

    Args:
        grid: Name of a number format that implies bits, group size and symmetry. None: these three options apply.
        bits, group_size, symmetric, polish, rounds, include_head, include_embeddings: See `quantize`.
        minimum: Whether every group has a real-valued minimum in place of a zero point, as MLX stores it.
        scale: Choice of the steps: minmax uses the range of the weights; mse searches the step with the smallest p-norm error.
        two_sided: Of checkpoints that were written before 2026-11-30: whether rows compensated each other's errors. Runs refuse it.
    """

    grid: str | None = None
    bits: float = DEFAULT_BITS  # an int if whole; not `int | float`, of which command lines take the first that fits
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    minimum: bool = False
    scale: Scale = "mse"
    polish: int | None = None
    rounds: int | None = None
    two_sided: bool = False
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
        settle_refits(self)

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

    def check_allocation(self, allocate: Allocation | None, files: FileFormat) -> None:
        """Refuse an allocation that does not fit the bits, and types of llama.cpp by their number of bits.

        Raises:
            RecipeError: Two options contradict each other; the message names them.
        """
        if files.block_types and allocate == "slope":
            raise RecipeError(
                f"bits is {self.bits} with --allocate slope, but layers of a GGUF get types of llama.cpp. Use "
                f"BlockScheme({self.bits})."
            )
        if allocate == "slope" and self.grid is not None:
            raise RecipeError(
                f"--allocate slope chooses widths of integers, but grid is {self.grid!r}. Use it with --bits, or use --mix, "
                f"which chooses among such formats, too."
            )
        if allocate == "uniform" and self.measured:
            raise RecipeError(
                f"bits is {self.bits}, but every layer needs a whole number of bits with --allocate uniform. Use --allocate slope."
            )

    def unfit(self, format: str) -> str:
        """Return the error message for a format that cannot hold such weights, with the alternatives."""
        given = f"--bits {self.bits}" if self.grid is None else f"--grid {self.grid}"
        instead = f"Use --rate {min(self.bits, MAX_RATE):g} or --size"
        return self._unfit(format, "entropy-coded weights", f"{given} is for fixed grids", instead)

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


AnyScheme = GridScheme | BlockScheme | RateScheme


def scheme_of(
    *, into: str | None = None, spread: str | None = None, runtime: object = None, **options: Any
) -> AnyScheme:
    """Return the scheme of these options: entropy-coded with a rate or size, blocks with a grid of llama.cpp, else a grid.

    Args:
        into: Format of the checkpoint; in a GGUF, a size or bits that differ by layer mean grids of llama.cpp.
        spread: Allocation of bits to layers, or None if it is left open.
        runtime: Program that must load the checkpoint, or None if it is left open.
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
            whose, ways = "types of llama.cpp", "--format gguf"
            if wrong[0] in names_of(RateScheme):
                whose, ways = "entropy-coded weights", "--rate or --size"
            why = f"only {whose} have this option; use {ways}, or leave out this option"
        raise RecipeError(f"{wrong[0]} is {given[wrong[0]]!r}, but {why}.")
    if kind is GridScheme and FILE_FORMATS[into].minimum and "grid" not in given:
        if given.get("symmetric"):
            raise RecipeError(
                "The integers have no minimum, but in MLX every group has one. Use --bits without --symmetric, a grid such as "
                "int4-g64-min, or --grid mxfp4, nvfp4 or mxfp8."
            )
        given |= {"symmetric": False, "minimum": True}
    elif kind is GridScheme and "symmetric" not in given and _has_zero_points(runtime, into, given):
        given |= {"symmetric": False}
    unset = {name: None for name, value in options.items() if value is None and name in names_of(kind)}
    return kind(**unset | given)


def _has_zero_points(runtime: object, into: object, given: Mapping[str, Any]) -> bool:
    """Return whether integers have zero points that were not asked for: in compressed-tensors for vLLM, up to 4 bits.

    Symmetric grids of equal size, which have smaller groups, lose more, see docs/log.md.
    """
    bits = given.get("bits", DEFAULT_BITS)
    few = isinstance(bits, int | float) and bits <= ZERO_POINT_BITS
    return runtime == "vllm" and into in (None, "compressed-tensors") and few and not given.keys() & {"grid", "minimum"}


def fitting_group(inputs: Iterable[int], most: int = DEFAULT_GROUP_SIZES[0]) -> int:
    """Return the largest of `most`, `most` / 2, `most` / 4, ... that divides all numbers of inputs, at least 16.

    16 is the smallest group that kernels take.
    """
    return max(DEFAULT_GROUP_SIZES[-1], gcd(most, *inputs))
