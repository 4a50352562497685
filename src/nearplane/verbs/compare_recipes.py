"""Recipes of the methods that `compare` runs, and the bits per weight that each method can have.

    rtn-mse         weights rounded to nearest, b-bit symmetric groups, steps of least p-norm error; no calibration
    gptq-mse        the same grids, GPTQ in its natural order, no corrected targets
    rtn-huffman     weights rounded to nearest with one step per matrix and no limits; one Huffman code per matrix
    gptq-huffman    the same coder, GPTQ in its natural order, no corrected targets (HPTQ)
    nearplane-grid  the grids of the first two, with all defaults of nearplane
    nearplane       entropy-coded, with all defaults: steps by water-filling, rates of layers by equal slope

The first four are the rows of Table 1 in Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane
Algorithm" (2025). Order and damping, which it does not state for them, are GPTQ's own defaults.

4.125 bits on a grid mean codes of 4 bits and a 16-bit step for every 128 weights. Groups that do not divide the layers are
made smaller, and models in float32 get 32-bit steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from nearplane.errors import RecipeError, first_few
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.request import check_request, resolved
from nearplane.recipe.file_formats import Format
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.recipe import Calibration, Recipe, Way
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import GridScheme, fitting_group
from nearplane.verbs.hptq import hptq_recipe

HUFFMAN: tuple[Way, ...] = ("rtn-huffman", "gptq-huffman")
log = logging.getLogger("nearplane")
GROUPS = (32, 64, 128, 256, 512, 1024)  # powers of two, so that the largest fitting one is a greatest common divisor
Recipes = dict[tuple[float, Way], tuple[Recipe, str]]  # of one model: (bits, method) -> (recipe, note)


def recipes_for(
    opened: Mapping[str, Model], methods: Sequence[Way], bits: Sequence[float], calibration: Calibration
) -> dict[str, Recipes]:
    """Return for each model the recipe of every method and number of bits, with its note.

    Raises:
        RecipeError: Some of them are impossible; the message names all of these.
    """
    recipes: dict[str, Recipes] = {}
    refused: dict[tuple[float, str], list[str]] = {}  # methods, by bits and reason
    for name, model in opened.items():
        for asked, method in product(bits, methods):
            try:
                recipe, note = recipe_for(method, asked, model.layers, calibration)
                check_request(model, resolved(model, recipe))
                recipes.setdefault(name, {})[asked, method] = recipe, note
            except RecipeError as error:
                names = refused.setdefault((asked, str(error)), [])
                names += [method] * (method not in names)
    if refused:
        reasons = [f"{', '.join(names)} at {asked:g} bits: {error}" for (asked, error), names in refused.items()]
        raise RecipeError(f"{first_few(reasons, between=' ')} Change --bits or --methods; nothing was measured.")
    notes = {(asked, note) for each in recipes.values() for (asked, _), (_, note) in each.items() if note}
    for asked, note in sorted(notes):  # before anything is measured: they may not be what was meant
        log.info("--bits %g: %s", asked, note)
    return recipes


def recipe_for(method: Way, bits: float, layers: Iterable[Layer], calibration: Calibration) -> tuple[Recipe, str]:
    """Return the recipe of a method at `bits` per weight, and a note on any deviation.

    Raises:
        RecipeError: The method does not support these bits.
    """
    if method == "nearplane":
        return Recipe(scheme=RateScheme(rate=bits), calibration=calibration), ""
    if method in HUFFMAN:
        return hptq_recipe(bits, calibration, calibrated=method == "gptq-huffman"), ""
    solver: Solver = "round-to-nearest" if method.startswith("rtn") else "nearest-plane"
    layers = list(layers)
    width, group_size, note = fixed_grid(bits, [layer.shape[1] for layer in layers])
    scheme = GridScheme(bits=width, group_size=group_size)
    if method != "nearplane-grid":
        scheme = replace(scheme, order="natural", solver=solver, correct=False, polish=0, rounds=0)
    linear = all(layer.kind == "Linear" for layer in layers)
    format: Format = "compressed-tensors" if linear else "gptq"  # gptq supports GPT-2's Conv1D too
    return Recipe(scheme=scheme, format=format, allocate="uniform", calibration=calibration), note


def fixed_grid(bits: float, columns: Sequence[int]) -> tuple[int, int | None, str]:
    """Return width, group size and a note for a grid of `bits` = width + 16 / group size.

    Without a fraction, a row has one step. Groups that do not divide the inputs of every layer, `columns`, are halved until
    they do, down to 16; if that does not fit either, a row has one step.

    Raises:
        RecipeError: No grid has these bits.
    """
    width = math.floor(bits) if math.isfinite(bits) else 0
    fraction = bits - width
    group_size = round(16 / fraction) if fraction > 2**-20 else None
    if not 2 <= width <= 8 or (group_size is not None and (group_size not in GROUPS or 16 / group_size != fraction)):
        raise RecipeError(
            f"no fixed grid has {bits:g} bits: expected 2 to 8, plus 16 / group for groups of {', '.join(map(str, GROUPS))}."
        )
    if group_size is None:
        return width, None, f"one step a row; {width}.125 bits are groups of 128"
    if all(n % group_size == 0 for n in columns):
        return width, group_size, ""
    fitting = fitting_group(columns, group_size)
    unfit = next((n for n in columns if n % fitting), None)
    if unfit is not None:
        return width, None, f"one step a row: groups of {fitting} or more do not divide {unfit} inputs"
    least = next(n for n in columns if n % group_size)
    return width, fitting, f"groups of {fitting}: {group_size} does not divide {least} inputs"
