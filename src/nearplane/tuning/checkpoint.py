"""A checkpoint that is tuned or was: its files, the original and the text together, and what of it is trained.

What `tune` and `verify` both need: which norms have tensors of their own, which windows the text gives, and layers and norms as
functions of what is trained of them. And what cannot be tuned, refused in a sentence before work starts, by `tune` and by a run
that is to tune what it solves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.given import Given, refuse_lost
from nearplane.calibration.texts import read_windows
from nearplane.errors import CalibrationError, RecipeError
from nearplane.formats.stored import Stored
from nearplane.lattice.grid import Grid, ProductGrid
from nearplane.lattice.superblock import SuperGrid
from nearplane.models.kinds import has_head
from nearplane.models.model import Model
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import BlockScheme, GridScheme
from nearplane.recipe.sizes import size_text
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.device import Device
from nearplane.system.paths import UNFINISHED
from nearplane.tuning.network import needed, norms_of
from nearplane.tuning.parameters import TunedBlocks, TunedLadders, TunedLayer, TunedMatrix, TunedVector
from nearplane.tuning.settings import CODE_BITS, Split, split


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

    def matrices(self, *, codes: bool = False) -> dict[str, TunedLayer]:
        """Return the layers of blocks, by name; `codes`: whether codes are trained, where that is done."""
        read, storage = self.stored, self.stored.layers.scale_dtype(self.model.dtype)
        found: dict[str, TunedLayer] = {}
        for layer in self.of_blocks():
            matrix = read.matrix(layer.stored, read.tensors(layer.stored)).to(self.device.place)
            found[layer.name] = TUNED[type(matrix.grid)](layer, matrix, storage, codes and trains_codes(layer))
        return found

    def of_blocks(self) -> list[LayerRecord]:
        """Return the records of the layers that are trained: not those of embeddings and head."""
        names = {layer.name for block in self.model.blocks for layer in block.layers}
        return [layer for layer in self.record.layers if layer.name in names]

    def ends(self) -> dict[str, Tensor]:
        """Return the values of quantized embeddings and head, float32, by name of the parameter."""
        read, trained = self.stored, {layer.name for layer in self.of_blocks()}
        return {
            f"{layer.name}.weight": read.matrix(layer.stored, read.tensors(layer.stored)).decode().to(self.device.place)
            for layer in self.record.layers
            if layer.name not in trained
        }

    def vectors(self, matrices: Mapping[str, TunedLayer]) -> dict[str, TunedVector]:
        """Return the norms that the files hold, by name of the parameter; they move by what weights of layers are off."""
        unit = sum(each.unit for each in matrices.values()) / len(matrices)
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


def check_recipe(recipe: Recipe, called: str) -> None:
    """Refuse a recipe whose checkpoints cannot be tuned.

    Raises:
        RecipeError: with the reason.
    """
    if any(recipe.scheme.ends) and recipe.scheme.entropy_coded:
        raise RecipeError(
            f"{called} codes the embeddings or the head; so far such checkpoints are not tuned. Quantize without "
            f"--include-embeddings and --include-head."
        )
    for scheme in (recipe.scheme, *(each.scheme for each in recipe.layers)):
        if not scheme.tunable:
            raise RecipeError(
                f"{called} has weights in {scheme.number_format.name}; so far integers and entropy-coded weights are tuned. "
                f"Quantize without --tune, or with --bits."
            )
    if getattr(recipe.scheme, "size", None) is not None:
        raise RecipeError(
            f"{called} keeps to a --size, and tuning makes the record beside the weights longer. Quantize to "
            f"a --rate instead, a GGUF to a --grid."
        )


def check_layers(model: Model, called: str) -> None:
    """Refuse a model with layers that cannot be tuned.

    Raises:
        RecipeError: names one of them.
    """
    if not has_head(model.network):
        raise RecipeError(
            f"{called} is of {type(model.network).__name__}, which predicts no tokens, and tuning trains on predictions. Quantize "
            f"without --tune."
        )
    if len(model.stacks) > 1:
        raise RecipeError(
            f"{called} is of {type(model.network).__name__}, an encoder with a decoder, and so far tuning trains one stack of "
            f"blocks. Quantize without --tune."
        )


def check_tunable(model: Model, recipe: Recipe, given: Given | None, record: RunRecord, device: Device) -> None:
    """Refuse before a solve what `tune` would refuse after it.

    Args:
        model: the original.
        recipe, given: name the text.
        record: of the run that begins: its windows.
        device: where to compute.

    Raises:
        CalibrationError: the text has too few windows.
        RecipeError: what has to be there does not fit in memory.
    """
    cut = split(lambda count, length: windows_of(model, recipe, given, count, length), record)
    layers = (layer for block in model.blocks for layer in block.layers)
    fits(model, cut, sum(math.prod(layer.shape) for layer in layers if _may_move(recipe, layer.name)), device)


def _may_move(recipe: Recipe, name: str) -> bool:
    """Whether codes of a layer may come to be trained: where widths are chosen by measuring, those of all layers."""
    scheme = recipe.scheme_of(name)
    if isinstance(scheme, BlockScheme):
        return scheme.measured or scheme.number_format.bits <= CODE_BITS
    return not isinstance(scheme, GridScheme) or recipe.allocate == "slope" or scheme.bits < CODE_BITS + 1


def check_checkpoint(folder: Path, record: RunRecord, out: Path) -> None:
    """Refuse checkpoints that cannot be tuned, and to write where they are: nothing would be left of them to read.

    Args:
        folder, record: the checkpoint.
        out: folder to write.

    Raises:
        RecipeError: with the reason; or `out`, or the folder beside it in which it is written, is, holds or lies in the checkpoint.
    """
    if record.tuning is not None:
        raise RecipeError(f"{folder} is tuned already. Tune the checkpoint that it was made of.")
    check_recipe(record.recipe, str(folder))
    for written, said in ((out, "The output"), (Path(f"{out.resolve()}{UNFINISHED}"), f"{out} is first written as")):
        here, there = written.resolve(), folder.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise RecipeError(
                f"{said} {written}, which is, holds or lies in the checkpoint that is tuned, {folder}. Choose another folder."
            )


def check_model(model: Model, record: RunRecord, stored: Stored) -> None:
    """Refuse an original that is not the one that was quantized.

    Raises:
        RecipeError: its layers are others, or a tensor that is not quantized is another in the checkpoint.
    """
    check_layers(model, str(stored.reader.folder))
    there = {(layer.name, layer.shape) for layer in model.layers}
    if unlike := there ^ {(layer.name, (layer.out_features, layer.in_features)) for layer in record.layers}:
        raise RecipeError(
            f"{model.folder} is not the model that was quantized: {len(unlike)} layers are in one of the two only, as "
            f"{min(unlike)[0]}. Pass {record.source} with --against."
        )
    for name in sorted({*stored.rest()} & {*model.reader.names()}):
        wanted, found = stored.reader.kept(name, model.reader.read([name])[name]), stored.reader.read([name])[name]
        if wanted is None:  # such files hold nothing of it
            continue
        if wanted.dtype != found.dtype or not torch.equal(wanted, found):
            raise RecipeError(
                f"{model.folder} is not the model that was quantized, or has changed since: {name} is another in it. Pass "
                f"{record.source} as it was with --against."
            )


def fits(model: Model, cut: Split, codes: int, device: Device) -> bool:
    """Return whether all blocks can be held at a time, where so many codes are trained.

    Raises:
        RecipeError: not even what has to be there fits.
    """
    streamed, held = needed(model, cut.windows, batch=cut.batch, codes=codes)
    free = device.free()
    if free is not None and streamed > free:
        raise RecipeError(
            f"Tuning takes about {size_text(streamed)} of memory on {device}, {size_text(free)} are free. Pass fewer "
            f"--samples, or leave it out."
        )
    return free is not None and 2 * held <= free
