"""quantize(): the main path. Read this file and you have read the program.

A model is quantized one block at a time: its weights stay on disk, two activation streams (of the original and of the
quantized network) pass through the block that is in memory, and each layer is written as soon as it is solved.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.budget import budget_of
from nearplane.certificate import PROFILED, profile
from nearplane.errors import RecipeError
from nearplane.formats.folder import FORMATS, Writer, open_writer
from nearplane.inputs import Inputs
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.solvers import SOLVERS
from nearplane.ledger import Ledger, Solved
from nearplane.matrix import quantize_matrix, with_tensors
from nearplane.models.calibrate import Observed, observe, observe_head, stages
from nearplane.models.given import Given, as_folder, called, taken
from nearplane.models.ignored import refuse_unmatched
from nearplane.models.layers import Layer
from nearplane.models.skeleton import Stream, finish, skeleton
from nearplane.models.statistics import Statistics
from nearplane.models.stream import Block, Model, device_of, open_model
from nearplane.models.trial import try_blocks
from nearplane.models.unsupported import refuse_unsupported
from nearplane.parallel import world
from nearplane.plan import Plan, Progress, check_bits, plan, usable_widths
from nearplane.progress import logged, peak_memory
from nearplane.rate import quantize_matrix_to_rate
from nearplane.readers.dense import left_dense, merged_experts
from nearplane.readers.loadable import check_loads
from nearplane.recipe import Device, Recipe
from nearplane.record import WIDE, LayerRecord, Profile, RunRecord
from nearplane.tokens import Windows, calibration_windows, check_tokens


def silent(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """Pass items through; the command line puts a progress bar here."""
    return items


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
        spellings: see `Recipe.from_spellings`. `calibration` may also be a list of texts, or token ids (windows, seqlen).

    Returns:
        What was done and measured; also in `out/nearplane.json`.

    Raises:
        NearplaneError: of the kind that names the cause. What was in `out` is then as it was; what was written so far lies in
            `out.unfinished`, see `formats/unfinished.py`.
    """
    given, spellings = taken(spellings)
    if recipe is not None and spellings:
        raise RecipeError(f"Give a recipe or keywords, not both (found a recipe and {', '.join(spellings)}).")
    recipe = recipe or Recipe.from_spellings(**spellings)
    options: dict[str, Any] = dict(device=device, overwrite=overwrite, trust_remote_code=trust_remote_code)
    with as_folder(model, tokenizer) as folder:
        return quantize_folder(folder, Path(out), recipe, given, name=called(model), progress=progress, **options)


def quantize_folder(
    model: str,
    out: Path,
    recipe: Recipe,
    given: Given | None,
    *,
    name: str,
    device: Device,
    overwrite: bool,
    trust_remote_code: bool,
    progress: Progress,
) -> RunRecord:
    """Quantize a model that is a folder or on the hub; `name` is what the record calls it, the rest as for `quantize`."""
    began = time.perf_counter()
    place = device_of(device)
    recipe = recipe if given is None else given.recorded(recipe)
    source = open_model(
        model, trust_remote_code=trust_remote_code, ignore=recipe.ignore,
        embeddings=recipe.rate.include_embeddings, head=recipe.rate.include_head,
    )  # fmt: skip
    asked, recipe = recipe, recipe.grouped(layer.shape[1] for layer in source.layers)
    check(source, recipe)
    writer = open_writer(
        out, source.folder, quantization_config(source, recipe), dtype=source.dtype, shards=len(source.blocks) + 1,
        overwrite=overwrite, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with writer:
        windows = calibration_windows(source, recipe, given)
        check_tokens(source, recipe, windows.fitted)
        if windows.fitted is not None:
            try_blocks(source, windows.fitted, place)
        check_loads(source, recipe, lambda recipe, layers: quantization_config(source, recipe, layers=layers))
        record = RunRecord(
            recipe=asked, source=name, versions=_versions(), device=str(place), windows=windows.count,
            seqlen=windows.seqlen, tokens=windows.count * windows.seqlen, extra_windows=windows.extra_count,
            text=windows.digest(), skipped=tuple(source.skipped),
        )  # fmt: skip
        planned = plan(source, recipe, windows.fitted, place, progress)
        writer.config = quantization_config(source, recipe, planned.widths)
        ledger = Ledger(source, recipe, writer, record, planned)
        solved = quantized_layers(source, recipe, windows, writer, place, ledger)
        seen = logged(solved, "quantizing", len(source.layers), blocks=_layers_of_blocks(source))
        layers = tuple(progress(seen, "quantizing", len(source.layers)))
        record = replace(record, layers=layers, profiles=tuple(ledger.profiles), bytes=writer.size)
        record = replace(record, files=writer.digests(), peak_memory=peak_memory())
        record = replace(record, seconds=time.perf_counter() - began).in_folder(writer.size + writer.size_beside)
        ledger.check(record)
        writer.record_json = record.to_json()
    return record


def quantized_layers(
    model: Model, recipe: Recipe, windows: Windows, writer: Writer, device: torch.device, ledger: Ledger
) -> Iterator[LayerRecord]:
    """Quantize and write layer after layer, block after block; yields what was measured of each."""
    storage = FORMATS[recipe.format].scale_dtype(model.dtype)

    def solve(observed: Observed) -> Iterator[Solved]:
        for layer, matrix, record in solve_together(observed, recipe, storage, ledger.planned):
            name = model.written_name(layer.name)
            written = writer.add(name, matrix)
            yield layer, matrix, with_tensors(record, name, written.bytes, written.checksum)

    for part in parts(model, recipe, windows, device, ledger.planned.moments):
        ledger.settle()
        for observed in part.stages:  # q/k/v, then o, then gate/up, then down
            if part.chosen:
                ledger.profiles += profiles_of(observed, recipe)
            for layer, matrix, record in ledger.settled(observed.layers, partial(solve, observed), part.rest or ()):
                layer.write(matrix.decode())  # the next stage sees it
                ledger.add(layer, record)
                yield record
            del observed  # its moments are as large as a block
        if part.rest is not None:
            writer.close_block(model.reader.read(part.rest))
            ledger.close(part.rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Input embeddings, a block, or the head: what is in memory at one time.

    Args:
        stages: layers by shared input, with what calibration sees of it: draw the next once the layers of the last are written.
        rest: names of the tensors that are not quantized and go into the same shard; None: the shard is not yet full.
        chosen: whether profiles of its inputs go into the record.
    """

    stages: Iterable[Observed]
    rest: list[str] | None
    chosen: bool = False


def parts(
    model: Model, recipe: Recipe, windows: Windows, device: torch.device, moments: Mapping[str, Statistics]
) -> Iterator[Part]:
    """Pass both streams through the network, part after part; whoever takes a part writes its layers before the next.

    Args:
        model: the original.
        recipe: what calibration is to see.
        windows: of the text; without any, layers are solved without looking at their inputs.
        device: where to compute.
        moments: of the embeddings' inputs, where they are quantized; see `Plan`.
    """
    dtype = torch.float32 if device.type == "cpu" else model.dtype
    correct = recipe.rule.correct
    stream, embeddings = None, None
    if model.embeddings is not None:
        with model.embeddings.on(device, dtype, original=False) as block:
            yield Part(stages=(Observed(layers=tuple(block.quantized_layers()), statistics=dict(moments)),), rest=None)
            embeddings = block.quantized_layers()[0].read()
    if windows.fitted is not None and SOLVERS[recipe.rule.solver].needs_inputs:
        stream = skeleton(
            model,
            windows.fitted,
            device=device,
            dtype=dtype,
            two_streams=correct,
            embeddings=embeddings,
            extra=windows.extra,
        )
    chosen = {0, len(model.blocks) // 2, len(model.blocks) - 1} if stream is not None else set()
    for index, block in enumerate(model.blocks):
        with block.on(device, dtype, original=correct and stream is not None):
            rest = _unquantized(model, model.block_names(index))
            yield Part(stages=observations(block, stream, recipe), rest=rest, chosen=index in chosen)
            if stream is not None:
                stream.advance(block)
    rest = _unquantized(model, model.rest())
    if model.head is None:
        yield Part(stages=(), rest=rest)
        return
    if stream is not None:
        finish(model, stream, windows.tokens(), device=device, dtype=dtype)
    with model.head.on(device, dtype, original=False) as block:
        yield Part(stages=(observe_head(block, stream, correct=correct, root=recipe.rule.factor == "qr"),), rest=rest)


def observations(block: Block, stream: Stream | None, recipe: Recipe) -> Iterator[Observed]:
    """Yield the layers of a block by shared input, with what calibration sees of it once the stages before are solved."""
    if stream is None:
        for layer in block.quantized_layers():
            yield Observed(layers=(layer,), statistics={})
        return
    groups = stages(block, stream)
    wanted: dict[str, Any] = {"correct": recipe.rule.correct, "root": recipe.rule.factor == "qr"}
    if not recipe.calibration.true_sequential:
        yield from observe(block, groups, stream, **wanted, last=True)
        return
    for group in groups:  # q/k/v, then o, then gate/up, then down
        yield from observe(block, [group], stream, **wanted, last=group is groups[-1])


def solve_together(
    observed: Observed, recipe: Recipe, storage: torch.dtype, planned: Plan
) -> Iterator[tuple[Layer, QuantizedMatrix, LayerRecord]]:
    """Solve layers that share one input, and so one factorization."""
    for layer, inputs in shared_inputs(observed):
        rule = recipe.for_layer(layer.name)
        assert rule is not None, "ignored layers are not observed"
        if recipe.rate.wanted:
            matrix, record = quantize_matrix_to_rate(
                layer.read(), inputs, rule, recipe.rate, planned.rate(layer),
                sensitivity=planned.sensitivity.get(layer.name), max_loss=recipe.max_loss, name=layer.name,
            )  # fmt: skip
        else:
            matrix, record = quantize_matrix(
                layer.read(), inputs, planned.rule(rule, layer), storage=storage, name=layer.name
            )
        yield layer, matrix, record


def shared_inputs(observed: Observed) -> Iterator[tuple[Layer, Inputs]]:
    """Yield layers with their inputs: factors are made once for all of them."""
    shared: Inputs | None = None
    for layer in observed.layers:
        statistics = observed.statistics.get(layer.name)
        if statistics is None:
            shared = Inputs(torch.eye(layer.shape[1], dtype=torch.float64, device=layer.read().device))
        else:
            shared = shared.of(statistics) if shared else Inputs(statistics)
        yield layer, shared


def profiles_of(observed: Observed, recipe: Recipe) -> Iterator[Profile]:
    """Yield the Gram-Schmidt profile of an input in the usual orders, where it is not too wide."""
    layer, inputs = next(shared_inputs(observed))
    if layer.shape[1] <= WIDE:
        for order in dict.fromkeys((*PROFILED, recipe.rule.order)):
            yield profile(layer.name, inputs, recipe.rule, recipe.rate, order)


def check(model: Model, recipe: Recipe) -> None:
    """Refuse what cannot work before any work starts.

    Raises:
        RecipeError: names the layer and the way out.
    """
    refuse_unmatched(model, recipe.ignore)
    layers = model.layers
    refuse_unsupported(model)
    for layer in layers:
        rule = recipe.for_layer(layer.name)
        assert rule is not None, "ignored layers are not listed"
        if not recipe.rate.wanted and rule.group_size is not None and layer.shape[1] % rule.group_size:
            raise RecipeError(
                f"{layer.name} has {layer.shape[1]} inputs, not a multiple of --group-size {rule.group_size}. "
                f"The largest that divides all layers is {gcd(*(layer.shape[1] for layer in layers))}; none gives one step a row; "
                f"--ignore leaves a layer out."
            )
        most = SOLVERS[rule.solver].max_inputs
        if most is not None and layer.shape[1] > most:
            raise RecipeError(
                f"{layer.name} has {layer.shape[1]} inputs; {rule.solver} takes at most {most:,}. Use --solver k-best, or --ignore "
                f"it."
            )
    if recipe.rule.factor == "qr" and world() > 1:
        raise RecipeError(f"--factor qr runs on one rank, this run has {world()}. Use --factor cholesky.")
    if recipe.rate.wanted:
        budget_of(model, recipe)
    if recipe.allocate == "uniform" or recipe.rate.wanted:
        check_bits(model, recipe, recipe.rule.bits)
    else:
        usable_widths(model, recipe)


def quantization_config(
    model: Model, recipe: Recipe, widths: Mapping[str, int] | None = None, *, layers: Sequence[Layer] | None = None
) -> dict[str, Any]:
    """Return what config.json will say of the quantized weights; `layers` are those quantized, if not all of the model."""
    layers = model.layers if layers is None else layers
    rule = recipe.rule
    stored = {model.written_name(name): bits for name, bits in (widths or {}).items()}
    own = {"widths": {**(widths or {}), **stored}} if widths else {}  # of both names, where they differ
    quantized = [layer.name for layer in layers]
    layout = FORMATS[recipe.format]
    if recipe.rate.wanted:
        layout = replace(layout, coder=recipe.rate.coder, classes=recipe.rate.classes)
    config: dict[str, Any] = layout.quantization_config(
        bits=rule.bits, group_size=rule.group_size, symmetric=rule.symmetric, order=rule.order, damp=rule.damp,
        static_groups=True,  # runs of neighbours whenever their steps are fitted, so no reader needs g_idx
        ignore=left_dense(model, layers), experts=merged_experts(model), quantized=quantized, version=version("nearplane"), **own,
    )  # fmt: skip
    return config


def _layers_of_blocks(model: Model) -> list[int]:
    """Return how many layers are quantized with each block, embeddings with the first and the head with the last."""
    counts = [len(block.layers) for block in model.blocks]
    counts[0] += model.embeddings is not None
    counts[-1] += model.head is not None
    return counts


def _unquantized(model: Model, names: Iterable[str]) -> list[str]:
    """Leave out the names in the checkpoint of the weights of quantized layers."""
    quantized = {name for layer in model.layers for name in model.copies(layer)}
    return [name for name in names if name not in quantized]


def _versions() -> dict[str, str]:
    packages = ("nearplane", "torch", "transformers", "numba", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
