"""Refusals of options that do not go together, of those that few runs use: a file of --like, and --activations.

Needs no torch. Contradictions between other options are refused by the schemes and the recipe themselves.
"""

from __future__ import annotations

import math

from nearplane.errors import RecipeError
from nearplane.number_formats import FLOATS
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat, Format
from nearplane.recipe.scheme import Activations
from nearplane.recipe.schemes import AnyScheme

DEFAULT_BUDGET = 3.0  # of tuning, as a multiple of the time of the quantization
MAX_BUDGET = 1000.0


def budget_of(tune: str) -> float | None:
    """Return the time that --tune auto or --tune auto=FACTOR allows as a multiple of the quantization's; None for others.

    Raises:
        RecipeError: It is no known word, or no such factor.
    """
    word, given, factor = tune.partition("=")
    if tune in ("none", "network"):
        return None
    try:
        budget = float(factor) if given else DEFAULT_BUDGET
    except ValueError:
        budget = math.nan
    if word != "auto" or not 0 < budget <= MAX_BUDGET:
        raise RecipeError(f"tune is {tune!r}; expected none, network, auto, or auto=FACTOR with a factor as 3.")
    return budget


def check_like(like: str, format: Format | None, pre: str | None, tune: str) -> None:
    """Refuse options that contradict a file whose header is taken.

    Raises:
        RecipeError: The message names them.
    """
    if not FILE_FORMATS[format].one_file:
        raise RecipeError(f"--like is for a GGUF, but the format is {format}. Use --format gguf, or leave out --like.")
    if pre is not None:
        raise RecipeError(f"--pre is {pre!r}, but --like takes the tokenizer of {like}. Leave out one of them.")
    if tune != "none":
        raise RecipeError(
            "--tune does not go with --like, whose file keeps the norms of the original. Leave out one of them."
        )


def check_activations(activations: Activations, scheme: AnyScheme, format: Format | None, allocate: str | None) -> None:
    """Refuse activations that no reader multiplies such weights with.

    Args:
        activations: Numbers to which runtimes round the inputs of layers.
        scheme: The scheme of these layers.
        format, allocate: Fields of the recipe.

    Raises:
        RecipeError: The weights, the format or another option do not go with them; the message says what does.
    """
    given = f"--activations {activations}"
    if not FILE_FORMATS[format].rounds_inputs:
        raise RecipeError(f"{given} is for compressed-tensors, but the format is {format}. Leave out one of them.")
    names = ["int8"] if activations == "int8" else []
    names += [each.name for each in FLOATS if each.inputs is not None and each.inputs.name == activations]
    if getattr(scheme, "group_size", None) == "auto" or allocate == "slope":
        found, inputs = "other integers", None
    else:
        found, inputs = scheme.number_format.name, scheme.number_format.inputs
    if inputs is None or inputs.name != activations:
        advice = "none" if inputs is None else inputs.name
        raise RecipeError(
            f"{given} is for --grid {' or '.join(names)}, but weights are {found}, and no reader multiplies these two. Use "
            f"such a grid, or --activations {advice}; --layer 'PATTERN=grid:GRID,activations:{activations}' sets both for some "
            f"layers."
        )
    if inputs.global_scale and not scheme.calibrated:
        raise RecipeError(
            f"{given} with {found} needs calibration, which measures the largest input of each layer, but solver "
            f"{scheme.solver!r} uses none."
        )


def check_kv_cache(kv_cache: str, scheme: AnyScheme, files: FileFormat, format: str) -> None:
    """Refuse scales of a key-value cache for which the files have no place, and without text to measure them on.

    Raises:
        RecipeError: The message names the option.
    """
    if not files.rounds_inputs:
        raise RecipeError(
            f"--kv-cache {kv_cache} is for compressed-tensors: {format} has no place for its scales. Leave out --kv-cache."
        )
    if not scheme.calibrated:
        raise RecipeError(
            f"--kv-cache {kv_cache} needs calibration, which measures keys and values, but solver {scheme.solver!r} uses none."
        )
