"""quantize(): the main path. Read this file and you have read the program.

A model is quantized one block at a time: its weights stay on disk, two activation streams (of the original and of the
quantized network) pass through the block that is in memory, and each layer is written as soon as it is solved.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

import torch

from nearplane.errors import CalibrationError, RecipeError
from nearplane.formats.folder import FORMATS, Writer, open_writer
from nearplane.matrix import Inputs, quantize_matrix, with_bytes
from nearplane.models.calibrate import Observed, observe, observe_head, stages
from nearplane.models.data import read_windows
from nearplane.models.skeleton import Stream, finish, skeleton
from nearplane.models.stream import Block, Model, device_of, open_model
from nearplane.plan import Plan, Progress, budget_of, check_bits, plan, usable_widths
from nearplane.rate import quantize_matrix_to_rate
from nearplane.recipe import Device, Recipe
from nearplane.record import LayerRecord, RunRecord

DEFAULT_SEQLEN = 2048


def silent(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """Pass items through; the command line puts a progress bar here."""
    return items


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    device: Device = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    **spellings: Any,
) -> RunRecord:
    """Quantize a language model into a checkpoint that other programs load.

    Args:
        model: a local folder of safetensors, or a hub id.
        out: folder to write.
        recipe: what to do; or give its fields (or other tools' names for them) as keywords: `bits=4, group_size=128, ...`.
        device: where to compute; auto is the GPU where there is one.
        overwrite: replace what is in `out`.
        trust_remote_code: run model code that comes with the checkpoint.
        progress: wraps the iterator over layers: (items, label, total) -> items.
        spellings: see `Recipe.from_spellings`.

    Returns:
        What was done and measured; also in `out/nearplane.json`.

    Raises:
        NearplaneError: of the kind that names the cause. Nothing is written before the request is known to make sense; with
            `overwrite`, what was in `out` is deleted then.
    """
    if recipe is not None and spellings:
        raise RecipeError(f"Give a recipe or keywords, not both (found a recipe and {', '.join(spellings)}).")
    recipe = recipe or Recipe.from_spellings(**spellings)
    began = time.perf_counter()
    place = device_of(device)
    source = open_model(
        str(model), trust_remote_code=trust_remote_code, ignore=recipe.ignore,
        embeddings=recipe.rate.include_embeddings, head=recipe.rate.include_head,
    )  # fmt: skip
    check(source, recipe)
    writer = open_writer(
        Path(out), source.folder, quantization_config(source, recipe), dtype=source.dtype, shards=len(source.blocks) + 1,
        overwrite=overwrite, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    seqlen, tokens = _seqlen(recipe, source), None
    if recipe.rule.solver != "round-to-nearest" or recipe.allocate == "slope":  # both look at the network
        wanted = recipe.calibration
        tokens = read_windows(
            source.tokenizer(), wanted.calibration, samples=wanted.samples, seqlen=seqlen, seed=wanted.seed
        )
    record = RunRecord(
        recipe=recipe, source=str(model), versions=_versions(), device=str(place), seqlen=seqlen,
        windows=0 if tokens is None else len(tokens), tokens=0 if tokens is None else tokens.numel(),
        skipped=tuple(source.skipped),
    )  # fmt: skip
    planned = plan(source, recipe, tokens, place, progress)
    writer.config = quantization_config(source, recipe, planned.widths)
    with writer:
        solved = quantized_layers(source, recipe, tokens, writer, place, planned)
        layers = tuple(progress(solved, "quantizing", len(source.layers)))
        record = replace(record, layers=layers, seconds=time.perf_counter() - began, bytes=writer.size)
        record = record.in_folder(writer.size + writer.size_beside)
        writer.record_json = record.to_json()
    return record


def quantized_layers(
    model: Model, recipe: Recipe, tokens: torch.Tensor | None, writer: Writer, device: torch.device, planned: Plan
) -> Iterator[LayerRecord]:
    """Quantize and write layer after layer, block after block; yields what was measured of each."""
    dtype = torch.float32 if device.type == "cpu" else model.dtype
    storage = FORMATS[recipe.format].scale_dtype(model.dtype)
    correct = recipe.rule.correct
    stream, embeddings = None, None

    def written(observed: Observed) -> Iterator[LayerRecord]:
        for layer, matrix, record in solve_together(observed, recipe, storage, planned):
            layer.write(matrix.decode())  # the next stage sees it
            size = writer.add(model.written_name(layer.name), matrix)
            planned.spend(layer, size)
            yield with_bytes(record, size)

    if model.embeddings is not None:
        with model.embeddings.on(device, dtype, original=False) as block:
            yield from written(Observed(layers=tuple(block.quantized_layers()), statistics=planned.moments))
            embeddings = block.quantized_layers()[0].read()
    if tokens is not None and recipe.rule.solver != "round-to-nearest":
        stream = skeleton(model, tokens, device=device, dtype=dtype, two_streams=correct, embeddings=embeddings)
    for index, block in enumerate(model.blocks):
        with block.on(device, dtype, original=correct and stream is not None):
            for observed in observations(block, stream, recipe):
                yield from written(observed)
                del observed  # its moments are as large as a block
            if stream is not None:
                stream.advance(block)
        writer.close_block(model.reader.read(_unquantized(model, model.block_names(index))))
    if model.head is not None:
        if stream is not None:
            finish(model, stream, tokens, device=device, dtype=dtype)
        with model.head.on(device, dtype, original=False) as block:
            yield from written(observe_head(block, stream, correct=correct))
    writer.close_block(model.reader.read(_unquantized(model, model.rest())))


def observations(block: Block, stream: Stream | None, recipe: Recipe) -> Iterator[Observed]:
    """Yield the layers of a block by shared input, with what calibration sees of it once the stages before are solved."""
    if stream is None:
        for layer in block.quantized_layers():
            yield Observed(layers=(layer,), statistics={})
        return
    groups = stages(block, stream)
    if not recipe.calibration.true_sequential:
        yield from observe(block, groups, stream, correct=recipe.rule.correct, last=True)
        return
    for group in groups:  # q/k/v, then o, then gate/up, then down
        yield from observe(block, [group], stream, correct=recipe.rule.correct, last=group is groups[-1])


def solve_together(
    observed: Observed, recipe: Recipe, storage: torch.dtype, planned: Plan
) -> Iterator[tuple[Any, Any, LayerRecord]]:
    """Solve layers that share one input, and so one factorization."""
    shared: Inputs | None = None
    for layer in observed.layers:
        rule = recipe.for_layer(layer.name)
        assert rule is not None, "ignored layers are not observed"
        W = layer.read()
        statistics = observed.statistics.get(layer.name)
        if statistics is None:
            shared = Inputs(torch.eye(W.shape[1], dtype=torch.float64, device=W.device))
        else:
            shared = shared.of(statistics) if shared else Inputs(statistics)
        if recipe.rate.wanted:
            matrix, record = quantize_matrix_to_rate(
                W, shared, rule, recipe.rate, planned.rate(layer),
                sensitivity=planned.sensitivity.get(layer.name), name=layer.name,
            )  # fmt: skip
        else:
            matrix, record = quantize_matrix(W, shared, planned.rule(rule, layer), storage=storage, name=layer.name)
        yield layer, matrix, record


def check(model: Model, recipe: Recipe) -> None:
    """Refuse what cannot work before any work starts.

    Raises:
        RecipeError: names the layer and the way out.
    """
    layers = model.layers
    if not layers:
        raise RecipeError(
            f"Nothing to quantize: every layer is ignored or of a type that is not handled ({len(model.skipped)})."
        )
    for layer in layers:
        rule = recipe.for_layer(layer.name)
        assert rule is not None, "ignored layers are not listed"
        if not recipe.rate.wanted and rule.group_size is not None and layer.shape[1] % rule.group_size:
            raise RecipeError(
                f"{layer.name} has {layer.shape[1]} inputs, not a multiple of --group-size {rule.group_size}. "
                f"The largest that divides all layers is {gcd(*(layer.shape[1] for layer in layers))}; none gives one step a row; "
                f"--ignore leaves a layer out."
            )
    if recipe.rate.wanted:
        budget_of(model, recipe)
        if recipe.rate.coder == "zstd" and find_spec("zstandard") is None:
            raise RecipeError(
                '--coder zstd needs the package zstandard: pip install "nearplane[zstd]", or use --coder tans.'
            )
    if recipe.allocate == "uniform" or recipe.rate.wanted:
        check_bits(model, recipe, recipe.rule.bits)
    else:
        usable_widths(model, recipe)


def quantization_config(model: Model, recipe: Recipe, widths: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return what config.json will say of the quantized weights."""
    rule = recipe.rule
    stored = {model.written_name(name): bits for name, bits in (widths or {}).items()}
    own = {"widths": {**(widths or {}), **stored}} if widths else {}  # of both names, where they differ
    quantized = [layer.name for layer in model.layers]
    layout = FORMATS[recipe.format]
    if recipe.rate.wanted:
        layout = replace(layout, coder=recipe.rate.coder, classes=recipe.rate.classes)
    config: dict[str, Any] = layout.quantization_config(
        bits=rule.bits, group_size=rule.group_size, symmetric=rule.symmetric, order=rule.order, damp=rule.damp,
        static_groups=True,  # runs of neighbours whenever their steps are fitted, so no reader needs g_idx
        ignore=sorted(model.linears() - set(quantized)), quantized=quantized, version=version("nearplane"), **own,
    )  # fmt: skip
    return config


def _unquantized(model: Model, names: Iterable[str]) -> list[str]:
    """Leave out the names in the checkpoint of the weights of quantized layers."""
    quantized = {name for layer in model.layers for name in model.copies(layer)}
    return [name for name in names if name not in quantized]


def _seqlen(recipe: Recipe, model: Model) -> int:
    asked, positions = recipe.calibration.seqlen, model.positions
    if asked is not None and positions is not None and asked > positions:
        raise CalibrationError(
            f"--seqlen {asked} is more than the {positions} positions of the model; pass at most {positions}."
        )
    return asked or min(DEFAULT_SEQLEN, positions or DEFAULT_SEQLEN)


def _versions() -> dict[str, str]:
    packages = ("nearplane", "torch", "transformers", "numba", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
