"""How matrices are quantized, as frozen data: on a grid of a fixed number of bits, in the blocks
of llama.cpp, or entropy-coded at any rate.

Three kinds of scheme, each with only its own options. Needs no torch; what the options lead to is in `matrix/`.
"""

from __future__ import annotations

from typing import Any

from nearplane.errors import RecipeError
from nearplane.lattice.number_formats import TYPES, find_format
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat
from nearplane.recipe.grids import BITS, CHOSEN, BlockScheme, GridScheme, fitting_group, spelled_out
from nearplane.recipe.rates import RateScheme
from nearplane.recipe.scheme import (
    FITTING,
    SWEEP_DAMP,
    UNCALIBRATED,
    Allocation,
    Format,
    Order,
    Scheme,
    Solver,
    names_of,
    one_of,
    within,
)

__all__ = [
    "CHOSEN",
    "FITTING",
    "SWEEP_DAMP",
    "UNCALIBRATED",
    "Allocation",
    "AnyScheme",
    "BlockScheme",
    "Format",
    "GridScheme",
    "Order",
    "RateScheme",
    "Scheme",
    "Solver",
    "fitting_group",
    "names_of",
    "one_of",
    "scheme_of",
    "within",
]

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
    in_blocks = FILE_FORMATS.get(into, FileFormat()).for_llama_cpp
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
    for name in sorted(given.keys() - names_of(kind)):
        if coded:
            raise RecipeError(
                f"{name} is {given[name]!r}, but entropy-coded weights have no fixed grid; leave it out, or leave out --rate "
                f"and --size."
            )
        if blocks:
            raise RecipeError(
                f"{name} is {given[name]!r}, but {said} says all of how weights are stored: leave out one of them."
            )
        raise RecipeError(
            f"{name} is {given[name]!r}, but only entropy-coded weights have that; give --rate or --size, or leave it out."
        )
    nothing = {name: None for name, value in options.items() if value is None and name in names_of(kind)}
    return kind(**nothing | given)
