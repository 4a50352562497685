"""quantize(): the main path. Read this file and you have read the program.

A model is quantized one block at a time: its weights stay on disk, two activation streams (of the original and of the
quantized network) pass through the block that is in memory, and each layer is written as soon as it is solved.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import as_folder, called, taken
from nearplane.calibration.walk import Stage, walk
from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.errors import RecipeError
from nearplane.formats.container import Container, Place
from nearplane.formats.table import open_container
from nearplane.matrix.solve_layer import solve_layer
from nearplane.models.model import Model
from nearplane.planning.ledger import Solved
from nearplane.planning.request import check_request, open_original, quantization_config, settled
from nearplane.planning.start import Options
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.sizes import bytes_in
from nearplane.record.record import RunRecord, read_record, versions
from nearplane.system.device import Device
from nearplane.system.journal_pages import told
from nearplane.system.memory import give_back_large
from nearplane.system.paths import check_there
from nearplane.system.progress import Progress, say_compiling, silent
from nearplane.tuning.checkpoint import check_layers, check_recipe
from nearplane.verbs.quantize_journal import Journal
from nearplane.verbs.quantize_run import Run, start_run
from nearplane.verbs.quantize_then_tune import then_tuned


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
    with as_folder(model, tokenizer) as folder:
        recipe = recipe if given is None else given.recorded(recipe)
        quantizes = quantize_folder if recipe.tune == "none" else partial(then_tuned, quantize_folder)
        return quantizes(folder, Path(out), recipe, options)


def quantize_folder(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    """Quantize a model that is a folder, or on the hub, into the checkpoint `out`, one block at a time."""
    give_back_large()
    if options.given is None and recipe.scheme.calibrated and recipe.calibration.calibration is not None:
        check_there(recipe.calibration.calibration)
    asked, (model, recipe) = recipe, _opened(folder, recipe, options)  # weights stay on disk
    with _container(model, recipe, out, options) as container:
        windows = calibration_windows(model, recipe, options.given)
        check_tokens(model, recipe, windows)
        files, text = {"model": model.folder}, windows.digest()
        journal = Journal(container, told(asdict(asked), files, text, versions(), options.device))
        if container.whole:  # but for its place
            return read_record(container.folder)
        with (
            start_run(model, asked, recipe, windows, options, container, journal) as run,
            walk(
                model,
                run.recipe,
                windows,
                device=options.device,
                setting=run.forecast.setting,
                moments=run.ledger.planned.moments,
                resumed=journal,
                folder=container.folder,
            ) as stages,
        ):
            for stage in stages:
                run.settle(stage)
                solved = None
                while solved is None:  # once, but for the last layers of a --size
                    solved = run.pack(stage, solve_stage(stage, run))
                stage.write(each.matrix.decode() for each in solved)  # the next stage sees quantized layers
                run.add(stage, solved)
                del solved  # its codes, before the next stage runs
        return run.finished()


def solve_stage(stage: Stage, run: Run) -> list[Solved]:
    """Solve the layers of a stage, each by its scheme and on what calibration saw of its inputs."""
    tasks = zip(stage.layers, run.tasks(stage), strict=True)
    return [Solved(layer, *solve_layer(task)) for layer, task in tasks]


def _opened(folder: str, recipe: Recipe, options: Options) -> tuple[Model, Recipe]:
    """Open a model whose weights stay on disk; return it, and the recipe as it is settled for it.

    Raises:
        NearplaneError: it cannot be quantized so.
    """
    model = open_original(folder, recipe, trust_remote_code=options.trust_remote_code)
    recipe = settled(model, recipe)
    check_request(model, recipe)
    if recipe.tune != "none":
        check_recipe(recipe, "This run")
        check_layers(model, "This run")
    return model, recipe


def _container(model: Model, recipe: Recipe, out: Path, options: Options) -> Container:
    """Return the checkpoint to be written, in any format; it knows what a stopped run had written."""
    place = Place(
        out=out,
        source=model.folder,
        overwrite=options.overwrite,
        trust_remote_code=options.trust_remote_code,
        network=model.config.to_dict(),
        tokenizer=model.tokenizer_folder() if recipe.files.for_llama_cpp else None,
        resumes=True,
    )
    return open_container(place, quantization_config(model, recipe), dtype=model.dtype, shards=len(model.blocks) + 1)
