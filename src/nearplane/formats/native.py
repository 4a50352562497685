"""nearplane's own format: codes of any size, entropy-coded; one tensor a layer.

    NAME.weight_coded  (bytes,) uint8  codes, their scales and how they are coded: see docs/format.md and `coding/blob.py`
    NAME.weight        (0,)     uint8  beside the first of them: a size at which programs stop that do not know the format

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
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.container import Format
from nearplane.formats.integers import expect
from nearplane.formats.layer_format import METHOD, ConfigFile, LayerFormat, Quantized
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.lattice.number_formats import CODED, NumberFormat

VERSION = 1
CODER = "tans"
KINDS = ("Linear", "Conv1D", "Embedding", "Expert")


class Native(LayerFormat):
    """The tensor of a layer."""

    KEY = "weight_coded"
    STOP = "weight"
    SUFFIXES = (KEY, STOP)
    CHECKSUMS = True

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format, for a config of a version that is understood."""
        said = {"coder": CODER, **config}
        for field, known in (("format_version", VERSION), ("coder", CODER)):
            if (found := said.get(field)) != known:
                raise FormatError(
                    f"quantization_config says {field} {found!r}; this version of nearplane reads {known}. "
                    f"Update nearplane, or fetch config.json again."
                )
        return self

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse modules that `nearplane.load` does not build; any shape and any codes will do."""
        if kind not in KINDS:
            raise RecipeError(
                f"{name} is a {kind}; the nearplane format holds {', '.join(KINDS)}. Use --ignore for it."
            )

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return float32, in every model, for decoded scales; stored are their exponents."""
        return torch.float32

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensor of one layer, which is on a `ProductGrid`."""
        if not isinstance(matrix.grid, ProductGrid):
            raise FormatError(
                f"{name}: a {type(matrix.grid).__name__} with steps of its own; the nearplane format holds a ProductGrid."
            )
        return {f"{name}.{self.KEY}": torch.tensor(encode(Contents.of(matrix.codes, matrix.grid)))}

    def beside_the_first(self, name: str) -> dict[str, Tensor]:
        """Return a weight without elements, of which one layer of a folder has one.

        transformers skips quantization of a kind that it does not know, and fills weights that it does not find with random
        numbers; a weight of another size than the model's is an error in all its versions.
        """
        return {f"{name}.{self.STOP}": torch.empty(0, dtype=torch.uint8)}

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) as the tensor says it."""
        blob = expect(name, tensors, self.KEY, (None,), {torch.uint8})
        return shape_of(blob.numpy(), name=f"{name}.{self.KEY}")

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer, decoded with all cores; the tensor says all of it."""
        if f"{name}.{self.STOP}" in tensors:
            expect(name, tensors, self.STOP, (0,), {torch.uint8})
        blob = expect(name, tensors, self.KEY, (None,), {torch.uint8})
        return matrix_of(decode(blob.numpy(), name=f"{name}.{self.KEY}"))


DEFAULT = Native()


class Config(ConfigFile):
    """The config of the format."""

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return a config that lists the quantized modules; every matrix says its grid itself."""
        return {
            "quant_method": METHOD,
            "format_version": VERSION,
            "coder": CODER,
            "classes": True,  # columns and rows have tables of their own
            "modules": sorted(network.quantized, key=_natural),
            "written_by": f"nearplane {network.version}",
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return that of all layers: the tensor of a layer says the rest."""
        return CODED


FORMAT = Format(DEFAULT, Config())


def matrix_of(contents: Contents) -> QuantizedMatrix:
    """Return what a blob holds as a matrix, without copying: the inverse of `Contents.of`."""
    grid = ProductGrid(
        base=contents.base,
        columns=torch.from_numpy(contents.columns),
        column_resolution=contents.column_resolution,
        rows=torch.from_numpy(contents.rows),
        row_resolution=contents.row_resolution,
    )
    return QuantizedMatrix(codes=torch.from_numpy(contents.codes), grid=grid)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order "layers.2" before "layers.10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
