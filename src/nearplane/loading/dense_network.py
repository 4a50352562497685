"""Networks from quantized folders with every weight decoded, and the shapes and names that they expect of a folder.

Also the places of the blobs of a native checkpoint: separate modules, and matrices of experts in stacked parameters.
transformers loads bytes into each place; they are decoded after all tensors are loaded.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D

from nearplane.coding.blob import SHAPE_BYTES, decode, decode_packed, shape_of
from nearplane.coding.on_device import Blob, Decoded, decoded, decoder_of
from nearplane.coding.packed_matrix import PackedMatrix
from nearplane.errors import FormatError
from nearplane.formats.native import Native, matrix_of, matrix_on_device
from nearplane.formats.stored import Stack, Stored, quantization_of, read_dense, reader_of
from nearplane.loading.coded_linear import CodedLinear
from nearplane.loading.loaded_network import CPU, network_of
from nearplane.loading.packed_grids import PackedGrids
from nearplane.loading.packed_linear import PackedLinear
from nearplane.models.expert_names import Names, names_apart, patterns_apart
from nearplane.models.experts import ExpertLayer, stacked_layers
from nearplane.models.layers import is_linear, is_stack
from nearplane.models.pretrained import empty_network
from nearplane.system.fp8_mxfp4 import WidenedReader
from nearplane.system.recorded_hashes import check_hashes

KEY = Native.KEY
LENGTH = torch.int64  # dtype of the lengths of blobs that share one tensor


def stored_transposed(model: nn.Module) -> set[str]:
    """Return the names of the weights that are stored as (in, out), with and without the prefix of the base model."""
    names = {f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every parameter, with and without the base model's prefix; matrices are (out, in).

    The matrices of experts are included, under the names that they have as layers.
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
    """Return {stacked parameter: its matrices in order, as views of the module}."""
    conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []

    def names(parameter: str, parts: int, experts: int) -> Names:
        matrices = names_apart(conversions, parameter, parts, experts)
        return Names(
            layers=matrices, stored=matrices, sources=tuple(tuple((name,) for name in part) for part in matrices)
        )

    stacks: dict[str, list[ExpertLayer]] = {}
    for path, module in model.named_modules():
        for layer in stacked_layers(path, module, names) if is_stack(module) else ():
            stacks.setdefault(layer.parameter, []).append(layer)
    return stacks


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Return {parameter: `Stack`} of the stacked parameters for whose matrices transformers has no names."""
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


def decoded_tensors(
    folder: Path, empty: nn.Module, *, check: bool = True, device: torch.device = CPU, packed: PackedGrids | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator of (parameter name, decoded tensor) of a quantized folder; see `read_dense`.

    Args:
        folder: A quantized folder.
        empty: The network that its config.json describes, on the meta device.
        check: Whether files are compared with the run record, if there is one.
        device: The device that tensors are for; those that are decoded there lie there already.
        packed: Collection of the layers that stay packed; None: all are decoded.

    Raises:
        FormatError: A file differs from the run record.
    """
    if check:
        check_hashes(folder, weights=reader_of(folder).checksums is None)  # else tensors are checked as they are read
    transposed, shapes, stacks = stored_transposed(empty), weight_shapes(empty), stacks_of(empty)
    options: dict[str, Any] = {} if packed is None else {"decode": packed.take}
    return read_dense(folder, transposed=transposed, shapes=shapes, stacks=stacks, device=device, **options)


def dense_network(
    folder: Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device = CPU,
    check: bool = True,
    packed: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the language model of a folder with weights decoded or packed, without the packages of the format's reader.

    Args:
        folder: A folder that is quantized in a format that nearplane reads, or not quantized.
        dtype: Dtype of the weights; "auto" is the dtype in config.json.
        device: Device of the weights, to which each is sent as it is decoded.
        check: Whether files are compared with the run record, if there is one.
        packed: Whether layers stay packed where their grids can, see `grid_linear.py`; on the CPU.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        FormatError: A layer contradicts its format or config.json, or a file differs from the run record.
        ModelError: transformers cannot build the network, or a weight is missing.
    """
    reader = reader_of(folder)
    empty = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader)
    widened = isinstance(reader, WidenedReader)
    if quantization_of(folder) is None and not widened:
        return network_of(folder, dtype=dtype, device=device, empty=empty, trust_remote_code=trust_remote_code)
    floats: torch.dtype | None = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, empty.dtype)
    grids = PackedGrids(empty, Stored(folder).names(), floats or empty.dtype) if packed and not widened else None
    kept: set[str] = set()
    if widened:
        tensors: Iterator[tuple[str, Tensor]] = ((name, reader.read([name])[name]) for name in reader.names())
    else:
        tensors = decoded_tensors(folder, empty, check=check, device=device, packed=grids)
        kept = {*Stored(folder).rest()}  # transformers knows which of these stay in float32, whatever the dtype
    weights = {
        name: values.to(device, None if name in kept or not values.is_floating_point() else floats)
        for name, values in tensors
    }
    model = network_of(
        folder, dtype=empty.dtype if floats is None else floats, device=device, weights=weights, empty=empty
    )
    for name, values in weights.items():
        if name.endswith(".weight"):
            check_stored_floats(f"{folder}: {name}", values)
    if grids is not None:
        grids.put_into(model)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place in the network of one blob, or of the blobs of all matrices in one stacked parameter.

    Args:
        name: Name of the module in the network.
        tensor: Name of the module's tensor that receives the blobs, several as one tensor.
        labels: File and tensor of each matrix, for error messages.
        shape: Shape of the matrix (out, in), or of the parameter.
        module: The original module, without weights.
        layers: The matrices of a parameter, as views of the module; none where it is one matrix.
    """

    name: str
    tensor: str
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    module: nn.Module
    layers: tuple[ExpertLayer, ...] = ()

    @property
    def decoded(self) -> bool:
        """Whether the module is kept and its weight decoded."""
        return self.tensor == "weight" and not self.layers

    @property
    def words(self) -> list[str]:
        """Last parts of the names of one expert's matrices, which distinguish them."""
        return list(dict.fromkeys(layer.name.rpartition(".")[2] for layer in self.layers))


class SingleBlob(ConversionOps):
    """Conversion of the tensors of one place into its blob; the other tensor, if any, has no elements."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Return the blob under the name of the weight."""
        return {kwargs["full_layer_name"]: max(input_dict.values(), key=lambda tensors: tensors[0].numel())}


class JoinedBlobs(ConversionOps):
    """Conversion of the blobs of all matrices in a parameter into one tensor: their number, lengths, and bytes."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Return the tensor under the name of the parameter; blobs are ordered by pattern, then by number."""
        blobs = [blob for pattern in kwargs["source_patterns"] for blob in input_dict.get(pattern, []) if blob.numel()]
        lengths = torch.tensor([len(blobs), *(blob.numel() for blob in blobs)], dtype=LENGTH)
        lengths = lengths.view(torch.uint8).to(blobs[0].device) if blobs else lengths.view(torch.uint8)
        return {kwargs["full_layer_name"]: [torch.cat([lengths, *blobs])]}


def split_blobs(joined: Tensor) -> list[Tensor]:
    """Return the blobs in a tensor from `JoinedBlobs`."""
    size = LENGTH.itemsize
    count = int(joined[:size].clone().view(LENGTH))
    lengths = joined[size : size * (count + 1)].clone().view(LENGTH).tolist()
    return list(joined[size * (count + 1) :].split(lengths))


def make_places(
    model: PreTrainedModel, names: Sequence[str], labels: Iterable[str], dtype: torch.dtype
) -> dict[str, Place]:
    """Find the places of all blobs, and replace linear modules by packed layers.

    Args:
        model: The empty network; changed in place.
        names: Names of quantized modules and of matrices of experts, as in config.json.
        labels: File and tensor of each, for error messages.
        dtype: Dtype of the weights.

    Returns:
        {name of the tensor that transformers loads: place}.

    Raises:
        FormatError: The network lacks a named matrix, or only some experts of a parameter are named.
    """
    prefix, stacks = f"{model.base_model_prefix}.", stacked_matrices(model)
    views = {layer.name: layer for layers in stacks.values() for layer in layers}
    if not any(name.startswith(prefix) for name in views):
        views |= {prefix + name: layer for name, layer in views.items()}
    places: dict[str, Place] = {}
    experts: dict[str, dict[str, str]] = {}  # {parameter: {matrix: label}}
    for name, label in zip(names, labels, strict=True):
        if name in views:
            experts.setdefault(views[name].parameter, {})[views[name].name] = label
        else:
            place = make_place(model, name, label, dtype)
            places[f"{place.name}.{place.tensor}"] = place
    for parameter, label_of in experts.items():
        layers, (module, _, tensor) = stacks[parameter], parameter.rpartition(".")
        if absent := [layer.name for layer in layers if layer.name not in label_of]:
            raise FormatError(
                f"config.json names other experts of {parameter} as quantized, not {absent[0]}. Fetch config.json again."
            )
        places[parameter] = Place(
            name=module,
            tensor=tensor,
            labels=tuple(label_of[layer.name] for layer in layers),
            shape=tuple(layers[0].weight.shape),
            module=model.get_submodule(module),
            layers=tuple(layers),
        )
    return places


def make_place(model: PreTrainedModel, name: str, label: str, dtype: torch.dtype) -> Place:
    """Find the module of a blob, and replace it by a packed layer if it is linear and its weight is not tied.

    Raises:
        FormatError: The network has no such matrix.
    """
    known = dict(model.named_modules())
    path = name if name in known else name.removeprefix(f"{model.base_model_prefix}.")
    module = known.get(path)
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise FormatError(
            f"config.json names {name} as quantized, but {type(model).__name__} has no matrix of that name. "
            f"Fetch config.json again."
        )
    out, columns = weight.shape[::-1] if type(module) is Conv1D else weight.shape
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    packed = (is_linear(module) or type(module) is Conv1D) and f"{path}.weight" not in tied
    if packed:
        layer = PackedLinear(columns, out, bias=module.bias is not None, dtype=dtype, device="meta")
        layer.register_buffer(KEY, torch.empty(1, dtype=torch.uint8, device="meta"))
        model.set_submodule(path, layer)
    return Place(name=path, tensor=KEY if packed else "weight", labels=(label,), shape=(out, columns), module=module)


class Matrix(NamedTuple):
    """A coded matrix, decoded when it is asked for.

    Args:
        packed: Returns it in the form of a runtime; on a device that decodes, with its codes there.
        values: Returns its (out, in) values, float32, there as well.
    """

    packed: Callable[[], PackedMatrix]
    values: Callable[[], Tensor]


def on_cpu(blob: Blob, threads: int | None) -> Matrix:
    """Return a matrix that the CPU decodes in so many threads."""
    coded = blob.coded.cpu().numpy()
    return Matrix(
        partial(decode_packed, coded, name=blob.name, threads=threads),
        lambda: matrix_of(decode(coded, name=blob.name, threads=threads)).decode(),
    )


def on_device(decoded: Decoded) -> Matrix:
    """Return a matrix that a device has decoded."""
    return Matrix(decoded.packed, lambda: matrix_on_device(decoded).decode())


def fill_all(model: nn.Module, places: Iterable[Place], dtype: torch.dtype) -> None:
    """Decode the bytes that were loaded into all places: on their device if it has a decoder, else on all cores.

    Raises:
        FormatError: The bytes of a place are missing or damaged, or a matrix has another shape.
    """
    work: dict[torch.device, list[tuple[Place, nn.Module]]] = defaultdict(list)
    for place in places:
        module = model.get_submodule(place.name)
        device = getattr(module, place.tensor).device
        work[CPU if decoder_of(device) is None else device].append((place, module))
    left = sorted(work.pop(CPU, []), key=lambda entry: -getattr(entry[1], entry[0].tensor).numel())
    for device, entries in work.items():
        matrices = map(on_device, decoded((blob for entry in entries for blob in blobs_in(*entry)), device))
        for place, _ in entries:
            fill(model, place, dtype, matrices)
    parallel = len(left) >= 2 * (cores := os.cpu_count() or 1)

    def decode_on_cpu(place: Place, module: nn.Module) -> None:
        fill(model, place, dtype, (on_cpu(blob, 1 if parallel else None) for blob in blobs_in(place, module)))

    with ThreadPoolExecutor(cores if parallel else 1) as pool:
        for part in [pool.submit(decode_on_cpu, *entry) for entry in left]:
            part.result()


def blobs_in(place: Place, module: nn.Module) -> list[Blob]:
    """Return the blobs that were loaded into a place: one, or those of all matrices of a stack in order.

    Raises:
        FormatError: The bytes are missing, or a matrix has another shape.
    """
    loaded: Tensor = getattr(module, place.tensor).detach()
    labels = place.labels
    if loaded.is_meta or loaded.dtype != torch.uint8 or loaded.dim() != 1 or loaded.numel() < 2:
        raise FormatError(f"{labels[0]} was not loaded. Fetch the folder again, and map its layers to a device.")
    if not place.layers:
        coded, shapes = [loaded], [place.shape]
    else:
        blobs, words = split_blobs(loaded), place.words
        if len(blobs) != len(place.layers):
            raise FormatError(
                f"{labels[0]}: the files contain {len(blobs)} of the {len(place.layers)} matrices of "
                f"{place.name}.{place.tensor}. Fetch the folder again."
            )
        experts, shapes = len(blobs) // len(words), [layer.shape for layer in place.layers]
        coded = [blobs[words.index(each.name.rpartition(".")[2]) * experts + each.expert] for each in place.layers]
    for blob, label, shape in zip(coded, labels, shapes, strict=True):
        check_stored_shape(label, tuple(shape_of(blob[:SHAPE_BYTES].cpu().numpy(), name=label)), shape)
    return [Blob(blob, label) for blob, label in zip(coded, labels, strict=True)]


def fill(model: nn.Module, place: Place, dtype: torch.dtype, matrices: Iterator[Matrix]) -> None:
    """Put the next matrix, or the next matrices of a stack, into a place instead of the bytes that were loaded.

    Raises:
        FormatError: The bytes are damaged.
    """
    module = model.get_submodule(place.name)
    device = getattr(module, place.tensor).device
    if place.layers:
        whole: Tensor | None = None
        for layer, matrix in zip(place.layers, matrices):  # noqa: B905 (more follow)
            values = matrix.values()
            if whole is None:
                whole = torch.empty(place.shape, dtype=dtype, device=values.device)
                setattr(module, place.tensor, nn.Parameter(whole, requires_grad=False))
            replace(layer, module=module).write(values)
        setattr(module, place.tensor, nn.Parameter(getattr(module, place.tensor).data.to(device), requires_grad=False))
        return
    matrix = next(matrices)
    if isinstance(module, PackedLinear):
        packed = matrix.packed()
        delattr(module, place.tensor)
        if device.type == "cpu":
            layer_on_cpu = CodedLinear(packed, dtype)
            layer_on_cpu.bias = module.bias
            model.set_submodule(place.name, layer_on_cpu)
        else:
            module.fill(packed, device)
        return
    values = matrix.values().to(dtype)
    values = values.T.contiguous() if type(place.module) is Conv1D else values
    module.weight = nn.Parameter(values.to(device))


def check_stored_floats(label: str, weight: Tensor) -> None:
    """Refuse integers in the place of a weight that is not quantized.

    Args:
        label: Folder and tensor.
        weight: The tensor.

    Raises:
        FormatError: It contains integers.
    """
    if not weight.is_floating_point():
        kind = str(weight.dtype).removeprefix("torch.")
        raise FormatError(f"{label} is stored as {kind}, expected a weight. Fetch the folder again.")


def check_stored_shape(label: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a stored matrix whose shape is not that in config.json.

    Raises:
        FormatError: The shapes differ.
    """
    if shape != expected:
        raise FormatError(
            f"{label} is {shape[0]} x {shape[1]}, but config.json describes {expected[0]} x {expected[1]}. These files do not "
            f"belong together. Fetch the folder again."
        )
