"""How matrices are quantized, as frozen data: on a grid of a fixed number of bits, in the blocks
of llama.cpp, or entropy-coded at any rate.

Three kinds of scheme, each with only its own options. Needs no torch; what the options lead to is in `matrix/`.
"""

from __future__ import annotations

from typing import Any

from nearplane.errors import RecipeError
from nearplane.schemes.base import (
    FITTING,
    SWEEP_DAMP,
    UNCALIBRATED,
    Allocation,
    Device,
    Format,
    LayerGrid,
    Method,
    Order,
    Scheme,
    Solver,
    names_of,
    one_of,
    within,
)
from nearplane.schemes.grids import CHOSEN, BlockScheme, GridScheme, fitting_group
from nearplane.schemes.rates import RateScheme

__all__ = [
    "CHOSEN",
    "FITTING",
    "SWEEP_DAMP",
    "UNCALIBRATED",
    "Allocation",
    "AnyScheme",
    "BlockScheme",
    "Device",
    "Format",
    "GridScheme",
    "LayerGrid",
    "Method",
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


def scheme_of(**options: Any) -> AnyScheme:
    """Return the scheme that options are of: entropy-coded with a rate or size, of llama.cpp's grids with one, else on a grid.

    Raises:
        RecipeError: an option is one that only another kind has, or none at all.
    """
    coded = options.get("rate") is not None or options.get("size") is not None
    blocks = options.get("grid") is not None
    if coded and blocks:
        name = "rate" if options.get("rate") is not None else "size"
        raise RecipeError(
            f"grid is {options['grid']!r} and {name} {options[name]!r}, but entropy-coded weights have no fixed grid: leave out "
            f"one of them."
        )
    kind: type[AnyScheme] = RateScheme if coded else BlockScheme if blocks else GridScheme
    known = {name for each in (GridScheme, BlockScheme, RateScheme) for name in names_of(each)}
    if unknown := options.keys() - known:
        raise RecipeError(
            f"{min(unknown)} is no option of how layers are quantized; expected one of {', '.join(sorted(names_of(kind)))}. What "
            f"holds for the whole run is given once."
        )
    for name in sorted(options.keys() - names_of(kind)):
        if options[name] is None:
            continue
        if coded:
            raise RecipeError(
                f"{name} is {options[name]!r}, but entropy-coded weights have no fixed grid; leave it out, or leave out --rate "
                f"and --size."
            )
        if blocks:
            raise RecipeError(
                f"{name} is {options[name]!r}, but --grid {options['grid']} says all of how weights are stored: leave out one of "
                f"them."
            )
        raise RecipeError(
            f"{name} is {options[name]!r}, but only entropy-coded weights have that; give --rate or --size, or leave it out."
        )
    return kind(**{name: value for name, value in options.items() if name in names_of(kind)})
