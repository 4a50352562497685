"""A quantized folder as if it had never been quantized: its tensors by the names of weights, each decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from nearplane.formats.stored import Stored, check_shape
from nearplane.shards import TensorReader


class DecodedReader(TensorReader):
    """Reads weights of a folder that nearplane reads.

    Args:
        folder: quantized.
        shapes: of all weights of its network, matrices as (out, in), see `weight_shapes`.
        transposed: names of the weights that modules have as (in, out), see `stored_transposed`.

    Raises:
        FormatError: the folder's format is not understood, or it holds a matrix larger than any that the network has.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], transposed: Collection[str] = ()) -> None:
        self.folder, self.checksums = folder, None
        self._stored, self._shapes, self._transposed = Stored(folder), dict(shapes), transposed
        self._layers = {f"{name}.weight": name for name in self._stored.names()}
        self._rest = self._stored.rest()
        for weight, layer in self._layers.items():
            if weight not in shapes:  # a name that transformers changes when it loads
                self._shapes[weight] = self._shape_of(layer, self._stored.tensors(layer))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._rest, *self._layers]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as its module has it."""
        if name not in self._layers:
            return self._stored.reader.shape(name)
        rows, columns = self._shapes[name]
        return (columns, rows) if name in self._transposed else (rows, columns)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor as `read` gives it."""
        return "F32" if name in self._layers else self._stored.reader.dtype(name)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor as `read` gives it."""
        if name not in self._layers:
            return self._stored.reader.nbytes(name)
        rows, columns = self._shapes[name]
        return 4 * rows * columns

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, or the first part of a layer."""
        stored = self._stored
        return stored.reader.file(name if name not in self._layers else stored.parts(self._layers[name])[0])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, layers decoded to float32.

        Raises:
            FormatError: a layer is not what its format or config.json says.
        """
        wanted = list(names)
        found = self._stored.reader.read([name for name in wanted if name not in self._layers])
        return {name: found[name] if name in found else self._decoded(name) for name in wanted}

    def _shape_of(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a layer, if the network may have it."""
        found, weight = self._stored.layers.shape_of(layer, tensors), f"{layer}.weight"
        check_shape(f"{self.file(weight)}: {layer}", weight, found, self._shapes)
        return found

    def _decoded(self, name: str) -> Tensor:
        layer = self._layers[name]
        tensors = self._stored.tensors(layer)
        self._shape_of(layer, tensors)
        values = self._stored.matrix(layer, tensors).decode()
        return values.T.contiguous() if name in self._transposed else values
