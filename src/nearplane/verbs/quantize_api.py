"""quantize(): what users call. Its arguments are checked, a model object is saved to a folder, and `quantize_folder` does the work.

Where tuning is asked for, the two verbs run one after the other: OUT.untuned is the checkpoint that `quantize` writes and `tune`
reads, an ordinary one; it is deleted once OUT is whole. The same command, given again after it was stopped, goes on with either.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import as_folder, called, taken
from nearplane.calibration.windows import calibration_windows
from nearplane.errors import NearplaneError, RecipeError
from nearplane.formats.container import check_apart
from nearplane.models.pretrained import find_folder
from nearplane.planning.start import Job, Options, open_settled
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.sizes import bytes_in
from nearplane.record.record import RunRecord, read_record
from nearplane.system.device import Device
from nearplane.system.memory import give_back_large
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_there
from nearplane.system.progress import Progress, say_compiling, silent
from nearplane.system.safetensors_files import refuse_unfinished
from nearplane.tuning.checkpoint import check_layers, check_recipe, check_tunable
from nearplane.verbs.quantize import quantize_folder
from nearplane.verbs.tune import tune

log = logging.getLogger(__name__)


def quantize(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    memory: str | int | None = None,
    **spellings: Any,
) -> RunRecord:
    """Quantize a language model into a checkpoint that other programs load.

    Args:
        model: a local folder of safetensors, or a hub id; or a model object, which is saved to a temporary folder and read from it.
        out: folder to write.
        recipe: what to do; or give its fields (or other tools' names for them) as keywords: `bits=4, group_size=128, ...`.
        tokenizer: of a model object; without one `out` holds no tokenizer, and the calibration must be tokens.
        device: where to compute; auto is the GPU where there is one.
        overwrite: replace what is in `out`, once the new checkpoint is whole.
        trust_remote_code: run model code that comes with the checkpoint.
        progress: wraps the iterator over layers: (items, label, total) -> items. Whatever it is, how far the run is goes to
            the logger "nearplane.system.progress".
        memory: that the run may take on the CPU at the most, in bytes or as "12GB": forwards are then repeated instead of paused,
            hidden states lie in a file, and fewer windows pass at a time, in this order; None: as is fastest.
        spellings: see `Recipe.from_spellings`. `calibration` may also be a list of texts, token ids (windows, seqlen), or of
            vision models pixel values (images, channels, height, width), or of models that write down what they hear
            (input_features, token_ids): sound, (windows, mel bins, frames) as Whisper's feature extractor makes it, and (windows,
            seqlen) what is said in each, as for `labels=`, with <|en|> and its like but without the token that starts the decoder.

    Returns:
        What was done and measured; also in `out/nearplane.json`.

    Raises:
        NearplaneError: of the kind that names the cause. What was in `out` is then as it was; what was written so far lies in
            `out.unfinished`, see `system/output_folder.py`.
    """
    say_compiling()
    given, spellings = taken(spellings)
    if recipe is not None and spellings:
        raise RecipeError(f"Give a recipe or keywords, not both (found a recipe and {', '.join(spellings)}).")
    recipe = recipe or Recipe.from_spellings(**spellings)
    options = Options(
        name=called(model),
        given=given,
        device=Device.named(device),
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        progress=progress,
        memory=None if memory is None else bytes_in(str(memory), "memory"),
    )
    texts = (given is None or given.tokens is None) and recipe.scheme.calibrated
    if texts and tokenizer is None and isinstance(model, torch.nn.Module):
        raise RecipeError(
            "A model object comes without tokenizer: pass tokenizer=, or token ids (windows, seqlen) as calibration."
        )
    if options.memory is not None and recipe.tune != "none":
        raise RecipeError(
            "--memory limits what quantizing takes, and tuning takes what it needs. Quantize with --memory and --tune none, "
            "then tune what came out with nearplane tune."
        )
    give_back_large()
    if given is None and recipe.scheme.calibrated and recipe.calibration.calibration is not None:
        check_there(recipe.calibration.calibration)
    with as_folder(model, tokenizer) as folder:
        recipe = recipe if given is None else given.recorded(recipe)
        quantizes = quantize_folder if recipe.tune == "none" else _then_tuned
        return quantizes(folder, Path(out), recipe, options)


def _then_tuned(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    """Quantize into OUT.untuned, tune that into `out`, and delete it.

    Args:
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
        _check_tunable(folder, recipe, options)
        quantize_folder(folder, solved, recipe, options)
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


def _check_tunable(folder: str, recipe: Recipe, options: Options) -> None:
    """Refuse before the solve what `tune` would refuse after it."""
    model, settled = open_settled(folder, recipe, trust_remote_code=options.trust_remote_code)
    check_recipe(settled, "This run")
    check_layers(model, "This run")
    windows = calibration_windows(model, settled, options.given)
    job = Job(model=model, asked=recipe, recipe=settled, windows=windows, options=options)
    check_tunable(model, settled, options.given, job.record(), options.device)


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
