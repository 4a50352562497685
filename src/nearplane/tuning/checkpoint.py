"""A checkpoint that is tuned or was: its files, the original and the text together, and what of it is trained.

What `tune` and `verify` both need: which norms have tensors of their own, which windows the text gives, and layers and norms as
functions of what is trained of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.given import Given, refuse_lost
from nearplane.calibration.texts import read_windows
from nearplane.errors import CalibrationError, RecipeError
from nearplane.formats.stored import Stored
from nearplane.lattice.grid import Grid, ProductGrid
from nearplane.lattice.superblock import SuperGrid
from nearplane.models.model import Model
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.device import Device
from nearplane.tuning.ladders import TunedLadders
from nearplane.tuning.network import norms_of
from nearplane.tuning.parameters import TunedLayer, TunedMatrix, TunedVector
from nearplane.tuning.settings import CODE_BITS
from nearplane.tuning.tuned_blocks import TunedBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A quantized checkpoint beside the original.

    Args:
        record: of the checkpoint.
        stored: its layers.
        model: the original.
        recipe: that of the record, groups resolved, with the text where it is now.
        given: texts or tokens that came from Python in place of what the recipe names.
        device: where to compute.
    """

    record: RunRecord
    stored: Stored
    model: Model
    recipe: Recipe
    given: Given | None
    device: Device

    def windows(self, count: int, length: int) -> Tensor:
        """Return up to `count` windows of `length` tokens of the text; see `windows_of`."""
        return windows_of(self.model, self.recipe, self.given, count, length)

    def matrices(self, stored: Stored | None = None, *, codes: bool = False) -> dict[str, TunedLayer]:
        """Return the layers of blocks, by name.

        Args:
            stored: where they are; None: in the checkpoint's own files.
            codes: whether codes are trained, where that is done.
        """
        stored = stored or self.stored
        found: dict[str, TunedLayer] = {}
        for layer in self.of_blocks():
            matrix = stored.matrix(layer.stored, stored.tensors(layer.stored)).to(self.device.place)
            storage = stored.layers.scale_dtype(self.model.dtype)
            found[layer.name] = TUNED[type(matrix.grid)](layer, matrix, storage, codes and trains_codes(layer))
        return found

    def of_blocks(self) -> list[LayerRecord]:
        """Return the records of the layers that are trained: not those of embeddings and head."""
        names = {layer.name for block in self.model.blocks for layer in block.layers}
        return [layer for layer in self.record.layers if layer.name in names]

    def ends(self) -> dict[str, Tensor]:
        """Return the values of quantized embeddings and head, float32, by name of the parameter."""
        parts = [part for part in (self.model.embeddings, self.model.head) if part is not None]
        names = {layer.name for part in parts for layer in part.layers}
        read = self.stored
        return {
            f"{layer.name}.weight": read.matrix(layer.stored, read.tensors(layer.stored)).decode().to(self.device.place)
            for layer in self.record.layers
            if layer.name in names
        }

    def vectors(self, unit: float) -> dict[str, TunedVector]:
        """Return the norms that the files hold, by name of the parameter; `unit`: how far off the weights of layers are."""
        there = set(self.stored.rest())
        files = {name: file for name, file in norms_stored(self.model).items() if file in there}
        read = self.stored.reader.read
        return {name: TunedVector(read([file])[file], self.device.place, unit) for name, file in files.items()}


TUNED: Mapping[type, Callable[[LayerRecord, Any, torch.dtype, bool], TunedLayer]] = {
    Grid: lambda layer, matrix, storage, codes: TunedMatrix(layer.name, matrix, storage, codes=codes),
    SuperGrid: lambda _, matrix, __, codes: TunedBlocks(matrix, codes=codes),
    ProductGrid: lambda layer, matrix, _, codes: TunedLadders(matrix, layer.rate, codes=codes),
}  # by the kind of grid that a layer is on: from its record, its matrix, the dtype of steps and whether codes are trained


def trains_codes(layer: LayerRecord) -> bool:
    """Whether codes of a layer are trained: those of few bits, and those that are entropy-coded."""
    return layer.number_format.bits <= CODE_BITS


def mean_unit(matrices: Iterable[TunedLayer]) -> float:
    """Return how far off the weights of layers are, relative, in the mean."""
    units = [each.unit for each in matrices]
    return sum(units) / len(units)


def windows_of(model: Model, recipe: Recipe, given: Given | None, count: int, length: int) -> Tensor:
    """Return up to `count` windows of `length` tokens of the text.

    Raises:
        RecipeError: the windows that were given have another length.
        CalibrationError: the text cannot be read, or windows are longer than the model has positions.
    """
    if given is not None and given.tokens is not None:
        if length != given.tokens.shape[1]:
            raise RecipeError(
                f"--seqlen is {length}, the windows given have {given.tokens.shape[1]} tokens. Leave it out."
            )
        return given.tokens[:count]
    text = recipe.calibration.calibration if given is None else given.texts
    refuse_lost(text)
    if model.positions is not None and length > model.positions:
        raise CalibrationError(f"--seqlen {length} is more than the {model.positions} positions of the model.")
    return read_windows(model.tokenizer(), text, samples=count, seqlen=length, seed=recipe.calibration.seed)


def norms_stored(model: Model) -> dict[str, str]:
    """Return the norms that have a tensor of their own in the checkpoint: name of the parameter, name of the tensor."""
    names = [name for name in norms_of(model.network) if model.weights.stored_alone(name)]
    return {name: model.weights.source_name(name) for name in names}
