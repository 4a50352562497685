"""Checkpoint with its original model and text, as tuning needs it, and its layers and norms as functions of trained tensors.

Used by `tune` and `verify`. Also refuses what cannot be tuned before work starts, for `tune` and for `quantize --tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.given import Given
from nearplane.calibration.mix import Mix
from nearplane.calibration.text_files import refuse_unrecorded, texts_of
from nearplane.calibration.windows import default_seqlen, extra_windows, reader_of, samples_of
from nearplane.errors import CalibrationError, RecipeError
from nearplane.formats.stored import Stored
from nearplane.lattice.grid import Grid
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.rounded_inputs import rounded
from nearplane.lattice.superblock import SuperGrid
from nearplane.models.kinds import has_head, shared_layers
from nearplane.models.model import Model
from nearplane.number_formats import InputRounding
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.device import Device
from nearplane.system.sizes import Limits
from nearplane.tuning.levels import TunedLevels
from nearplane.tuning.memory import bytes_of, fits, trains_codes
from nearplane.tuning.network import norms_of
from nearplane.tuning.parameters import TunedBlocks, TunedLadders, TunedLayer, TunedMatrix, TunedVector
from nearplane.tuning.schedule import OpenEnded, Schedule
from nearplane.tuning.settings import SAMPLES_FACTOR, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A quantized checkpoint with its original model.

    Args:
        record: The run record of the checkpoint.
        stored: The quantized layers of the checkpoint.
        model: The original model.
        plan: What was decided of every layer, and the recipe of the record with the present location of the text.
        given: Texts or tokens that were passed from Python instead of the recipe's text.
        device: Device of the computation.
    """

    record: RunRecord
    stored: Stored
    model: Model
    plan: Plan
    given: Given | None
    device: Device

    def windows(self, count: int, length: int) -> Tensor:
        """Return up to `count` windows of `length` tokens of the text; see `windows_of`."""
        return windows_of(self.model, self.plan.recipe, self.given, self.device, count, length)

    def matrices(self, *, codes: bool = False) -> dict[str, TunedLayer]:
        """Return the layers of blocks, by name; with `codes`, their codes are trained where `trains_codes` allows it."""
        read, storage = self.stored, self.stored.layers.scale_dtype(self.model.dtype)
        matrices: dict[str, TunedLayer] = {}
        for layer in self.of_blocks():
            matrix = read.matrix(layer.stored, read.tensors(layer.stored), self.device.place)
            kind = _on_levels if layer.number_format.levels is not None else TUNED_TYPES[type(matrix.grid)]
            matrices[layer.name] = kind(layer, matrix, storage, codes and trains_codes(layer))
        return matrices

    def of_blocks(self) -> list[LayerRecord]:
        """Return the records of the trained layers, which are those in blocks, without embeddings and head."""
        names = {layer.name for layer in self.model.block_layers}
        return [layer for layer in self.record.layers if layer.name in names]

    def inputs(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return how the inputs of layers are rounded, by name of the layer; empty if runtimes round none."""
        return {name: partial(rounded, how=how, global_scale=scale) for name, (how, scale) in self._inputs().items()}

    def input_scales(self) -> dict[str, float]:
        """Return the global scales in the files of layers whose inputs are rounded, by name, where they have one."""
        return {name: scale for name, (_, scale) in self._inputs().items() if scale is not None}

    def _inputs(self) -> dict[str, tuple[InputRounding, float | None]]:
        found = ((layer.name, self.stored.inputs(layer.stored)) for layer in self.of_blocks())
        return {name: how for name, how in found if how is not None}

    def ends(self) -> dict[str, Tensor]:
        """Return the values of quantized embeddings and head, float32, by name of the parameter."""
        read, trained = self.stored, {layer.name for layer in self.of_blocks()}
        return {
            f"{layer.name}.weight": read.matrix(layer.stored, read.tensors(layer.stored)).decode().to(self.device.place)
            for layer in self.record.layers
            if layer.name not in trained
        }

    def vectors(self, matrices: Mapping[str, TunedLayer]) -> dict[str, TunedVector]:
        """Return the norms in the files, by name of the parameter, with the mean relative error of weights as their unit."""
        unit = sum(each.unit for each in matrices.values()) / len(matrices)
        unquantized = set(self.stored.rest())
        files = {name: file for name, file in norms_stored(self.model).items() if file in unquantized}
        read = self.stored.reader.read
        return {name: TunedVector(read([file])[file], self.device.place, unit) for name, file in files.items()}


def _on_levels(layer: LayerRecord, matrix: Any, storage: torch.dtype, codes: bool) -> TunedLayer:
    return TunedLevels(matrix, storage, rows=layer.number_format.rows, codes=codes)


TUNED_TYPES: Mapping[type, Callable[[LayerRecord, Any, torch.dtype, bool], TunedLayer]] = {
    Grid: lambda layer, matrix, storage, codes: TunedMatrix(layer.name, matrix, storage, codes=codes),
    SuperGrid: lambda _, matrix, storage, codes: TunedBlocks(matrix, storage, codes=codes),
    ProductGrid: lambda layer, matrix, _, codes: TunedLadders(matrix, layer.rate, codes=codes),
}  # by type of grid without levels: from a layer's record, its matrix, the dtype of steps and whether codes are trained


def windows_of(model: Model, recipe: Recipe, given: Given | None, device: Device, count: int, length: int) -> Tensor:
    """Return up to `count` windows of `length` tokens of the text.

    Raises:
        RecipeError: The given windows, or those of the run in a mix of texts, have another length.
        CalibrationError: The text cannot be read, or windows are longer than the model's maximum length.
    """
    if given is not None and given.tokens is not None:
        if length != given.tokens.shape[1]:
            raise RecipeError(
                f"seqlen is {length}, but the windows have {given.tokens.shape[1]} tokens. Leave out seqlen."
            )
        return given.tokens[:count]
    text = recipe.calibration.calibration if given is None else given.texts
    refuse_unrecorded(text)
    if model.positions is not None and length > model.positions:
        raise CalibrationError(
            f"--seqlen {length} is more than the model's maximum length of {model.positions} tokens."
        )
    options, samples = recipe.calibration, samples_of(model, recipe.calibration)
    read = reader_of(model, options, length, device)
    if given is None and (texts := texts_of(options.calibration)):
        mix = Mix.of(texts, samples, extra_windows(samples, length))
        if length != (of_run := default_seqlen(model, options)):
            raise RecipeError(
                f"seqlen is {length}, but windows of a mix of texts have the length of the run, {of_run} tokens. Leave out "
                f"--seqlen."
            )
        return torch.stack(mix.windows(read, count))
    return read(text, samples=count)


def samples_to_tune_on(model: Model, record: RunRecord, seqlen: int | None = None) -> int:
    """Return the default number of windows for tuning: a multiple of calibration's default, however many the run had."""
    return SAMPLES_FACTOR * samples_of(model, Calibration(seqlen=seqlen or record.seqlen))


def norms_stored(model: Model) -> dict[str, str]:
    """Return the norms with a tensor of their own in the checkpoint: {name of the parameter: name of the tensor}."""
    names = [name for name in norms_of(model.network) if model.weights.stored_alone(name)]
    return {name: model.weights.source_name(name) for name in names}


def check_layers(model: Model, called: str) -> None:
    """Refuse a model with layers that cannot be tuned; `called` names the checkpoint in errors.

    Raises:
        RecipeError: The model predicts no tokens, has an encoder and a decoder, or no layer in its blocks is quantized.
    """
    if not model.block_layers:
        raise RecipeError(
            f"{called} cannot be tuned: no layer in its blocks is quantized, and embeddings and head are not trained. Leave out "
            f"--tune, or use the checkpoint as it is."
        )
    if not has_head(model.network):
        raise RecipeError(
            f"{called} cannot be tuned: {type(model.network).__name__} predicts no tokens, on which tuning trains. Leave "
            f"out --tune, or use the checkpoint as it is."
        )
    if len(model.stacks) > 1:
        raise RecipeError(
            f"{called} cannot be tuned: {type(model.network).__name__} has an encoder and a decoder, but tuning supports one "
            f"stack of blocks. Leave out --tune, or use the checkpoint as it is."
        )
    if shared := shared_layers(model.config):
        raise RecipeError(
            f"{called} cannot be tuned: the last {shared} blocks of {type(model.network).__name__} use keys and values of earlier "
            f"blocks, through which tuning does not follow gradients. Leave out --tune, or use the checkpoint as it is."
        )


def check_tunable(
    model: Model,
    plan: Plan,
    given: Given | None,
    record: RunRecord,
    device: Device,
    limits: Limits,
    schedule: Schedule | None = None,
) -> None:
    """Refuse before a solve what `tune` would refuse after it.

    Args:
        model: The original model.
        plan, given: Plan of the run and texts or tokens from Python, which name the text.
        record: The record of the starting run, with its windows.
        device: Device of the computation.
        limits: Limits of memory.
        schedule: Steps; None: those that follow from the text.

    Raises:
        CalibrationError: The text has too few windows.
        RecipeError: Tuning needs more memory than is free, or than a limit allows.
    """
    samples = samples_to_tune_on(model, record)
    cut = split(
        lambda count, length: windows_of(model, plan.recipe, given, device, count, length),
        record,
        samples=samples,
        schedule=schedule,
    )
    planned = ((plan.layers[layer.name], layer.shape) for layer in model.block_layers)
    trained = bytes_of(planned, all_trained=plan.recipe.allocate == "slope", returns=isinstance(schedule, OpenEnded))
    fits(model, cut, trained, device, limits)


def check_model(model: Model, record: RunRecord, stored: Stored) -> None:
    """Refuse an original model that is not the one that was quantized.

    Raises:
        RecipeError: Its layers, or tensors that are not quantized, differ from those of the checkpoint.
    """
    check_layers(model, str(stored.reader.folder))
    expected = {(layer.name, layer.shape) for layer in model.layers}
    if unlike := expected ^ {(layer.name, (layer.out_features, layer.in_features)) for layer in record.layers}:
        raise RecipeError(
            f"{model.folder} is not the model that was quantized: {len(unlike)} layers differ, for example {min(unlike)[0]}. Use "
            f"--against {record.source}."
        )
    for name in sorted({*stored.rest()} & {*model.reader.names()}):
        original, copy = stored.reader.kept(name, model.reader.read([name])[name]), stored.reader.read([name])[name]
        if original is None:  # this format does not store the tensor
            continue
        if original.dtype != copy.dtype or not torch.equal(original, copy):
            raise RecipeError(
                f"{model.folder} is not the model that was quantized, or has changed since then: its tensor {name} differs from "
                f"the checkpoint. Use --against {record.source}, unchanged."
            )
