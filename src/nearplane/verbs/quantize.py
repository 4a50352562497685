"""The main path of nearplane: quantize the model in a folder into a checkpoint. Read this file first.

A model is quantized one block at a time. Its weights stay on disk. Hidden states of the original and of the quantized
network pass through the block that is in memory, and each layer is written as soon as it is solved.

`quantize` checks what it is asked and calls `quantize_folder`. A run uses these files, in this order: `planning/request.py`
opens the model, `planning/run.py` plans the run, `calibration/walk.py` yields the stages, `solve_stage.py` solves their layers,
`run.py` passes it to the checkpoint, and `formats/container.py` writes the files and renames the folder to OUT.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from nearplane.calibration.given import Given
from nearplane.calibration.text_files import check_text
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import Windows, calibration_windows, check_tokens
from nearplane.errors import RecipeError
from nearplane.models.model import Model
from nearplane.models.model_objects import as_folder, check_model
from nearplane.planning.folder_size import check_disk
from nearplane.planning.format_mix import with_mix
from nearplane.planning.journal import Journal
from nearplane.planning.like_file import with_like
from nearplane.planning.request import open_resolved, say_types
from nearplane.planning.run import Job, Options, check_limit, container_for, start_run
from nearplane.planning.solve_stage import solve_stage
from nearplane.planning.tokens_in_file import check_tokens_in_file
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.memory import return_large_blocks
from nearplane.system.paths import name_of, path_in, refuse_tokenizer
from nearplane.system.progress import phase, say_compiling
from nearplane.system.ranks import Ranks
from nearplane.verbs.follow import Follower, files_of, on_all_ranks, run_on_rank_0
from nearplane.verbs.quantize_request import QuantizeRequest
from nearplane.verbs.then_tuned import then_tuned

T = TypeVar("T")


def quantize_folder(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    """Quantize the model in a folder or on the hub into the checkpoint `out`, one block at a time.

    Returns:
        The run record, which is also written to `out/nearplane.json`.

    Raises:
        NearplaneError: As for `quantize`.
    """
    windows: Windows | None = None
    if recipe.mix is not None:  # the number format of every layer is chosen by measuring
        recipe, options, windows = with_mix(folder, out, recipe, options)
    with phase(options.progress, "opening the model"):
        model, settled = open_resolved(
            folder, recipe, trust_remote_code=options.trust_remote_code
        )  # weights stay on disk
    check_disk(out, model, settled)
    say_types(model, settled)
    remote, overwrite, like = options.trust_remote_code, options.overwrite, options.like
    with container_for(model, settled, out, overwrite=overwrite, trust_remote_code=remote, like=like) as container:
        if windows is None:
            windows = calibration_windows(model, settled.recipe, options.given, options.device, options.progress)
        check_tokens(model, settled.recipe, windows)
        if settled.recipe.files.one_file:
            check_tokens_in_file(container, model, windows)
        job = Job(model=model, asked=recipe, plan=settled, windows=windows, options=options)
        with phase(options.progress, "reading the model's files"):
            journal = Journal(
                container, job.run_inputs(), settled
            )  # holds the progress of a stopped run of the same job
        if (record := journal.completed()) is not None:  # all layers were written
            return check_limit(record)
        with (
            start_run(job, container, journal) as run,  # the plan of the run and its layers so far
            walk(
                model,
                settled.recipe,
                windows,
                run.setting,
                moments=run.plan.moments,
                positions=run.plan.positions,
                resumed=journal,
            ) as stages,
        ):
            for stage in stages:  # a stage: layers that share one input
                run.settle(stage)  # its bit budget; without effect on plain grids
                solved = None
                while solved is None:  # only the last layers under a --size may be solved again
                    solved = run.store(stage, solve_stage(stage, run.orders(stage)))
                stage.write(each.matrix.decode() for each in solved)  # later stages see the quantized layers
                run.add(stage, solved)  # to the run record; at the end of a block also weights and journal
                del solved  # frees the codes before the next stage
        return run.finished()  # leaving the container renames its folder to OUT


@takes(QuantizeRequest, tokenizer=PreTrainedTokenizerBase | None)
def quantize(request: QuantizeRequest) -> RunRecord:
    """Quantize a language model into a checkpoint that other programs load.

    The options of the run are keywords, for example `bits=4, group_size=128`, also by the names of GPTQModel,
    llm-compressor and auto-round, or one `recipe`. A model may be an object, which is saved to a temporary folder first.

    Instead of a text file, `calibration` may be a list of texts, token ids (windows, seqlen), what a tokenizer returns
    (input_ids with their attention_mask; masked positions are left out, and all other tokens packed into windows as long
    as the rows), for vision models pixel values (images, channels, height, width), or for speech recognition
    (input_features, token_ids): sound (windows, mel bins, frames) from Whisper's feature extractor, and transcripts
    (windows, seqlen) as for `labels=`, with tokens such as <|en|> but without the one that starts the decoder.

    Returns:
        The run record, which is also written to `out/nearplane.json`.

    Raises:
        NearplaneError: A subclass names the cause. `out` is then unchanged, and files written so far are in
            `out.unfinished`, see `system/output_folder.py`.
    """
    with on_all_ranks() as ranks:
        return on_folder(request, ranks, _with_tuning)


def _with_tuning(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    if recipe.tune == "none":
        return quantize_folder(folder, out, recipe, options)
    return then_tuned(quantize_folder, folder, out, recipe, options)


def on_folder(request: QuantizeRequest, ranks: Ranks, verb: Callable[[str, Path, Recipe, Options], T]) -> T:
    """Check what is asked, and call a verb on the model's folder, on rank 0 of a run.

    Args:
        request: What is asked.
        ranks: Processes of the run.
        verb: Function of the folder or hub id of the model, OUT, recipe and options of the run.
    """
    say_compiling()
    given = next((Given.of(value, word) for word, value in request.data().items()), None)
    model, recipe, trust = request.model, request.asked(), request.trust_remote_code
    if (path := path_in(model)) is None:
        check_model(model)
    place = Device.named(request.device, request.compute_dtype, ranks=ranks)
    place.check_limit(request.device_memory)
    options = Options(
        name=name_of(model),
        given=given,
        device=place,
        overwrite=request.overwrite,
        trust_remote_code=trust,
        progress=request.progress,
        limits=request.check(recipe),
        plan_file=None if request.plan_file is None else Path(request.plan_file),
    )
    calibrates_on_text = (given is None or given.tokens is None) and recipe.scheme.calibrated
    if calibrates_on_text and request.tokenizer is None and isinstance(model, torch.nn.Module):
        raise RecipeError(
            "A model object has no tokenizer: pass tokenizer=, or token ids (windows, seqlen) as calibration."
        )
    return_large_blocks()
    if given is None and recipe.scheme.calibrated and recipe.calibration.calibration is not None:
        check_text(recipe.calibration.calibration)
    refuse_tokenizer(model, request.tokenizer)
    with as_folder(model, request.tokenizer) if path is None else nullcontext(str(path)) as folder:
        recipe = recipe if given is None else given.recorded(recipe)
        if recipe.tune != "none" and ranks.world > 1:
            raise RecipeError(
                "--tune trains in one process: a step needs the one before. Quantize with several processes, then run "
                "nearplane tune with one."
            )
        if recipe.like is not None:
            recipe, like = with_like(folder, recipe, recipe.like, trust_remote_code=trust)
            options = replace(options, like=like)
        follower = Follower(partial(_opened, folder, recipe, trust), place)
        options_of = {f"recipe ({name})": value for name, value in asdict(recipe).items()}
        same = {"model": files_of(Path(folder))} | options_of
        return run_on_rank_0(partial(verb, folder, Path(request.out), recipe, options), follower, same)


def _opened(folder: str, recipe: Recipe, trust_remote_code: bool) -> Model:
    return open_resolved(folder, recipe, trust_remote_code=trust_remote_code)[0]
