"""nearplane's own format: codes of any size, entropy-coded; one tensor a layer.

    NAME.weight_coded  (bytes,) uint8  codes, their scales and how they are coded: see docs/format.md and `coding/blob.py`
    NAME.weight        (0,)     uint8  beside the first of them: a size at which programs stop that do not know the format

    value[i, j] = row_scale[i] * code[i, j] * column_scale[j]

The matrix is (out, in) however the module stores its weight. The index of the folder holds a checksum of every tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from nearplane.coding.blob import Coder, Contents, decode, encode, shape_of
from nearplane.coding.header import ZSTD_REFUSED
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.integers import LayerGrid, expect
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix

METHOD = "nearplane"
VERSION = 1
CODERS: tuple[str, ...] = get_args(Coder)
KINDS = ("Linear", "Conv1D", "Embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """The format with one coder: the functions that every format has; `compressed_tensors.py` explains them.

    Args:
        coder: of the codes; readers need not be told, every matrix says it.
        classes: whether rows and columns have tables of their own.
    """

    coder: Coder = "tans"
    classes: bool = True

    KEY = "weight_coded"
    STOP = "weight"
    SUFFIXES = (KEY, STOP)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Native:
        """Return the format of a quantization_config.

        Raises:
            FormatError: it is of a version or has a coder that is not understood.
        """
        version, coder, classes = config.get("format_version"), config.get("coder", "tans"), config.get("classes", True)
        if version != VERSION:
            raise FormatError(
                f"quantization_config says format_version {version!r}; this version of nearplane reads {VERSION}. "
                f"Update nearplane, or fetch config.json again."
            )
        if coder == "zstd":
            raise FormatError(f"quantization_config: {ZSTD_REFUSED}.")
        if coder not in CODERS or not isinstance(classes, bool):
            raise FormatError(
                f"quantization_config says coder {coder!r}, classes {classes!r}; this version of nearplane reads "
                f"{', '.join(CODERS)} and true or false. Update nearplane, or fetch config.json again."
            )
        return cls(coder=coder, classes=classes)

    def check(
        self,
        name: str,
        shape: tuple[int, int],
        kind: str,
        *,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool = True,
    ) -> None:
        """Refuse a layer that readers of this format cannot load; grids of a fixed width play no part.

        Raises:
            RecipeError: with the way out.
        """
        del shape, bits, group_size, symmetric
        if kind not in KINDS:
            raise RecipeError(
                f"{name} is a {kind}; the nearplane format holds {', '.join(KINDS)}. Use --ignore for it."
            )

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of decoded scales: float32 in every model; stored are their exponents."""
        del model_dtype
        return torch.float32

    def pack_layer(self, name: str, matrix: QuantizedMatrix, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensor of one layer.

        Raises:
            FormatError: the matrix is on another kind of grid.
        """
        del dtype
        coded = encode(contents(matrix, name=name), coder=self.coder, classes=self.classes)
        return {f"{name}.{self.KEY}": torch.tensor(coded)}

    def stop(self, name: str) -> dict[str, Tensor]:
        """Return a weight without elements, of which one layer of a folder has one.

        transformers skips quantization of a kind that it does not know, and fills weights that it does not find with random
        numbers; a weight of another size than the model's is an error in all its versions.
        """
        return {f"{name}.{self.STOP}": torch.empty(0, dtype=torch.uint8)}

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a stored layer without decoding it.

        Raises:
            FormatError: the tensor is missing, or of a version that is not understood.
        """
        blob = expect(name, tensors, self.KEY, (None,), {torch.uint8})
        return shape_of(blob.numpy(), name=f"{name}.{self.KEY}")

    def unpack_layer(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantizedMatrix:
        """Return the matrix that `pack_layer` stored, with all cores.

        Raises:
            FormatError: the tensor is missing or damaged, or of a version that is not understood.
        """
        Native.of(config)
        if f"{name}.{self.STOP}" in tensors:
            expect(name, tensors, self.STOP, (0,), {torch.uint8})
        blob = expect(name, tensors, self.KEY, (None,), {torch.uint8})
        return matrix_of(decode(blob.numpy(), name=f"{name}.{self.KEY}"))

    def quantization_config(
        self,
        *,
        quantized: Sequence[str],
        version: str,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool = True,
        order: str | None = None,
        damp: float | str | None = None,
        ignore: Sequence[str] = (),
        grids: Mapping[str, LayerGrid] | None = None,
        experts: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return `quantization_config` of config.json.

        Args:
            quantized: names in the model of all quantized modules.
            version: of nearplane.
            bits, group_size, symmetric, order, damp, ignore, grids, experts: other formats say them; readers
                of this one need none.
        """
        del bits, group_size, symmetric, order, damp, ignore, grids, experts
        return {
            "quant_method": METHOD,
            "format_version": VERSION,
            "coder": self.coder,
            "classes": self.classes,
            "modules": sorted(quantized, key=_natural),
            "written_by": f"nearplane {version}",
        }


DEFAULT = Native()


def contents(matrix: QuantizedMatrix, *, name: str = "matrix") -> Contents:
    """Return what the coder takes, the inverse of `matrix_of`.

    Raises:
        FormatError: the matrix is on another kind of grid.
    """
    grid = matrix.grid
    if not isinstance(grid, ProductGrid):
        raise FormatError(
            f"{name}: a {type(grid).__name__} with steps of its own; the nearplane format holds a ProductGrid."
        )
    codes, columns, rows = (
        part.to("cpu", torch.int32).contiguous().numpy() for part in (matrix.codes, grid.columns, grid.rows)
    )
    return Contents(
        codes=codes,
        base=grid.base,
        columns=columns,
        column_resolution=grid.column_resolution,
        rows=rows,
        row_resolution=grid.row_resolution,
    )


def matrix_of(contents: Contents) -> QuantizedMatrix:
    """Return what a blob holds as a matrix, without copying."""
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
