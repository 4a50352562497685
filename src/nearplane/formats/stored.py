"""Reading the quantized layers of a folder one at a time, as codes and steps or decoded to dense weights.

This file deals with names and tensors, not with modules; `LayerFormat` defines the tensors of a layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.integers import expect
from nearplane.formats.layer_format import INPUT_SCALE, MLX, QUANTIZATION, read_config
from nearplane.formats.table import FORMATS, format_of
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.number_formats import InputRounding, NumberFormat
from nearplane.system.paths import CONFIG, INCOMPLETE
from nearplane.system.safetensors_files import ShardReader, TensorInfo, TensorReader
from nearplane.system.source_storage import method_of, source_reader

CPU = torch.device("cpu")


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config of a folder's config.json, or None where weights are not quantized.

    In folders for MLX it is the entry that MLX reads, to which programs other than nearplane give no quant_method.

    Raises:
        FormatError: config.json is missing or not JSON, or the folder is incomplete.
    """
    if (folder / INCOMPLETE).exists():
        raise FormatError(f"{folder} is incomplete: its run has not finished. Repeat the command of that run.")
    entries = read_config(folder)
    config = entries.get("quantization_config")
    if isinstance(own := entries.get(QUANTIZATION), dict):
        return {"quant_method": MLX} | own
    if config is not None and not isinstance(config, dict):
        raise FormatError(
            f"{folder / CONFIG}: quantization_config is {str(config)[:40]!r}, expected an object. Fetch config.json again."
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Assembly of a 3-D parameter from matrices that a folder stores under separate names, as for experts.

    Args:
        shape: Shape of the parameter.
        names: Names of the matrices.
        places: The place of each matrix: index of its slice, its outputs in the slice, and whether the slice is (in,
            out). The index is `...` where the matrix is the whole parameter.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    places: tuple[tuple[int | EllipsisType, slice, bool], ...]

    def joined(self, values: Iterable[Tensor]) -> Tensor:
        """Return the parameter, given the (out, in) values of all matrices in order; those of one are checked before."""
        parameter = torch.empty(0)
        for matrix, (index, outputs, transposed) in zip(values, self.places, strict=True):
            if not parameter.numel():
                parameter = torch.empty(self.shape, dtype=torch.float32, device=matrix.device)
            part = parameter[index].T if transposed else parameter[index]
            part[outputs] = matrix
        return parameter


class Stored:
    """The quantized layers of a folder by name; each is read on demand.

    Args:
        folder: The folder of the checkpoint.
        unfinished: The quantization_config of a folder that is still written; None: read it from config.json.

    Raises:
        FormatError: The folder is not quantized, or nearplane does not read its format.
    """

    def __init__(self, folder: Path, *, unfinished: Mapping[str, Any] | None = None) -> None:
        config = quantization_of(folder) if unfinished is None else dict(unfinished)
        if config is None:
            raise FormatError(f"{folder / CONFIG} has no quantization_config: expected a folder that nearplane wrote.")
        format = format_of(config)
        self.config, self.layers = config, format.layers
        self.reader = format.reader(folder, unfinished=unfinished is not None)
        if unfinished is None and self.layers.CHECKSUMS and isinstance(self.reader, ShardReader):
            self.reader.check_complete()
        self._parts = self.layers.parts(self.reader.names())

    def names(self) -> list[str]:
        """Return the names of all quantized layers."""
        return list(self._parts)

    def rest(self) -> list[str]:
        """Return the names of the unquantized tensors of the network."""
        parts = {part for parts in self._parts.values() for part in parts}
        return [name for name in self.reader.names() if name not in parts and not self.layers.is_beside(name)]

    def beside(self) -> dict[str, Tensor]:
        """Return the tensors that are neither of a layer nor of the network, such as scales of a server's cache."""
        return self.reader.read([name for name in self.reader.names() if self.layers.is_beside(name)])

    def file(self, name: str) -> Path:
        """Return the file that holds the first tensor of one layer."""
        return self.reader.file(self._parts[name][0])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one layer, checked against the folder's checksums."""
        return self.reader.read(self._parts[name])

    def repeated_files(self) -> dict[str, str]:
        """Return the expected texts of the files that repeat the quantization_config, by file name."""
        return self.layers.files(self.config)

    def number_format(self, name: str) -> NumberFormat:
        """Return the number format of one layer in the config."""
        return self.layers.grid_of(self.config, name)

    def matrix(self, name: str, tensors: Mapping[str, Tensor], device: torch.device = CPU) -> QuantizedMatrix:
        """Return the quantized matrix of one layer on a device, from its tensors."""
        matrix = self.unpacked(name, tensors, device)
        return matrix if device.type == "cpu" else matrix.to(device)

    def unpacked(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> QuantizedMatrix:
        """Return the matrix of one layer, from which `decode` makes values, on `device` if the format is decoded there.

        Raises:
            FormatError: The tensors contradict the format, or its steps are not finite.
        """
        matrix = self.layers.unpack_for(device, name, tensors, self.number_format(name))
        if isinstance(matrix.grid, Grid):  # the decoder of others checks theirs
            check_finite(name, matrix.grid.parts.values())
        return matrix

    def inputs(self, name: str) -> tuple[InputRounding, float | None] | None:
        """Return how runtimes round the inputs of one layer and their global scale, if they have one; None: not at all.

        Raises:
            FormatError: The global scale is missing or no positive number.
        """
        how = self.layers.inputs_of(self.config, name)
        if how is None or not how.global_scale:
            return None if how is None else (how, None)
        scale = float(expect(name, self.tensors(name), INPUT_SCALE, (1,), {torch.float32}))
        if not 0 < scale < math.inf:
            raise FormatError(
                f"{name}: the global scale of its inputs is {scale:g}, expected a positive number. Fetch the folder again."
            )
        return how, scale


def read_matrices(
    folder: Path, *, shapes: Mapping[str, tuple[int, ...]] | None = None, device: torch.device = CPU
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Yield (name, matrix) of every quantized layer of a folder, one in memory at a time.

    Args:
        device: The device that values are for, see `Stored.unpacked`.
        shapes: Shapes of all parameters of the model, see `weight_shapes`; layers that do not fit are refused unread.

    Raises:
        FormatError: A layer contradicts its format or the model, or nearplane does not read the format.
    """
    if quantization_of(folder) is None:
        return
    stored = Stored(folder)
    for name in stored.names():
        tensors = stored.tensors(name)
        if shapes is not None:
            part = next(iter(tensors))
            place = f"{stored.reader.file(part)}: {part}"
            check_shape(place, f"{name}.weight", stored.layers.shape_of(name, tensors), shapes)
        yield name, stored.unpacked(name, tensors, device)


def check_finite(name: str, steps: Iterable[Tensor]) -> None:
    """Refuse steps or offsets of a layer that are not finite.

    Raises:
        FormatError: One of them is not.
    """
    if not all(bool(part.isfinite().all()) for part in steps):
        raise FormatError(
            f"{name} has steps or offsets that are NaN or Inf: the file is damaged. Fetch the folder again."
        )


def check_shape(place: str, name: str, actual: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a matrix whose (out, in) shape is not the model's, or exceeds all weights if the name is unknown.

    Raises:
        FormatError: The shape is not that of the model.
    """
    expected = shapes.get(name)
    if expected is None and math.prod(actual) > (limit := max(math.prod(shape) for shape in shapes.values())):
        raise FormatError(
            f"{place} is {actual[0]} x {actual[1]}, but config.json describes no weight of more than {limit:,} elements. These "
            f"files do not belong together. Fetch the folder again."
        )
    if expected is not None and actual != expected:
        raise FormatError(
            f"{place} is {actual[0]} x {actual[1]}, but config.json describes {' x '.join(map(str, expected))}. These files do "
            f"not belong together. Fetch the folder again."
        )


def read_dense(
    folder: Path,
    *,
    transposed: Collection[str] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    stacks: Mapping[str, Stack] | None = None,
    device: torch.device = CPU,
    decode: Callable[[str, QuantizedMatrix], Tensor] = lambda name, matrix: matrix.decode(),
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, dense tensor) of a folder, one in memory at a time.

    A quantized layer becomes float32 values `scale * (code - zero)` named `name.weight`: (out, in), or (in, out) if
    that name is in `transposed`, as in Conv1D modules. Experts that share one parameter which transformers does not
    assemble are yielded as that parameter. All other tensors are yielded as stored.

    Args:
        transposed: Names of weights that modules store as (in, out), see `stored_transposed`.
        shapes: Shapes of all parameters of the model, see `read_matrices`.
        stacks: Parameters assembled from several matrices, by name, see `stacks_of`.
        device: The device that tensors are for; those that are decoded there lie there already, all others on the CPU.
        decode: Function from the name of a layer and its matrix to its (out, in) values.

    Raises:
        FormatError: A layer contradicts its format or the model, or nearplane does not read the format.
    """
    stored = None if quantization_of(folder) is None else Stored(folder)
    reader = ShardReader(folder) if stored is None else stored.reader
    for name in reader.names() if stored is None else stored.rest():
        yield name, reader.read([name])[name]
    stacks = stacks or {}
    parameter_of = {name: parameter for parameter, stack in stacks.items() for name in stack.names}
    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, matrix in read_matrices(folder, shapes=shapes, device=device):
        values = decode(name, matrix)
        del matrix  # before the next one is read
        if (parameter := parameter_of.get(name)) is None:
            yield f"{name}.weight", values.T.contiguous() if f"{name}.weight" in transposed else values
            continue
        waiting[parameter][name] = values
        if len(waiting[parameter]) == len(stacks[parameter].names):
            parts = waiting.pop(parameter)
            yield parameter, stacks[parameter].joined(parts[each] for each in stacks[parameter].names)
    for parameter, parts in waiting.items():
        absent = next(name for name in stacks[parameter].names if name not in parts)
        raise FormatError(
            f"{folder}: {absent} is missing, but other matrices of {parameter} are present. Fetch the folder again."
        )


def reader_of(folder: Path) -> TensorReader:
    """Return a reader of the tensors of a folder, in any format that its config.json may name.

    Raises:
        FormatError, ModelError: The folder is incomplete, or its weight files are missing.
    """
    config = quantization_of(folder)
    method = None if config is None else config.get("quant_method")
    plain = {"quantization_config": config}
    if isinstance(method, str) and method in FORMATS and method_of(folder, plain) is None:
        return FORMATS[method].reader(folder)
    return source_reader(folder, plain)  # safetensors, read unchanged or widened


class DecodedReader(TensorReader):
    """Reader of a quantized folder that gives dense weights; each is decoded on demand.

    Args:
        folder: The quantized folder.
        shapes: Shapes of all weights of its network, matrices as (out, in), see `weight_shapes`.
        transposed: Names of the weights that modules store as (in, out), see `stored_transposed`.
        stacks: Parameters assembled from several matrices, by name, see `stacks_of`.

    Raises:
        FormatError: nearplane does not read the folder's format, or a matrix is larger than all of the network's.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        transposed: Collection[str],
        stacks: Mapping[str, Stack],
    ) -> None:
        self.folder = folder
        self._stored, self._shapes = Stored(folder), dict(shapes)
        separate = set(self._stored.names())
        stacks = {name: stack for name, stack in stacks.items() if separate.issuperset(stack.names)}
        separate -= {name for stack in stacks.values() for name in stack.names}
        self._dense: dict[str, Stack] = {}
        for layer in self._stored.names():
            if layer in separate:
                weight = f"{layer}.weight"
                if weight not in shapes:  # transformers renames it on loading
                    self._shapes[weight] = self._shape_of(layer, self._stored.tensors(layer))
                turned, shape = weight in transposed, self._shapes[weight]
                places = ((..., slice(None), turned),)
                self._dense[weight] = Stack(shape=shape[::-1] if turned else shape, names=(layer,), places=places)
        self._dense |= stacks
        self.infos = {name: self._stored.reader.infos[name] for name in self._stored.rest()}
        for name, stack in self._dense.items():
            file = self._stored.file(stack.names[0])
            self.infos[name] = TensorInfo("F32", stack.shape, 4 * math.prod(stack.shape), file)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors; layers are decoded to float32.

        Raises:
            FormatError: A layer contradicts its format or config.json.
        """
        names = list(names)
        stored = self._stored.reader.read([name for name in names if name not in self._dense])
        for name in (name for name in names if name in self._dense):
            stored[name] = self._dense[name].joined(map(self._values, self._dense[name].names))
        return stored

    def _shape_of(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a layer, after checking that the network has a weight of that shape."""
        shape, file = self._stored.layers.shape_of(layer, tensors), self._stored.file(layer)
        check_shape(f"{file}: {layer}", f"{layer}.weight", shape, self._shapes)
        return shape

    def _values(self, layer: str) -> Tensor:
        tensors = self._stored.tensors(layer)
        self._shape_of(layer, tensors)
        return self._stored.matrix(layer, tensors).decode()
