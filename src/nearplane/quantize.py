"""quantize(): the main path. Read this file and you have read the program.

A model is quantized one block at a time: its weights stay on disk, two activation streams (of the original and of the
quantized network) pass through the block that is in memory, and each layer is written as soon as it is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.beginning import Options, beginning
from nearplane.budget.ledger import Ledger, Solved
from nearplane.budget.plan import Plan
from nearplane.errors import RecipeError
from nearplane.formats import FORMATS, open_container
from nearplane.formats.container import Container, Place
from nearplane.journal import Journal
from nearplane.matrix import Task, solve_layer
from nearplane.matrix.certificate import profiles
from nearplane.matrix.on_grid import with_tensors
from nearplane.memory import give_back_large
from nearplane.models.given import as_folder, called, taken
from nearplane.models.model import Model, device_of, open_model
from nearplane.notebook import told
from nearplane.places import check_there
from nearplane.progress import Progress, logged, say_compiling, silent
from nearplane.recipe import Recipe
from nearplane.record import LayerRecord, RunRecord, read_record, versions
from nearplane.request import check_request, quantization_config, settled, with_types
from nearplane.schemes import Device
from nearplane.sizes import bytes_in
from nearplane.then_tuned import then_tuned
from nearplane.tokens import calibration_windows, check_tokens
from nearplane.tunable import check_layers, check_recipe
from nearplane.walk import Done, Solve, Stage, walk

Walked = Callable[[Solve], Iterator[Done]]
"""A walk through the network; wants what gives the values of a stage's layers."""


def quantize(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: Device = "auto",
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
            the logger "nearplane.progress".
        memory: that the run may take on the CPU at the most, in bytes or as "12GB": fewer windows pass at a time then,
            forwards are repeated where they cannot wait, and hidden states lie in a file; None: as is fastest.
        spellings: see `Recipe.from_spellings`. `calibration` may also be a list of texts, token ids (windows, seqlen), or of
            vision models pixel values (images, channels, height, width), or of models that write down what they hear
            (input_features, token_ids): sound, (windows, mel bins, frames) as Whisper's feature extractor makes it, and (windows,
            seqlen) what is said in each, as for `labels=`, with <|en|> and its like but without the token that starts the decoder.

    Returns:
        What was done and measured; also in `out/nearplane.json`.

    Raises:
        NearplaneError: of the kind that names the cause. What was in `out` is then as it was; what was written so far lies in
            `out.unfinished`, see `formats/unfinished.py`.
    """
    say_compiling()
    given, spellings = taken(spellings)
    if recipe is not None and spellings:
        raise RecipeError(f"Give a recipe or keywords, not both (found a recipe and {', '.join(spellings)}).")
    recipe = recipe or Recipe.from_spellings(**spellings)
    options = Options(
        name=called(model),
        given=given,
        device=device_of(device),
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
    """Quantize a model that is a folder, or on the hub."""
    give_back_large()
    if options.given is None and recipe.scheme.calibrated and recipe.calibration.calibration is not None:
        check_there(recipe.calibration.calibration)
    asked, (model, recipe) = recipe, _opened(folder, recipe, options)
    place = Place(
        out=out,
        source=model.folder,
        overwrite=options.overwrite,
        trust_remote_code=options.trust_remote_code,
        network=model.config.to_dict(),
        tokenizer=model.tokenizer_folder() if recipe.format == "gguf" else None,
        resumes=True,
    )
    config = quantization_config(model, recipe)
    with open_container(place, config, dtype=model.dtype, shards=len(model.blocks) + 1) as container:
        windows = calibration_windows(model, recipe, options.given)
        check_tokens(model, recipe, windows)
        files, text = {"model": model.folder}, windows.digest()
        journal = Journal(container, told(asdict(asked), files, text, versions(), options.device))
        if container.whole:  # but for its place
            return read_record(container.folder)
        with beginning(model, asked, recipe, windows, options, container, journal.before) as (record, planned):
            recipe = with_types(model, recipe, planned.types)
            container.config = quantization_config(model, recipe, planned.widths)
            ledger = Ledger(model, recipe, container, record, planned)
            journal.begin(ledger, model, record)
            walked = partial(
                walk,
                model,
                recipe,
                windows,
                device=options.device,
                moments=planned.moments,
                kept=journal,
                pace=record.pace,
                folder=container.folder,
            )
            solved = quantized_layers(model, recipe, walked, ledger, container)
            there, blocks = len(ledger.layers), model.layers_by_block
            seen = logged(solved, "quantizing", len(model.layers), blocks=blocks, there=there)
            layers = tuple(options.progress(seen, "quantizing", len(model.layers)))
        record = replace(record, layers=layers, profiles=tuple(ledger.profiles), repeated=tuple(ledger.repeated))
        record = container.seal(record, lambda told: replace(told, seconds=journal.seconds))
        ledger.check(record)
    return record


def _opened(folder: str, recipe: Recipe, options: Options) -> tuple[Model, Recipe]:
    """Open a model whose weights stay on disk; return it, and the recipe as it is settled for it.

    Raises:
        NearplaneError: it cannot be quantized so.
    """
    embeddings, head = recipe.scheme.ends
    trusted = options.trust_remote_code
    model = open_model(folder, trust_remote_code=trusted, ignore=recipe.ignore, embeddings=embeddings, head=head)
    recipe = settled(model, recipe)
    check_request(model, recipe)
    if recipe.tune != "none":
        check_recipe(recipe, "This run")
        check_layers(model, "This run")
    return model, recipe


def quantized_layers(
    model: Model, recipe: Recipe, walked: Walked, ledger: Ledger, container: Container
) -> Iterator[LayerRecord]:
    """Quantize and write layer after layer, block after block; yields what was measured of each, also before it was stopped."""
    storage = FORMATS[str(recipe.format)].layers.scale_dtype(model.dtype)

    def solve(stage: Stage) -> list[Tensor]:
        ledger.repeated += stage.repeated
        if stage.first:
            ledger.settle()
        if stage.profiled:
            ledger.profiles += profiles(stage.layers[0].name, stage.inputs[0], recipe.scheme)
        values, again = [], ledger.solves_again(stage.layers)
        for layer, matrix, measured in ledger.settled(stage.layers, partial(written, stage, again), stage.rest):
            ledger.add(layer, measured)
            values.append(matrix.decode())
        return values

    def written(stage: Stage, again: bool) -> Iterator[Solved]:
        todo = tasks(stage, recipe, ledger.planned, storage, again=again)
        for task, layer in zip(todo, stage.layers, strict=True):
            matrix, measured = solve_layer(task)
            name = model.written_name(layer)
            tensors = container.add(name, matrix)
            yield layer, matrix, with_tensors(measured, name, tensors.bytes, tensors.checksum)

    yield from list(ledger.layers)
    for done in walked(solve):
        yield from ledger.layers[len(ledger.layers) - len(done.layers) :]  # none at the end of a block
        if done.rest is not None:
            container.close_block(model.reader.read(done.rest))
            ledger.close(done.rest)


def tasks(stage: Stage, recipe: Recipe, planned: Plan, storage: torch.dtype, *, again: bool) -> Iterator[Task]:
    """Yield what is to be solved at a stage, or solved `again`: layers that share one input, and so one factorization."""
    for layer, inputs in zip(stage.layers, stage.inputs, strict=True):
        scheme = recipe.scheme_of(layer.name)
        yield Task(
            name=layer.name,
            W=layer.read(),
            inputs=inputs if again else inputs.used_once(),
            scheme=planned.scheme_of(layer, scheme),
            rate=planned.rate(layer) if layer.name in planned.rates else None,
            storage=storage,
            sensitivity=planned.sensitivity.get(layer.name),
            max_loss=recipe.max_loss,
            together=planned.together.get(layer.name, ()),
        )
