"""Steps at both ends of the range of the dtype in which a file stores them, for every number format and file format."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.formats.table import FORMATS
from nearplane.lattice.fits import MAX_GROWTH
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.number_formats import BY_NAME, TYPES, NumberFormat, integers, number_format
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.schemes import GridScheme, options_of
from nearplane.record.record import LayerRecord
from nightly import daily_of_several

INTEGERS = [integers(bits, 32, symmetric=symmetric) for bits, symmetric in product((4, 8), (True, False))]
KINDS = [*INTEGERS, integers(8, None), integers(4, 32, minimum=True), *BY_NAME.values()]
STORED = sorted(
    {
        (file, str(FORMATS[file].layers.scale_dtype(dtype)).removeprefix("torch."), kind.name)
        for file, dtype, kind in product(FORMATS, (torch.float16, torch.bfloat16, torch.float32), KINDS)
        if kind.bits and file != "nearplane" and readers_of(file, "nearplane").takes(Weights(kind))
        if (kind.name in TYPES) == (file == "gguf") or (file, kind.name) == ("compressed-tensors", "mxfp4")
        if kind.minimum == (file == "mlx") or file == "gguf"
        if dtype == torch.float16 or kind.steps is None  # which the format decides
    }
)
SMALLEST, LARGEST = -126, 127  # exponents of normal numbers of float32


@cache
def weights(rows: int, columns: int) -> Tensor:
    """Weights with a row of zeros and a group of zeros, and another group that is tiny beside the others."""
    W = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).clamp_(-4, 4) / 8
    W[1], W[2, :32] = 0, 0
    W[3, :32] *= 1e-9
    return W


@cache
def quantized(kind: NumberFormat, exponent: int, storage: torch.dtype) -> tuple[QuantizedMatrix, LayerRecord]:
    in_blocks = kind.name in TYPES and (kind.levels is None or kind.only_in_gguf)
    options = {"grid": kind.name} if in_blocks or kind.levels is not None else options_of(kind)
    scheme = (BlockScheme if in_blocks else GridScheme)(**options, solver="round-to-nearest", polish=0, rounds=0)
    columns = 256 if in_blocks else 128
    W = (weights(max(8, kind.rows), columns).double() * 2.0**exponent).float()
    return quantize_matrix(W, torch.eye(columns), scheme, storage=storage)


def accepted(kind: NumberFormat, exponent: int, storage: torch.dtype) -> bool:
    """Return whether weights of this magnitude are quantized, after checking what they lose, or what is said."""
    best = quantized(kind, 0, storage)[1].relative_loss
    try:
        record = quantized(kind, exponent, storage)[1]
    except NumericalError as error:
        text = str(error)
        assert "--ignore" in text, text
        assert ("compressed-tensors" in text) == ("torch.float16" in text), text
        assert re.search("too large" if exponent > 0 else "too small|global scale", text), text
        return False
    assert record.relative_loss <= 1.01 * MAX_GROWTH * best
    return True


@cache
def last(kind: NumberFormat, end: int, storage: torch.dtype) -> int:
    """Return the exponent of the smallest or largest weights that are quantized."""
    inside, outside = 0, end
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if accepted(kind, middle, storage):
            inside = middle
        else:
            outside = middle
    return inside


TILES = {("compressed-tensors", dtype, "fp8-block") for dtype in ("float16", "float32")}  # at night: 128 rows each


@pytest.mark.parametrize(("file", "dtype", "name"), daily_of_several(STORED, set(STORED) - TILES))
def test_weights_at_both_ends_of_the_range_of_steps_are_stored_exactly(file: str, dtype: str, name: str) -> None:
    layers, storage, kind = FORMATS[file].layers, getattr(torch, dtype), number_format(name)
    for end in (SMALLEST, LARGEST):
        matrix, _ = quantized(kind, last(kind, end, storage), storage)
        tensors = layers.pack("layer", matrix, storage)
        if file != "mlx":  # its config has the group size
            assert torch.equal(layers.unpack("layer", tensors, kind).decode().float(), matrix.decode())
