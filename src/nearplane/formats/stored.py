"""The quantized layers of a folder, read back one at a time: as they are, or as if they had never been quantized.

Knows names and tensors, not modules. What a layer's tensors look like is the `LayerFormat`'s.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.beside import CONFIG
from nearplane.formats.layer_format import read_config
from nearplane.formats.table import FORMATS, format_of
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.system.fp8_mxfp4 import source_reader
from nearplane.system.paths import INCOMPLETE
from nearplane.system.safetensors_files import ShardReader, TensorReader


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config of a folder's config.json, or None where weights are not quantized.

    Raises:
        FormatError: there is no config.json, or it is not JSON, or the folder is not finished.
    """
    if (folder / INCOMPLETE).exists():
        raise FormatError(
            f"{folder} is incomplete: the run that writes it is under way or died. Run it again with --overwrite."
        )
    config = read_config(folder).get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise FormatError(
            f"{folder / CONFIG}: quantization_config is {str(config)[:40]!r}, expected an object. Fetch it again."
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """How a tensor of three dimensions is put together of the matrices that a folder holds by names of their own: experts.

    Args:
        shape: of the whole.
        names: of the matrices.
        places: of each: its slice, which of the outputs of the slice are its own, and whether the slice is (in, out). A matrix that
            is a parameter by itself is all of it, `...`.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    places: tuple[tuple[int | EllipsisType, slice, bool], ...]

    def joined(self, values: Iterable[Tensor]) -> Tensor:
        """Return the whole, of the (out, in) values of all matrices in their order."""
        whole = torch.empty(self.shape, dtype=torch.float32)
        for matrix, (index, outputs, transposed) in zip(values, self.places, strict=True):
            part = whole[index].T if transposed else whole[index]
            part[outputs] = matrix
        return whole


class Stored:
    """The quantized layers of a folder, by the names of their tensors; each is read when it is asked for.

    Args:
        folder: that holds them.
        unfinished: the quantization_config of a folder that is being written; None: it is whole, and its config.json tells.

    Raises:
        FormatError: the folder holds none, or its format is not understood.
    """

    def __init__(self, folder: Path, *, unfinished: Mapping[str, Any] | None = None) -> None:
        config = quantization_of(folder) if unfinished is None else dict(unfinished)
        if config is None:
            raise FormatError(f"{folder / CONFIG} has no quantization_config: expected what nearplane quantize wrote.")
        format = format_of(config)
        self.config, self.layers, self._says = config, format.layers, format.config
        self.reader = format.reader(folder, unfinished=unfinished is not None)
        if unfinished is None and self.layers.CHECKSUMS and isinstance(self.reader, ShardReader):
            self.reader.check_complete()
        self._parts = self.layers.parts(self.reader.names())

    def names(self) -> list[str]:
        """Return the names of all quantized layers."""
        return list(self._parts)

    def rest(self) -> list[str]:
        """Return the names of the tensors that are not quantized."""
        parts = {part for parts in self._parts.values() for part in parts}
        return [name for name in self.reader.names() if name not in parts]

    def file(self, name: str) -> Path:
        """Return the file that holds the first tensor of one layer."""
        return self.reader.file(self._parts[name][0])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one layer, checked against the checksums that the folder has."""
        return self.reader.read(self._parts[name])

    def says(self) -> dict[str, str]:
        """Return the files beside config.json that say the same, as they should be."""
        return self._says.files(self.config)

    def matrix(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """Return what the tensors of one layer mean."""
        return self.layers.unpack(name, tensors, self._says.grid_of(self.config, name))


def read_matrices(
    folder: Path, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Yield (name, matrix) of every quantized layer of a folder, one in memory at a time.

    Args:
        shapes: of all parameters of the model that it is read for, see `weight_shapes`: what does not fit takes no memory.

    Raises:
        FormatError: a layer is not what its format says or the model expects, or the format is not understood.
    """
    if quantization_of(folder) is None:
        return
    stored = Stored(folder)
    for name in stored.names():
        tensors = stored.tensors(name)
        if shapes is not None:
            part = next(iter(tensors))
            called = f"{stored.reader.file(part)}: {part}"
            check_shape(called, f"{name}.weight", stored.layers.shape_of(name, tensors), shapes)
        yield name, stored.matrix(name, tensors)


def check_shape(called: str, name: str, found: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a matrix that the model does not expect; of names that it does not have, what is larger than all it has.

    Raises:
        FormatError: it is `found`, (out, in), where the model has another.
    """
    wanted = shapes.get(name)
    if wanted is None and math.prod(found) > (most := max(math.prod(shape) for shape in shapes.values())):
        raise FormatError(
            f"{called} holds a matrix {found[0]} x {found[1]}; no weight of the model that config.json describes has more than "
            f"{most:,} elements. The two do not belong together; fetch the folder again."
        )
    if wanted is not None and found != wanted:
        raise FormatError(
            f"{called} holds a matrix {found[0]} x {found[1]}, config.json asks for {' x '.join(map(str, wanted))}. The two do not "
            f"belong together; fetch the folder again."
        )


def read_dense(
    folder: Path,
    *,
    transposed: Collection[str] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    stacks: Mapping[str, Stack] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, tensor) of a folder as if it had never been quantized, one in memory at a time.

    A quantized layer is its float32 values `scale * (code - zero)` as `name.weight`: (out, in), or (in, out) where
    that name is in `transposed`, as Conv1D modules have them. Experts that the network has in one parameter, and that
    transformers does not put together, are that parameter. Everything else is as stored.

    Args:
        transposed: see `stored_transposed`.
        shapes: as for `read_matrices`.
        stacks: by name of the parameter, see `stacks_of`.

    Raises:
        FormatError: a layer is not what its format says or the model expects, or the format is not understood.
    """
    stored = None if quantization_of(folder) is None else Stored(folder)
    reader = ShardReader(folder) if stored is None else stored.reader
    for name in reader.names() if stored is None else stored.rest():
        yield name, reader.read([name])[name]
    stacks = stacks or {}
    whole_of = {name: whole for whole, stack in stacks.items() for name in stack.names}
    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, matrix in read_matrices(folder, shapes=shapes):
        values = matrix.decode()
        if (whole := whole_of.get(name)) is None:
            yield f"{name}.weight", values.T.contiguous() if f"{name}.weight" in transposed else values
            continue
        waiting[whole][name] = values
        if len(waiting[whole]) == len(stacks[whole].names):
            parts = waiting.pop(whole)
            yield whole, stacks[whole].joined(parts[each] for each in stacks[whole].names)
    for whole, parts in waiting.items():
        absent = next(name for name in stacks[whole].names if name not in parts)
        raise FormatError(
            f"{folder}: {absent} is missing, the other matrices of {whole} are there. Fetch the folder again."
        )


def reader_of(folder: Path) -> TensorReader:
    """Return what reads the tensors of a folder, whatever its config.json says that they are stored in.

    Raises:
        FormatError, ModelError: the folder is not finished, or there are no such files.
    """
    config = quantization_of(folder)
    method = None if config is None else config.get("quant_method")
    if isinstance(method, str) and method in FORMATS:
        return FORMATS[method].reader(folder)
    return source_reader(folder, {"quantization_config": config})  # others are safetensors, read as they are or widened


class DecodedReader(TensorReader):
    """Reads weights of a folder that nearplane reads, as if they had never been quantized: each is decoded when it is asked for.

    Args:
        folder: quantized.
        shapes: of all weights of its network, matrices as (out, in), see `weight_shapes`.
        transposed: names of the weights that modules have as (in, out), see `stored_transposed`.
        stacks: parameters that are put together of several matrices, see `stacks_of`.

    Raises:
        FormatError: the folder's format is not understood, or it holds a matrix larger than any that the network has.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        transposed: Collection[str],
        stacks: Mapping[str, Stack],
    ) -> None:
        self.folder, self.checksums = folder, None
        self._stored, self._shapes = Stored(folder), dict(shapes)
        there = set(self._stored.names())
        stacks = {name: stack for name, stack in stacks.items() if there.issuperset(stack.names)}
        there -= {name for stack in stacks.values() for name in stack.names}
        self._made: dict[str, Stack] = {}
        for layer in self._stored.names():
            if layer in there:
                weight = f"{layer}.weight"
                if weight not in shapes:  # a name that transformers changes when it loads
                    self._shapes[weight] = self._shape_of(layer, self._stored.tensors(layer))
                turned, shape = weight in transposed, self._shapes[weight]
                places = ((..., slice(None), turned),)
                self._made[weight] = Stack(shape=shape[::-1] if turned else shape, names=(layer,), places=places)
        self._made |= stacks

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._stored.rest(), *self._made]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as its module has it."""
        return self._made[name].shape if name in self._made else self._stored.reader.shape(name)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor as `read` gives it."""
        return "F32" if name in self._made else self._stored.reader.dtype(name)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor as `read` gives it."""
        return 4 * math.prod(self.shape(name)) if name in self._made else self._stored.reader.nbytes(name)

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, or the first part of a layer."""
        return self._stored.file(self._made[name].names[0]) if name in self._made else self._stored.reader.file(name)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, layers decoded to float32.

        Raises:
            FormatError: a layer is not what its format or config.json says.
        """
        wanted = list(names)
        found = self._stored.reader.read([name for name in wanted if name not in self._made])
        return {name: found[name] if name in found else self._decoded(self._made[name]) for name in wanted}

    def _shape_of(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a layer, if the network may have it."""
        found, file = self._stored.layers.shape_of(layer, tensors), self._stored.file(layer)
        check_shape(f"{file}: {layer}", f"{layer}.weight", found, self._shapes)
        return found

    def _decoded(self, stack: Stack) -> Tensor:
        return stack.joined(self._values(layer) for layer in stack.names)

    def _values(self, layer: str) -> Tensor:
        tensors = self._stored.tensors(layer)
        self._shape_of(layer, tensors)
        return self._stored.matrix(layer, tensors).decode()
