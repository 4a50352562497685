"""Original networks with channel scales folded from norms into the weights behind them; the tensors of the files stay as they are.

Where runtimes round inputs in groups, a channel of large inputs coarsens the steps of its neighbours. A norm that multiplies
it by less, before weights that multiply it by as much more, computes the same network, whose inputs are more even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nearplane.errors import ModelError
from nearplane.models.conversion import Weights
from nearplane.models.layers import layout_of
from nearplane.record.fold import Fold
from nearplane.system.safetensors_files import TensorReader


class Scales(NamedTuple):
    """Scales of a tensor.

    Args:
        dim: Dimension of the channels.
        factors: (channels,) factors, float64.
        offset: What the network adds to the tensor before it multiplies by it.
        wide: Whether the tensor becomes float32 (or stays float64), as its dtype does not hold the products.
    """

    dim: int
    factors: Tensor
    offset: float = 0.0
    wide: bool = False


class FoldedReader(TensorReader):
    """Reader of an original model that multiplies some tensors by channel scales.

    Its descriptions are those of the files; what is `wide` is read in float32, but is quantized and never written like that.

    Args:
        reader: Reader of the files.
        scales: Scales by stored name.
    """

    def __init__(self, reader: TensorReader, scales: Mapping[str, Scales]) -> None:
        self.folder, self.infos, self.checksums = reader.folder, reader.infos, reader.checksums
        self._reader, self._scales = reader, scales

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, scaled, into memory of their own."""
        tensors = self._reader.read(names)
        return {name: scaled(x, self._scales[name]) if name in self._scales else x for name, x in tensors.items()}

    def check_network(self, config: Mapping[str, Any]) -> None:
        """Refuse what the reader of the files refuses."""
        self._reader.check_network(config)

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return an unquantized tensor as the files store it."""
        return self._reader.kept(name, tensor)


def scaled(tensor: Tensor, scales: Scales) -> Tensor:
    """Return a tensor with its channels multiplied by factors."""
    shape = [1] * tensor.dim()
    shape[scales.dim] = -1
    factors = scales.factors.to(tensor.device).view(shape)
    if scales.offset:
        return ((tensor.double() + scales.offset) * factors - scales.offset).to(tensor.dtype)
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if scales.wide else tensor
    return tensor * factors.to(tensor.dtype)


def columns_of(module: nn.Module) -> dict[str, int]:
    """Return the parameters of a module that multiply what it is called with, each with its dimension of inputs."""
    matrices = [name for name, each in module.named_parameters(recurse=False) if each.dim() >= 2]
    if (layout := layout_of(module)) is not None:
        return {layout.up: -2 if layout.transposed else -1}
    return dict.fromkeys(matrices, -2 if isinstance(module, Conv1D) else -1)


def scales_of(network: nn.Module, fold: Fold, read: Callable[[str], Tensor]) -> dict[str, Scales]:
    """Return the scales of a fold by name of the parameter.

    A norm that multiplies by 1 + its weight cannot be scaled exactly in the dtype of its weight. What it then multiplies by,
    divided by what it did, is the factor of the weights behind it.

    Args:
        network: The network.
        fold: The fold.
        read: Function from the name of a parameter to the tensor in the files of the original.

    Raises:
        ModelError: The network lacks a parameter of the fold, one has another shape, or a channel would vanish.
    """
    powers = torch.tensor(fold.powers, dtype=torch.float64)
    factors = powers.exp2()
    try:
        norm = [name for name, _ in network.get_submodule(fold.norm).named_parameters(recurse=False)]
        scales = {f"{fold.norm}.{name}": Scales(0, factors, fold.offset) for name in norm}
        columns = {}
        for name in fold.weights:
            path, _, key = name.rpartition(".")
            columns[name] = columns_of(network.get_submodule(path))[key]
        sizes = {name: network.get_parameter(name).shape for name in (*scales, *columns)}
    except (AttributeError, KeyError) as error:
        raise ModelError(f"The network has no {fold.norm[:80]} with the weights of the record behind it.") from error
    for name, size in sizes.items():
        if size[columns.get(name, 0)] != len(powers):
            raise ModelError(f"{name} has another number of channels than its scales, {len(powers)}.")
    if fold.offset:
        if norm != ["weight"]:
            raise ModelError(f"{fold.norm} has a {norm[-1]}, which cannot be scaled exactly.")
        weight = read(f"{fold.norm}.weight")
        before, after = (x.double() + fold.offset for x in (weight, scaled(weight, scales[f"{fold.norm}.weight"])))
        factors = torch.where(powers == 0, 1.0, after / before)
        if not bool(((factors > 0) & factors.isfinite()).all()):
            raise ModelError(f"The scales of {fold.norm} would let a channel vanish.")
    return scales | {name: Scales(dim, 1 / factors) for name, dim in columns.items()}


def stored_scales(
    network: nn.Module, weights: Weights, folds: Sequence[Fold], quantized: Collection[str]
) -> dict[str, Scales]:
    """Return the scales of folds by stored name.

    Args:
        network: The network.
        weights: Its weights as they are in the files.
        folds: The folds.
        quantized: Stored names of the weights that are quantized; others are written in their dtype.

    Raises:
        ModelError: A parameter is tied to another, stored together with others, or not exact in the dtype in which it is
            written; or `scales_of` refuses a fold.
    """
    stored: dict[str, Scales] = {}
    for fold in folds:
        scales = scales_of(network, fold, weights.stored)
        for name, each in scales.items():
            load = weights.find(name)
            if load is None or weights.tied(name) or not {*load.targets} <= scales.keys():
                raise ModelError(f"{name} is not stored for itself.")
            for source, _ in load.sources:
                alone, shape = load.converter is None, weights.reader.shape(source)
                if not alone and (len(shape) != 2 or shape[-1] != len(each.factors)):
                    raise ModelError(f"{source} is not stored as (out, in).")
                written, kind = source not in quantized, weights.reader.dtype(source)
                if written and name in fold.weights and fold.offset:
                    raise ModelError(f"{source} cannot be scaled exactly in its dtype.")
                wide = not written and bool(fold.offset or kind == "F16")
                stored[source] = each._replace(dim=each.dim if alone else -1, wide=wide)
    return stored
