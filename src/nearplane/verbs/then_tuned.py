"""Quantization with tuning: two verbs run one after the other.

`quantize` writes an ordinary checkpoint OUT.untuned, `tune` reads it and writes OUT, and OUT.untuned is deleted. If the
command is stopped and repeated, either verb is resumed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nearplane.calibration.windows import calibration_windows
from nearplane.errors import NearplaneError, RecipeError
from nearplane.models.model import Model
from nearplane.models.pretrained import find_folder
from nearplane.planning.folder_size import check_disk
from nearplane.planning.request import open_resolved
from nearplane.planning.run import Job, Options
from nearplane.planning.tuning_cost import tuning_cost
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.refusals import budget_of
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import refuse_unfinished
from nearplane.system.progress import phase
from nearplane.tuning.checkpoint import check_layers, check_tunable, samples_to_tune_on
from nearplane.verbs.checkpoint_requests import check_recipe
from nearplane.verbs.tune import tune

log = logging.getLogger(__name__)


def then_tuned(
    quantizes: Callable[[str, Path, Recipe, Options], RunRecord],
    folder: str,
    out: Path,
    recipe: Recipe,
    options: Options,
) -> RunRecord:
    """Quantize into OUT.untuned, tune that checkpoint into `out`, and delete it.

    Args:
        quantizes: Function that quantizes a folder, see `quantize_folder`.
        folder: Folder or hub id of the model.
        out: Folder to write.
        recipe: Recipe with tuning.
        options: Options of the run.

    Raises:
        RecipeError: OUT.untuned exists and is not from this command. It is left unchanged.
        NearplaneError: A subclass names the cause.
    """
    solved, given = Path(f"{out.resolve()}.untuned"), options.given
    model = find_folder(folder, trust_remote_code=options.trust_remote_code)
    place = Unfinished(
        out, overwrite=options.overwrite, sources=[model]
    )  # raises now what tuning would raise after the solve
    if not solved.is_symlink() and (not solved.exists() or (solved.is_dir() and not any(solved.iterdir()))):
        with phase(options.progress, "opening the model"):
            opened, settled = open_resolved(folder, recipe, trust_remote_code=options.trust_remote_code)
        refuse_untunable(opened, settled, out)
        windows = calibration_windows(opened, settled.recipe, options.given, options.device, options.progress)
        if not has_time(Job(model=opened, asked=recipe, plan=settled, windows=windows, options=options)):
            return quantizes(folder, out, recipe, options)
        place.refuse_stopped()  # not of this command, whose tuning begins later
        quantizes(folder, solved, recipe, options)
    elif difference := _differing(solved, recipe, options):
        raise RecipeError(
            f"{solved}, where the checkpoint to tune is written, is not from this command: {difference} Delete that folder, or "
            f"tune it with nearplane tune."
        )
    else:
        log.info("resuming with tuning: a stopped run left %s", solved)
    hint = f"The quantized checkpoint is in {solved}. Repeat the command to tune it."
    try:
        record = tune(
            solved,
            out,
            against=folder,
            calibration=None if given is None else given.tokens if given.texts is None else given.texts,
            device=str(options.device),
            compute_dtype=options.device.asked_dtype,
            budget=budget_of(recipe.tune),
            memory=options.limits.host,
            device_memory=options.limits.device,
            overwrite=options.overwrite,
            trust_remote_code=options.trust_remote_code,
            progress=options.progress,
        )
    except NearplaneError as error:
        raise type(error)(f"{error} {hint}") from error
    except BaseException as error:  # stopped by a signal, or out of memory
        error.add_note(hint)
        raise
    try:
        shutil.rmtree(solved)
    except OSError as error:
        log.warning("%s was tuned into %s but could not be deleted (%s). Delete that folder.", solved, out, error)
    return record


def refuse_untunable(model: Model, settled: Plan, out: Path) -> None:
    """Raise what tuning would raise after the solve, whatever the text.

    Raises:
        RecipeError: The recipe, or the model, cannot be tuned, or the disk has no room for both checkpoints.
    """
    check_recipe(settled.recipe, "This run")
    check_disk(out, model, settled, copies=2)  # OUT.untuned is kept until OUT is complete
    check_layers(model, "This run")


def has_time(job: Job) -> bool:
    """Return whether the time that is allowed suffices for tuning, and say if it does not.

    Raises:
        NearplaneError: The text is too short for tuning, or memory does not suffice.
    """
    model, settled, options = job.model, job.plan, job.options
    record, schedule = job.record(), None
    if (budget := budget_of(settled.recipe.tune)) is not None:
        samples = samples_to_tune_on(model, record)
        cost = tuning_cost(model, settled, record, options.device, samples=samples, seqlen=record.seqlen)
        if (schedule := cost.schedule(budget)) is None:
            log.warning(
                "--tune auto=%g allows too little time, so that nothing is tuned: %s. Use --tune auto=%g.",
                budget,
                cost.least(),
                cost.enough,
            )
            return False
    check_tunable(model, settled, options.given, record, options.device, options.limits, schedule)
    return True


def _differing(solved: Path, recipe: Recipe, options: Options) -> str:
    """Return a sentence on how a folder differs from the output of this command; empty if it does not."""
    try:
        refuse_unfinished(solved)
        record = read_record(solved)
    except NearplaneError as error:
        return str(error)
    if record.tuning is not None:
        return "it is tuned already."
    asked, ran_in = options.device.asked_dtype, record.compute_dtype.replace("auto", "float32")
    samples = recipe.calibration.samples or record.recipe.calibration.samples  # the default is a number in the record
    recipe = replace(recipe, calibration=replace(recipe.calibration, samples=samples))
    if (record.source, record.recipe) != (options.name, recipe) or asked not in ("auto", ran_in):
        return "its model or options differ."
    return ""
