"""quantize(): the public function, which checks its arguments, saves a model object and calls `quantize_folder`.

With tuning, two verbs run one after the other: `quantize` writes an ordinary checkpoint OUT.untuned, `tune` reads it and
writes OUT, and OUT.untuned is deleted. If the command is stopped and repeated, either verb is resumed.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import as_folder, model_label, split_calibration
from nearplane.calibration.text_files import check_text
from nearplane.calibration.windows import calibration_windows
from nearplane.errors import NearplaneError, RecipeError
from nearplane.models.model import Model
from nearplane.models.pretrained import find_folder
from nearplane.planning.folder_size import check_disk
from nearplane.planning.like import with_like
from nearplane.planning.start import Job, Options, open_resolved
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, read_record
from nearplane.system.arguments import ComputeDtype, checked
from nearplane.system.device import Device
from nearplane.system.memory import return_large_blocks
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import refuse_unfinished
from nearplane.system.progress import Progress, say_compiling, silent
from nearplane.system.ranks import current
from nearplane.tuning.checkpoint import check_layers, check_tunable
from nearplane.verbs.early_checks import check_quantize, check_recipe
from nearplane.verbs.follow import Follower, files_of, on_all_ranks, run_on_rank_0
from nearplane.verbs.quantize import quantize_folder
from nearplane.verbs.tune import tune

log = logging.getLogger(__name__)


@checked("model")
@on_all_ranks()
def quantize(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    compute_dtype: ComputeDtype = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    memory: str | int | None = None,
    device_memory: str | int | None = None,
    **spellings: Any,
) -> RunRecord:
    """Quantize a language model into a checkpoint that other programs load.

    Args:
        model: Local folder of safetensors, hub id, or model object; an object is saved to a temporary folder first.
        out: Folder to write.
        recipe: Options of the run. Or pass them as keywords, for example `bits=4, group_size=128`; see `spellings`.
        tokenizer: Tokenizer of a model object. Without one, `out` holds no tokenizer and calibration needs token ids.
        device: Device to compute on: "auto" (the GPU if there is one), "cpu", "cuda" or "cuda:1".
        compute_dtype: Dtype in which blocks run. "auto": float32, but bfloat16 for models in bfloat16 on a GPU. float16
            is faster than float32 on a GPU, but activations may overflow. A dtype that is narrower than the model's also
            rounds its weights.
        overwrite: Whether to replace a checkpoint in `out`, once the new one is complete.
        trust_remote_code: Whether to run model code that comes with the checkpoint.
        progress: Display that wraps an iterator: (items, label, total) -> items. "nearplane.system.progress" logs as well.
        memory: Limit of the memory of the process, in bytes or as "12GB". To stay below it, the run repeats forward passes
            instead of pausing them, then keeps hidden states in a file, then uses smaller batches. None: no limit on the
            CPU; with a GPU, what is free.
        device_memory: Limit of the memory on the GPU. To stay below it, the run repeats forward passes, then keeps hidden
            states on the host. None: what is free there.
        spellings: Fields of `Recipe`, or other tools' names for them; see `Recipe.from_spellings`. Instead of a text file,
            `calibration` may be a list of texts, token ids (windows, seqlen), what a tokenizer returns (input_ids with
            their attention_mask; masked positions are left out, and all other tokens packed into windows as long as the
            rows), for vision models pixel values (images, channels, height, width), or for speech recognition
            (input_features, token_ids): sound (windows, mel bins, frames) from Whisper's feature extractor, and
            transcripts (windows, seqlen) as for `labels=`, with tokens such as <|en|> but without the one that starts
            the decoder.

    Returns:
        The run record, which is also written to `out/nearplane.json`.

    Raises:
        NearplaneError: A subclass names the cause. `out` is then unchanged, and files written so far are in
            `out.unfinished`, see `system/output_folder.py`.
    """
    say_compiling()
    given, spellings = split_calibration(spellings)
    if recipe is not None and spellings:
        raise RecipeError(f"Pass a recipe or keywords, not both (found a recipe and {', '.join(spellings)}).")
    recipe = recipe or Recipe.from_spellings(**spellings)
    place = Device.named(device, compute_dtype)
    if place.on_cpu and device_memory is not None:
        raise RecipeError(
            f"--device-memory limits the memory on a GPU, but this run computes on {place}. Use --memory."
        )
    options = Options(
        name=model_label(model),
        given=given,
        device=place,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        progress=progress,
        limits=check_quantize(model, out, recipe, overwrite=overwrite, memory=memory, device_memory=device_memory),
    )
    calibrates_on_text = (given is None or given.tokens is None) and recipe.scheme.calibrated
    if calibrates_on_text and tokenizer is None and isinstance(model, torch.nn.Module):
        raise RecipeError(
            "A model object has no tokenizer: pass tokenizer=, or token ids (windows, seqlen) as calibration."
        )
    return_large_blocks()
    if given is None and recipe.scheme.calibrated and recipe.calibration.calibration is not None:
        check_text(recipe.calibration.calibration)
    with as_folder(model, tokenizer) as folder:
        recipe = recipe if given is None else given.recorded(recipe)
        if recipe.tune != "none" and current().world > 1:
            raise RecipeError(
                "--tune network trains in one process: a step needs the one before. Quantize with several processes, then run "
                "nearplane tune with one."
            )
        recipe, like = with_like(folder, recipe, trust_remote_code=trust_remote_code)
        options = replace(options, like=like)
        quantizes = quantize_folder if recipe.tune == "none" else _then_tuned
        follower = Follower(partial(_opened, folder, recipe, trust_remote_code), place)
        options_of = {f"recipe ({name})": value for name, value in asdict(recipe).items()}
        same = {"model": files_of(Path(folder))} | options_of
        return run_on_rank_0(partial(quantizes, folder, Path(out), recipe, options), follower, same)


def _opened(folder: str, recipe: Recipe, trust_remote_code: bool) -> Model:
    return open_resolved(folder, recipe, trust_remote_code=trust_remote_code)[0]


def _then_tuned(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    """Quantize into OUT.untuned, tune that checkpoint into `out`, and delete it.

    Args:
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
        place.refuse_stopped()  # not of this command, whose tuning begins later
        _check_tunable(folder, out, recipe, options)
        quantize_folder(folder, solved, recipe, options)
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


def _check_tunable(folder: str, out: Path, recipe: Recipe, options: Options) -> None:
    """Raise before the solve the errors that `tune` would raise after it."""
    model, settled = open_resolved(folder, recipe, trust_remote_code=options.trust_remote_code)
    check_recipe(settled.recipe, "This run")
    check_disk(out, model, settled, copies=2)  # OUT.untuned is kept until OUT is complete
    check_layers(model, "This run")
    windows = calibration_windows(model, settled.recipe, options.given)
    job = Job(model=model, asked=recipe, plan=settled, windows=windows, options=options)
    check_tunable(model, settled, options.given, job.record(), options.device)


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
