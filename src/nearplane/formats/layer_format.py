"""How files hold one quantized layer: what a format has to say to be one of `FORMATS`.

A layer format turns a matrix into tensors and back. What `config.json` says of them is `ConfigFile`'s, which files there are is
`Container`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.number_formats import NumberFormat


class LayerFormat(ABC):
    """How files hold one layer.

    Attributes:
        KEY: ending of the name of the tensor that every quantized layer has.
        SUFFIXES: of the names of all its tensors.
        BITS: widths that it holds, narrowest first.
        CHECKSUMS: whether the index of the folder holds a checksum of every tensor.
    """

    KEY: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]
    BITS: ClassVar[tuple[int, ...]] = ()
    CHECKSUMS: ClassVar[bool] = False

    @abstractmethod
    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse a layer that readers of this format cannot load.

        Args:
            name: of the layer.
            shape: (out, in).
            kind: class of the module: "Linear", "Conv1D", ...
            format: that its weights are to have.

        Raises:
            RecipeError: with the way out.
        """

    @abstractmethod
    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored steps in a model of this dtype: they are rounded to it before the solve."""

    @abstractmethod
    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by full name; integers are stored as they are.

        Args:
            name: of the layer.
            matrix: on the CPU.
            dtype: of the steps, see `scale_dtype`.

        Raises:
            FormatError: the format cannot hold the matrix exactly.
        """

    @abstractmethod
    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a stored layer without unpacking it.

        Raises:
            FormatError: the tensor that says it is missing.
        """

    @abstractmethod
    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix that `pack` stored.

        Args:
            name: of the layer.
            tensors: at least those of the layer, by full name.
            format: what the config says of it.

        Raises:
            FormatError: a tensor is missing or not what the config says.
        """

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format as a quantization_config sets it, where there is something to set.

        Raises:
            FormatError: it is of a version that is not understood.
        """
        return self

    def stays_packed(self, config: Mapping[str, Any], dtype: torch.dtype | None) -> bool:
        """Return whether transformers keeps layers packed until the network is called.

        Args:
            config: quantization_config of the checkpoint.
            dtype: of the network that is loaded, where that is known; what is decoded to another one does not run in it.
        """
        return False

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the tensors of every quantized layer, by the name of the layer.

        Args:
            names: of all tensors of a checkpoint.
        """
        there = dict.fromkeys(names)
        layers = [name.removesuffix(f".{self.KEY}") for name in there if name.endswith(f".{self.KEY}")]
        return {layer: [part for s in self.SUFFIXES if (part := f"{layer}.{s}") in there] for layer in layers}

    def beside_the_first(self, name: str) -> dict[str, Tensor]:
        """Return what stands beside the first layer of a folder, for programs that do not know the format."""
        return {}


class GridFormat(LayerFormat):
    """A format of grids that transformers reads: the shapes of its tensors follow from shape and number format alone.

    A run loads them without contents before it begins, see `loading/rehearsal_check.py`; what is no `GridFormat` is not tried.
    """

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer as `pack` makes them, on the meta device; `dtype` is the model's."""
