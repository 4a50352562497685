"""A quantized folder as if it had never been quantized: its tensors by the names of weights, each decoded when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from nearplane.formats.stored import Stack, Stored, check_shape
from nearplane.system.safetensors_files import TensorReader


class DecodedReader(TensorReader):
    """Reads weights of a folder that nearplane reads.

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
        transposed: Collection[str] = (),
        stacks: Mapping[str, Stack] | None = None,
    ) -> None:
        self.folder, self.checksums = folder, None
        self._stored, self._shapes, self._transposed = Stored(folder), dict(shapes), transposed
        there = set(self._stored.names())
        self._stacks = {name: stack for name, stack in (stacks or {}).items() if there.issuperset(stack.names)}
        there -= {name for stack in self._stacks.values() for name in stack.names}
        self._layers = {f"{name}.weight": name for name in self._stored.names() if name in there}
        self._rest = self._stored.rest()
        for weight, layer in self._layers.items():
            if weight not in shapes:  # a name that transformers changes when it loads
                self._shapes[weight] = self._shape_of(layer, self._stored.tensors(layer))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._rest, *self._layers, *self._stacks]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as its module has it."""
        if name in self._stacks:
            return self._stacks[name].shape
        if name not in self._layers:
            return self._stored.reader.shape(name)
        rows, columns = self._shapes[name]
        return (columns, rows) if name in self._transposed else (rows, columns)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor as `read` gives it."""
        return "F32" if name in self._layers or name in self._stacks else self._stored.reader.dtype(name)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor as `read` gives it."""
        if name not in self._layers and name not in self._stacks:
            return self._stored.reader.nbytes(name)
        return 4 * math.prod(self.shape(name))

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, or the first part of a layer."""
        if name in self._stacks:
            return self._file_of(self._stacks[name].names[0])
        return self._file_of(self._layers[name]) if name in self._layers else self._stored.reader.file(name)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, layers decoded to float32.

        Raises:
            FormatError: a layer is not what its format or config.json says.
        """
        wanted = list(names)
        made = self._layers.keys() | self._stacks.keys()
        found = self._stored.reader.read([name for name in wanted if name not in made])
        return {name: found[name] if name in found else self._decoded(name) for name in wanted}

    def _file_of(self, layer: str) -> Path:
        """Return the file that holds the first part of a layer."""
        return self._stored.reader.file(self._stored.parts(layer)[0])

    def _shape_of(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a layer, if the network may have it."""
        found, file = self._stored.layers.shape_of(layer, tensors), self._file_of(layer)
        check_shape(f"{file}: {layer}", f"{layer}.weight", found, self._shapes)
        return found

    def _decoded(self, name: str) -> Tensor:
        if name in self._stacks:
            stack = self._stacks[name]
            return stack.joined(self._values(layer) for layer in stack.names)
        values = self._values(self._layers[name])
        return values.T.contiguous() if name in self._transposed else values

    def _values(self, layer: str) -> Tensor:
        tensors = self._stored.tensors(layer)
        self._shape_of(layer, tensors)
        return self._stored.matrix(layer, tensors).decode()
