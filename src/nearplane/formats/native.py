"""nearplane's own format: entropy-coded codes without limits, one tensor per layer.

    NAME.weight_coded  (bytes,) uint8  codes, scales and coding tables: see docs/format.md and `coding/blob.py`
    NAME.weight        (0,)     uint8  beside the first layer only: its size stops programs that do not know the format

    value[i, j] = row_scale[i] * code[i, j] * column_scale[j]

The matrix is (out, in) however the module stores its weight. The index of the folder holds a checksum of every tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nearplane.coding.blob import Contents, decode, encode, shape_of
from nearplane.coding.on_device import Blob, Decoded, decode_all, decoder_of
from nearplane.coding.scales import Scales
from nearplane.errors import FormatError
from nearplane.formats.container import Format
from nearplane.formats.integers import expect
from nearplane.formats.layer_format import METHOD, LayerFormat, Quantized, check_kind
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.number_formats import ENTROPY_CODED_FORMAT, NumberFormat

VERSION = 1
CODER = "tans"
KINDS = ("Linear", "Conv1D", "Embedding", "Expert")


class Native(LayerFormat):
    """Storage of a layer as one entropy-coded tensor."""

    KEY = "weight_coded"
    STOP = "weight"
    SUFFIXES = (KEY, STOP)
    CHECKSUMS = True

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format, after checking that this version of nearplane reads the config's version."""
        fields = {"coder": CODER, **config}
        for field, known in (("format_version", VERSION), ("coder", CODER)):
            if (value := fields.get(field)) != known:
                raise FormatError(
                    f"{field} in quantization_config is {value!r}; this version of nearplane reads {known}. "
                    f"Update nearplane, or fetch config.json again."
                )
        return self

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse modules that `nearplane.load` does not build; the format stores any shape and any codes."""
        check_kind(name, kind, KINDS, f"the nearplane format stores {', '.join(KINDS)}")

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return float32 in every model: the file stores exponents, which decode to float32 scales."""
        return torch.float32

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensor of one layer, which is on a `ProductGrid`."""
        if not isinstance(matrix.grid, ProductGrid):
            raise FormatError(
                f"{name}: the matrix is on a {type(matrix.grid).__name__}; the nearplane format stores a ProductGrid."
            )
        return {f"{name}.{self.KEY}": torch.tensor(encode(Contents.of(matrix.codes, matrix.grid)))}

    def beside_the_first(self, name: str) -> dict[str, Tensor]:
        """Return a weight without elements for the first layer of a folder.

        transformers ignores an unknown quantization method and fills missing weights with random numbers; a weight
        whose size differs from the model's is an error in all its versions.
        """
        return {f"{name}.{self.STOP}": torch.empty(0, dtype=torch.uint8)}

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the header of the tensor."""
        blob = expect(name, tensors, self.KEY, (None,), {torch.uint8})
        return shape_of(blob.numpy(), name=f"{name}.{self.KEY}")

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer, decoded on all cores from the tensor alone."""
        return matrix_of(decode(self._blob(name, tensors).numpy(), name=f"{name}.{self.KEY}"))

    def unpack_for(
        self, device: torch.device, name: str, tensors: Mapping[str, Tensor], format: NumberFormat
    ) -> QuantizedMatrix:
        """Return the matrix of one layer, decoded on the device if it has a decoder."""
        if decoder_of(device) is None:
            return self.unpack(name, tensors, format)
        (decoded,) = decode_all([Blob(self._blob(name, tensors), f"{name}.{self.KEY}")], device)
        return matrix_on_device(decoded)

    def _blob(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor of one layer, after checking all of them."""
        if f"{name}.{self.STOP}" in tensors:
            expect(name, tensors, self.STOP, (0,), {torch.uint8})
        return expect(name, tensors, self.KEY, (None,), {torch.uint8})

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return a config that lists the quantized modules; each tensor describes its own grid."""
        return {
            "quant_method": METHOD,
            "format_version": VERSION,
            "coder": CODER,
            "classes": True,  # columns and rows are coded with several tables
            "modules": sorted(network.quantized, key=_natural),
            "written_by": f"nearplane {network.version}",
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of all layers; each tensor describes its own grid."""
        return ENTROPY_CODED_FORMAT


DEFAULT = Native()
FORMAT = Format(DEFAULT)


def matrix_of(contents: Contents) -> QuantizedMatrix[ProductGrid]:
    """Return the contents of a blob as a matrix without copying: the inverse of `Contents.of`."""
    return QuantizedMatrix(codes=torch.from_numpy(contents.codes), grid=_grid_of(contents.scales))


def matrix_on_device(decoded: Decoded) -> QuantizedMatrix[ProductGrid]:
    """Return a decoded matrix: its codes on the device, and its grid on the CPU, so that scales are the same everywhere."""
    return QuantizedMatrix(codes=decoded.codes(), grid=_grid_of(decoded.header.scales))


def _grid_of(scales: Scales) -> ProductGrid:
    return ProductGrid(
        base=scales.base,
        columns=torch.from_numpy(scales.columns),
        column_resolution=scales.column_resolution,
        rows=torch.from_numpy(scales.rows),
        row_resolution=scales.row_resolution,
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders "layers.2" before "layers.10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
