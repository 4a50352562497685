"""Quantize, then tune, as `--tune` does: the two verbs one after the other.

OUT.untuned is the checkpoint that `quantize` writes and `tune` reads, an ordinary one; it is deleted once OUT is whole. The same
command, given again after it was stopped, goes on with either.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from nearplane.errors import NearplaneError, RecipeError
from nearplane.formats.container import check_apart
from nearplane.models.pretrained import find_folder
from nearplane.planning.start import Options
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, read_record
from nearplane.system.output_folder import Unfinished
from nearplane.system.safetensors_files import refuse_unfinished
from nearplane.verbs.tune import tune

log = logging.getLogger(__name__)


def then_tuned(
    quantize: Callable[[str, Path, Recipe, Options], RunRecord],
    folder: str,
    out: Path,
    recipe: Recipe,
    options: Options,
) -> RunRecord:
    """Quantize into OUT.untuned, tune that into `out`, and delete it.

    Args:
        quantize: writes a checkpoint, given the model, the folder to write, the recipe and the options.
        folder: the model: a folder, or its name on the hub.
        out: folder to write.
        recipe: that asks for tuning.
        options: of the run.

    Raises:
        RecipeError: OUT.untuned is there, and this command did not write it. Nothing in it is replaced.
        NearplaneError: of the kind that names the cause.
    """
    solved, given = Path(f"{out.resolve()}.untuned"), options.given
    place = Unfinished(out, overwrite=options.overwrite)  # refuses now what tuning would refuse after the solve
    model = find_folder(folder, trust_remote_code=options.trust_remote_code)
    for written in (out, place.folder):
        check_apart(written, model)
    if not solved.is_symlink() and (not solved.exists() or (solved.is_dir() and not any(solved.iterdir()))):
        quantize(folder, solved, recipe, options)
    elif reason := _differing(solved, recipe, options):
        raise RecipeError(
            f"{solved} is where this run would keep the checkpoint until it is tuned, and this command did not write it: {reason} "
            f"Move it away or delete it, or tune it with nearplane tune."
        )
    else:
        log.info("going on with tuning: a run that was stopped left %s", solved)
    left = f"What was solved is in {solved}; the same command, or nearplane tune, goes on from there."
    try:
        record = tune(
            solved,
            out,
            against=folder,
            calibration=None if given is None else given.tokens if given.texts is None else given.texts,
            device=str(options.device),
            overwrite=options.overwrite,
            trust_remote_code=options.trust_remote_code,
            progress=options.progress,
        )
    except NearplaneError as error:
        raise type(error)(f"{error} {left}") from error
    except BaseException as error:  # stopped from outside, or out of memory
        error.add_note(left)
        raise
    try:
        shutil.rmtree(solved)
    except OSError as error:
        log.warning("%s was tuned into %s and could not be deleted (%s). Delete it.", solved, out, error)
    return record


def _differing(solved: Path, recipe: Recipe, options: Options) -> str:
    """Return why a folder is not what this command's solve writes, as a sentence; empty if it is."""
    try:
        refuse_unfinished(solved)
        record = read_record(solved)
    except NearplaneError as error:
        return str(error)
    if record.tuning is not None:
        return "it is tuned already."
    if (record.source, record.recipe) != (options.name, recipe):
        return "its model or its options are others."
    return ""
