"""The GGUF of `--like` beside the model: its tensors compared, and layers that it cannot hold quantized left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from nearplane.errors import first_few
from nearplane.formats.gguf.like import Like, Source, compare
from nearplane.models.experts import ExpertLayer
from nearplane.models.layers import Conv1DLayer, Layer
from nearplane.models.model import Model
from nearplane.planning.request import open_original
from nearplane.recipe.recipe import Recipe

logger = logging.getLogger("nearplane")


def with_like(folder: str, recipe: Recipe, path: str, *, trust_remote_code: bool) -> tuple[Recipe, Like]:
    """Compare the GGUF at `path` with the model; return the recipe without the layers that cannot be quantized in it.

    Raises:
        NearplaneError: A tensor of the file is not in the model, or one of them cannot be read.
    """
    model = open_original(folder, recipe, trust_remote_code=trust_remote_code)
    layers = {f"{layer.written(model.weights)}.weight": layer for layer in model.layers}
    config = model.config.get_text_config().to_dict()
    like = compare(Path(path), _sources(model, layers), layers.keys(), config, str(folder))
    modules = [name for name, module in model.network.named_modules() if isinstance(module, Conv1D)]
    like = replace(like, turned=like.turned - {model.weights.source_name(f"{name}.weight") for name in modules})
    if not like.left:
        return recipe, like
    reasons = {layers[name].name: why for name, why in like.left.items()}
    logger.warning(
        f"{len(reasons)} layers are not quantized: {first_few([f'{n} ({why})' for n, why in reasons.items()])}"
    )
    patterns = {re.sub("[0-9]+", "[0-9]+", re.escape(name)) for name in reasons}
    kept = [layer.name for layer in model.layers if layer.name not in reasons]
    ignore = []
    for pattern in sorted(patterns):
        names = [name for name in reasons if re.fullmatch(pattern, name)]
        others = any(re.fullmatch(pattern, name) for name in kept)
        ignore += [f"^{re.escape(name)}$" for name in names] if others else [f"^{pattern}$"]
    like = replace(like, reasons=tuple(reasons.items()))
    return replace(recipe, ignore=(*recipe.ignore, *ignore)), like


def _sources(model: Model, layers: dict[str, Layer]) -> dict[str, Source]:
    """Return the tensors of a model by name; layers by their names in a checkpoint of the quantized model."""

    @lru_cache(maxsize=1)  # the last one may hold the matrices of many experts; it is not to be changed
    def read(name: str) -> Tensor:
        return model.reader.read([name])[name]

    sources = {name: Source(model.reader.shape(name), partial(read, name)) for name in model.reader.names()}
    for layer in layers.values():
        for name in layer.copies(model.weights):
            sources.pop(name, None)
    for name, layer in layers.items():
        sources[name] = Source(layer.shape, partial(_matrix, layer, layer.copies(model.weights)[0], read))
    return sources


def _matrix(layer: Layer, stored: str, read: Callable[[str], Tensor]) -> Tensor:
    """Return the (out, in) matrix of a layer from the stored tensor."""
    tensor = read(stored)
    if isinstance(layer, ExpertLayer) and tensor.dim() > 2:  # of all experts
        tensor = tensor[layer.expert]
        return (tensor.T if layer.transposed else tensor)[layer.outputs]
    return tensor.T if isinstance(layer, Conv1DLayer) else tensor.reshape(layer.shape)
