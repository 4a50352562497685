"""Checks of a verb's arguments that need no torch, so that the command line makes them before it loads torch.

Each verb makes the same checks first, for calls from Python. What depends on the network is checked by the verb.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nearplane.calibration.text_files import check_named
from nearplane.calibration.text_mixes import check_shares, texts_of
from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import DEFAULT_GROUP_SIZES
from nearplane.recipe.schemes import GridScheme
from nearplane.recipe.sizes import Limits
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path, folder_named

DENSE = "safetensors"  # format of `export` for decoded weights
MIN_LLAMA_CPP_SEQLEN = 3  # tokens of a window whose second half has a token to score


def check_quantize(
    model: Any,
    out: str | Path,
    recipe: Recipe,
    *,
    overwrite: bool,
    memory: str | int | None,
    device_memory: str | int | None = None,
) -> Limits:
    """Refuse arguments of `quantize`, except its text, of which only the shares of a mix; return the limits of memory."""
    limits = Limits.of(memory, device_memory)
    if limits.host is not None and recipe.tune != "none":
        raise RecipeError(
            "--memory does not limit tuning. Leave out --tune, and tune the checkpoint with nearplane tune."
        )
    check_named(_path(model))
    _check_number_formats(recipe)
    if recipe.like is not None:
        check_path("--like", recipe.like)
        if not Path(recipe.like).is_file():
            raise RecipeError(f"--like {recipe.like} is not a file. Pass a GGUF by llama.cpp's convert_hf_to_gguf.py.")
    if recipe.calibration.samples is not None:  # else the model decides
        check_shares(texts_of(recipe.calibration.calibration), recipe.calibration.samples)
    Unfinished(Path(out), overwrite=overwrite, sources=_folders(model))
    return limits


def _check_number_formats(recipe: Recipe) -> None:
    """Refuse schemes whose weights no layer of a file of this format can hold.

    Raises:
        RecipeError: The format does not hold them; the message says which it holds.
    """
    schemes = [("all layers", recipe.scheme), *((f"layers {each.pattern!r}", each.scheme) for each in recipe.layers)]
    for name, scheme in schemes:
        schemes_of = [scheme.grouped([size]) for size in DEFAULT_GROUP_SIZES]  # equal unless layers decide the size
        if recipe.allocate != "uniform":
            grids = [each for each in schemes_of if isinstance(each, GridScheme)]
            schemes_of = [each.with_bits(bits) for bits in recipe.files.bits for each in grids] or schemes_of
        formats = [each.number_format for each in schemes_of]
        if all(map(recipe.files.fault, formats)):
            recipe.files.check(name, formats[0])


def _path(value: Any) -> Any:
    """Return a path; None for None and for an object in place of a file."""
    return value if isinstance(value, str | os.PathLike) else None


def _folders(model: Any) -> list[Path]:
    """Return the folder of a model in a list, which is empty for hub ids and model objects."""
    folder = None if _path(model) is None else folder_named(model)
    return [] if folder is None else [folder]
