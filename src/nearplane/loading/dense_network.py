"""The network that config.json describes: what it expects of a checkpoint's matrices, and itself with every weight decoded.

Also where the blobs of a native checkpoint go: modules of their own, and matrices of experts in stacked parameters. What
transformers loads into each place is bytes, decoded when all is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D

from nearplane.coding.blob import decode, decode_packed, shape_of
from nearplane.errors import FormatError
from nearplane.formats.native import Native, matrix_of
from nearplane.formats.stored import Stack, quantization_of, read_dense, reader_of
from nearplane.loading.packed_linear import PackedLinear
from nearplane.models.conversion import Names, names_apart, patterns_apart
from nearplane.models.experts import ExpertLayer, is_stack, stacked_layers
from nearplane.models.layers import is_linear
from nearplane.models.pretrained import empty_network, network_of
from nearplane.system.fp8_mxfp4 import WidenedReader

KEY = Native.KEY
LENGTH = torch.int64  # of a blob, where several are in one tensor


def stored_transposed(model: nn.Module) -> set[str]:
    """Return the names of the weights that are stored as (in, out), with and without the prefix of the base model."""
    names = {f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, with and without the base model's prefix; of matrices always (out, in).

    Also those of the matrices of experts, by the names that they have as layers.
    """
    transposed, prefix = stored_transposed(model), f"{getattr(model, 'base_model_prefix', '')}."
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        shapes[name] = shapes[name.removeprefix(prefix)] = shape[::-1] if name in transposed else shape
    for layers in stacked_matrices(model).values():
        shapes |= {f"{layer.name}.weight": layer.shape for layer in layers}
    return shapes


def stacked_matrices(model: nn.Module) -> dict[str, list[ExpertLayer]]:
    """Return the matrices in every parameter that holds those of several experts, in order, as views of its module."""
    conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []

    def names(parameter: str, parts: int, experts: int) -> Names:
        found = names_apart(conversions, parameter, parts, experts)
        return Names(layers=found, stored=found, sources=tuple(tuple((name,) for name in part) for part in found))

    stacks: dict[str, list[ExpertLayer]] = {}
    for path, module in model.named_modules():
        for layer in stacked_layers(path, module, names) if is_stack(module) else ():
            stacks.setdefault(layer.parameter, []).append(layer)
    return stacks


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Return how the stacked parameters of a network are put together, of which transformers knows no matrices by name."""
    conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    return {
        parameter: Stack(
            shape=tuple(layers[0].weight.shape),
            names=tuple(layer.name for layer in layers),
            places=tuple((layer.expert, layer.outputs, layer.transposed) for layer in layers),
        )
        for parameter, layers in stacked_matrices(model).items()
        if patterns_apart(conversions, parameter) is None
    }


def decoded_tensors(folder: Path, empty: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, tensor) of a folder as if it had never been quantized; see `read_dense`.

    Args:
        folder: quantized.
        empty: the network that its config.json describes.
    """
    return read_dense(folder, transposed=stored_transposed(empty), shapes=weight_shapes(empty), stacks=stacks_of(empty))


def dense_network(
    folder: Path, *, dtype: torch.dtype | str = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the language model of a folder with every weight decoded; needs no package of the format's makers.

    Args:
        folder: quantized in a format that nearplane reads, or not quantized.
        dtype: of the weights; "auto" is that of config.json.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        FormatError: a layer is not what its format or config.json says.
        ModelError: transformers builds no such network, or a weight is missing.
    """
    reader = reader_of(folder)
    empty = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader)
    if quantization_of(folder) is None:
        return network_of(folder, dtype=dtype, empty=empty, trust_remote_code=trust_remote_code)
    if isinstance(dtype, str):
        dtype = empty.dtype if dtype == "auto" else getattr(torch, dtype)
    if isinstance(reader, WidenedReader):
        tensors: Iterator[tuple[str, Tensor]] = ((name, reader.read([name])[name]) for name in reader.names())
    else:
        tensors = decoded_tensors(folder, empty)
    weights = {name: values.to(dtype) if values.is_floating_point() else values for name, values in tensors}
    return network_of(folder, dtype=dtype, weights=weights, empty=empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one blob goes.

    Args:
        name: of the module in this model.
        called: what errors say: file and tensor.
        shape: (out, in) of the matrix.
        module: that was there, without weights.
        tensor: of the module that transformers fills with the blob: "weight" where the module stays and is decoded.
    """

    name: str
    called: str
    shape: tuple[int, int]
    module: nn.Module
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlace:
    """Where the blobs of all matrices in a stacked parameter go.

    Args:
        name: of the module in this model.
        tensor: the parameter, which transformers fills with all blobs in one.
        called: of each matrix, what errors say.
        layers: the matrices, as views of the module.
        shape: of the parameter.
    """

    name: str
    tensor: str
    called: tuple[str, ...]
    layers: tuple[ExpertLayer, ...]
    shape: tuple[int, ...]

    @property
    def words(self) -> list[str]:
        """What distinguishes the matrices of one expert: the ends of their names."""
        return list(dict.fromkeys(layer.name.rpartition(".")[2] for layer in self.layers))


class Coded(ConversionOps):
    """Take the blob of two tensors that transformers puts in one place: beside it may be a weight without elements."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Return the blob under the name of the weight."""
        return {kwargs["full_layer_name"]: max(input_dict.values(), key=lambda tensors: tensors[0].numel())}


class Joined(ConversionOps):
    """Take the blobs of all matrices in a parameter as one tensor: their number and lengths, then one after the other."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Return that under the name of the parameter; blobs by the order of patterns, within each by number."""
        blobs = [blob for pattern in kwargs["source_patterns"] for blob in input_dict.get(pattern, []) if blob.numel()]
        lengths = torch.tensor([len(blobs), *(blob.numel() for blob in blobs)], dtype=LENGTH)
        return {kwargs["full_layer_name"]: [torch.cat([lengths.view(torch.uint8), *(blob.cpu() for blob in blobs)])]}


def apart(joined: Tensor) -> list[Tensor]:
    """Return the blobs that `Joined` put together."""
    size = LENGTH.itemsize
    count = int(joined[:size].clone().view(LENGTH))
    lengths = joined[size : size * (count + 1)].clone().view(LENGTH).tolist()
    return list(joined[size * (count + 1) :].split(lengths))


def make_places(
    model: PreTrainedModel, names: Sequence[str], called: Iterable[str], dtype: torch.dtype
) -> dict[str, Place | StackPlace]:
    """Find where blobs belong, and put packed layers in place of linear ones of their own.

    Args:
        model: empty.
        names: of quantized modules and matrices of experts, as config.json has them.
        called: what errors say of each.
        dtype: of the weights.

    Returns:
        The places by the name of the tensor that transformers fills.

    Raises:
        FormatError: the model has no such matrix, or some of the experts of a parameter are not named.
    """
    prefix, stacks = f"{model.base_model_prefix}.", stacked_matrices(model)
    views = {layer.name: layer for layers in stacks.values() for layer in layers}
    if not any(name.startswith(prefix) for name in views):
        views |= {prefix + name: layer for name, layer in views.items()}
    places: dict[str, Place | StackPlace] = {}
    experts: dict[str, dict[str, str]] = {}  # of a parameter, what errors say of each matrix
    for name, said in zip(names, called, strict=True):
        if name in views:
            experts.setdefault(views[name].parameter, {})[views[name].name] = said
        else:
            place = make_place(model, name, said, dtype)
            places[f"{place.name}.{place.tensor}"] = place
    for parameter, found in experts.items():
        layers, (module, _, tensor) = stacks[parameter], parameter.rpartition(".")
        if absent := [layer.name for layer in layers if layer.name not in found]:
            raise FormatError(
                f"config.json does not name {absent[0]} as quantized, but other experts of {parameter}. Fetch config.json again."
            )
        said_of = tuple(found[layer.name] for layer in layers)
        shape = tuple(layers[0].weight.shape)
        places[parameter] = StackPlace(name=module, tensor=tensor, called=said_of, layers=tuple(layers), shape=shape)
    return places


def make_place(model: PreTrainedModel, name: str, called: str, dtype: torch.dtype) -> Place:
    """Find the module that a blob belongs to, and put a packed layer in its place if it is a linear one of its own.

    Raises:
        FormatError: the model has no such matrix.
    """
    known = dict(model.named_modules())
    path = name if name in known else name.removeprefix(f"{model.base_model_prefix}.")
    module = known.get(path)
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise FormatError(
            f"config.json names {name} as quantized; {type(model).__name__} has no matrix of that name. "
            f"Fetch config.json again."
        )
    out, columns = weight.shape[::-1] if type(module) is Conv1D else weight.shape
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    packed = (is_linear(module) or type(module) is Conv1D) and f"{path}.weight" not in tied
    if packed:
        layer = PackedLinear(columns, out, bias=module.bias is not None, dtype=dtype, device="meta")
        layer.register_buffer(KEY, torch.empty(1, dtype=torch.uint8, device="meta"))
        model.set_submodule(path, layer)
    return Place(name=path, called=called, shape=(out, columns), module=module, tensor=KEY if packed else "weight")


def fill(place: Place | StackPlace, module: nn.Module, dtype: torch.dtype, threads: int | None) -> None:
    """Decode what was loaded into a place.

    Raises:
        FormatError: it was not loaded, is damaged, or of another shape.
    """
    loaded: Tensor = getattr(module, place.tensor)
    called = place.called if isinstance(place, Place) else place.called[0]
    if loaded.is_meta or loaded.dtype != torch.uint8 or loaded.dim() != 1 or loaded.numel() < 2:
        raise FormatError(f"{called} was not loaded. Fetch the folder again, and map its layers to a device.")
    if isinstance(place, StackPlace):
        _fill_stack(place, module, loaded, dtype, threads)
        return
    blob = loaded.detach().cpu().numpy()
    _check_shape(place.called, tuple(shape_of(blob, name=place.called)), place.shape)
    if isinstance(module, PackedLinear):
        delattr(module, place.tensor)
        module.fill(decode_packed(blob, name=place.called, threads=threads), loaded.device)
        return
    values = matrix_of(decode(blob, name=place.called, threads=threads)).decode().to(dtype)
    values = values.T.contiguous() if type(place.module) is Conv1D else values
    module.weight = nn.Parameter(values.to(loaded.device))


def _fill_stack(place: StackPlace, module: nn.Module, loaded: Tensor, dtype: torch.dtype, threads: int | None) -> None:
    """Decode the matrices of all experts into their parameter."""
    blobs, words = apart(loaded.detach().cpu()), place.words
    if len(blobs) != len(place.layers):
        raise FormatError(
            f"{place.called[0]} and its like: {len(blobs)} of the {len(place.layers)} matrices of "
            f"{place.name}.{place.tensor} are there. Fetch the folder again."
        )
    experts = len(blobs) // len(words)
    whole = nn.Parameter(torch.empty(place.shape, dtype=dtype), requires_grad=False)
    setattr(module, place.tensor, whole)
    for layer, called in zip(place.layers, place.called, strict=True):
        blob = blobs[words.index(layer.name.rpartition(".")[2]) * experts + layer.expert].numpy()
        _check_shape(called, tuple(shape_of(blob, name=called)), layer.shape)
        replace(layer, module=module).write(matrix_of(decode(blob, name=called, threads=threads)).decode())
    setattr(module, place.tensor, nn.Parameter(whole.data.to(loaded.device), requires_grad=False))


def _check_shape(called: str, found: tuple[int, ...], expected: tuple[int, int]) -> None:
    if found != expected:
        raise FormatError(
            f"{called} holds a matrix {found[0]} x {found[1]}, config.json asks for {expected[0]} x {expected[1]}. The two do not "
            f"belong together; fetch the folder again."
        )
