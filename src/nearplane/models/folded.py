"""Original networks with channel scales folded from norms into the weights behind them; the tensors of the files stay as they are.

Where runtimes round inputs in groups, a channel of large inputs coarsens the steps of its neighbours. A norm that multiplies
it by less, before weights that multiply it by as much more, computes the same network, whose inputs are more even.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nearplane.errors import ModelError
from nearplane.models.conversion import Weights
from nearplane.models.layers import layout_of
from nearplane.record.fold import Fold
from nearplane.system.safetensors_files import TensorReader

Scales = tuple[int, Tensor]  # dimension of a tensor, and the factors along it


class FoldedReader(TensorReader):
    """Reader of an original model that multiplies some tensors by channel scales.

    Args:
        reader: Reader of the files.
        scales: {stored name: dimension and factors, powers of two}.
    """

    def __init__(self, reader: TensorReader, scales: Mapping[str, Scales]) -> None:
        self.folder, self.infos, self.checksums = reader.folder, reader.infos, reader.checksums
        self._reader, self._scales = reader, scales

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, scaled, into memory of their own."""
        tensors = self._reader.read(names)
        return {name: scaled(each, self._scales.get(name)) for name, each in tensors.items()}

    def check_network(self, config: Mapping[str, Any]) -> None:
        """Refuse what the reader of the files refuses."""
        self._reader.check_network(config)

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return an unquantized tensor as the files store it."""
        return self._reader.kept(name, tensor)


def scaled(tensor: Tensor, scales: Scales | None) -> Tensor:
    """Return a tensor times factors along a dimension, in its dtype, or in float32 where float16 loses bits of small numbers.

    Without scales it is the tensor itself.
    """
    if scales is None:
        return tensor
    dim, factors = scales
    shape = [1] * tensor.dim()
    shape[dim] = -1
    factors = factors.to(tensor.device).view(shape)
    product = tensor * factors.to(tensor.dtype)
    if tensor.dtype != torch.float16 or torch.equal(product / factors.half(), tensor):
        return product
    return tensor.float() * factors


def back(scales: Scales) -> Scales:
    """Return the scales that undo others."""
    dim, factors = scales
    return dim, 1 / factors


def columns_of(module: nn.Module) -> dict[str, int]:
    """Return the parameters of a module that multiply what it is called with, each with its dimension of inputs."""
    matrices = [name for name, each in module.named_parameters(recurse=False) if each.dim() >= 2]
    if (layout := layout_of(module)) is not None:
        return {layout.up: -2 if layout.transposed else -1}
    return dict.fromkeys(matrices, -2 if isinstance(module, Conv1D) else -1)


def scales_of(network: nn.Module, fold: Fold) -> dict[str, Scales]:
    """Return {name of a parameter: dimension and factors} of a fold.

    Raises:
        ModelError: The network lacks a parameter of the fold, or one has another shape.
    """
    powers = torch.tensor(fold.powers)
    up, down = (torch.ldexp(torch.ones(len(powers)), sign * powers) for sign in (1, -1))
    try:
        norm = dict(network.get_submodule(fold.norm).named_parameters(prefix=fold.norm, recurse=False))
        scales = dict.fromkeys(norm, (0, up))
        for name in fold.weights:
            path, _, key = name.rpartition(".")
            scales[name] = (columns_of(network.get_submodule(path))[key], down)
        unlike = [name for name, (dim, _) in scales.items() if network.get_parameter(name).shape[dim] != len(powers)]
    except (AttributeError, KeyError) as error:
        raise ModelError(f"The network has no {fold.norm[:80]} with the weights of the record behind it.") from error
    if unlike:
        raise ModelError(f"{unlike[0]} has another number of channels than its scales, {len(powers)}.")
    return scales


def stored_scales(network: nn.Module, weights: Weights, folds: Sequence[Fold]) -> dict[str, Scales]:
    """Return {stored name: dimension and factors} of folds.

    Raises:
        ModelError: A parameter is tied to another or stored together with others, or `scales_of` refuses a fold.
    """
    stored: dict[str, Scales] = {}
    for fold in folds:
        scales = scales_of(network, fold)
        for name, (dim, factors) in scales.items():
            load = weights.find(name)
            if load is None or weights.tied(name) or not {*load.targets} <= scales.keys():
                raise ModelError(f"{name} is not stored for itself.")
            for source, _ in load.sources:
                alone = load.converter is None
                if not alone and (len(shape := weights.reader.shape(source)) != 2 or shape[-1] != len(factors)):
                    raise ModelError(f"{source} is not stored as (out, in).")
                stored[source] = (dim if alone else -1, factors)
    return stored
