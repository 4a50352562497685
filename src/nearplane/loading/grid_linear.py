"""Linear layers of integer codes on grids that the CPU multiplies without decoding them; see `words_linear.py`.

Codes are held in 2, 4 or 8 bits, steps and offsets in float32, so that weights are those of the grid:
`step * (code - middle) + offset`. Levels that are small multiples of one number, as those of FP4 are, count as codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.loading import product_cpu
from nearplane.loading.product_cpu import WIDTHS
from nearplane.loading.words_linear import WordsLinear, by_block

MAX_ROUNDED_WEIGHTS = 2**20  # weights of a head rounded at a time


class GridLinear(WordsLinear):
    """Layer on a grid; `grid_linear` makes it.

    Args:
        codes: (out, in) integers from -2^(bits - 1) to 2^(bits - 1) - 1.
        steps, offsets: (out, groups) of groups of equal size, a multiple of `32 / bits`.
        group: (in,) group of every column.
        bits: Bits of a code, one of `WIDTHS`.
        dtype: Dtype of `weight`.

    Attributes:
        words: The codes as `product_cpu` reads them.
        step_bits, offset_bits: Steps and offsets, see `by_block`.
    """

    words: Tensor
    step_bits: Tensor
    offset_bits: Tensor

    def __init__(
        self, codes: Tensor, steps: Tensor, offsets: Tensor, group: Tensor, *, bits: int, dtype: torch.dtype
    ) -> None:
        order = None if bool((group[1:] >= group[:-1]).all()) else group.argsort(stable=True).to(torch.int32)
        super().__init__((codes.shape[0], codes.shape[1]), dtype, order)
        self.bits = bits
        columns = np.arange(self.in_features) if order is None else order.numpy()
        self.register_buffer("words", product_cpu.pack(codes.numpy(), bits, columns), persistent=False)
        self.register_buffer("step_bits", by_block(steps), persistent=False)
        none = bool((offsets == 0).all())
        self.register_buffer("offset_bits", by_block(offsets[:, :0] if none else offsets), persistent=False)

    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) of inputs by position with the codes."""
        return product_cpu.product(x.contiguous(), self.words, self.step_bits, self.offset_bits, self.bits)

    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) values, inputs by position."""
        words, steps, offsets = (part.cpu() for part in (self.words, self.step_bits, self.offset_bits))
        for a in range(0, len(words), count := torch.get_num_threads()):
            of = slice(a, a + count)
            yield product_cpu.values(words[of], steps[of], offsets[of], self.bits)

    def extra_repr(self) -> str:
        """Return the sizes as Linear does, and the bits of a code."""
        return f"{super().extra_repr()}, bits={self.bits}"


def grid_linear(matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> GridLinear | None:
    """Return the layer of a quantized matrix on the CPU, without a bias; None where its grid does not fit in words.

    Args:
        matrix: Codes on a grid.
        dtype: Dtype of the layer's `weight`.
    """
    grid, codes = matrix.grid, matrix.codes
    if not isinstance(grid, Grid) or grid.low is None or grid.high is None:
        return None
    low, high, parts = grid.low, grid.high, 1
    if grid.levels is not None:
        parts = next((n for n in (1, 2) if bool((grid.levels * n == (grid.levels * n).round()).all())), 0)
        positions = (grid.levels * parts).to(codes.dtype)
        low, high = int(positions.amin()), int(positions.amax())
    bits = next((bits for bits in WIDTHS if high - low < 1 << bits), 0)
    if not parts or not bits or not _even_groups(grid, 32 // bits):
        return None
    middle = 0 if -(1 << bits - 1) <= low and high < 1 << bits - 1 else low + (1 << bits - 1)
    codes = codes if grid.levels is None else positions[codes]
    codes = codes - middle if middle else codes
    minus = grid.scale * grid.zero
    if isinstance(grid, SuperGrid) and (offset := grid.offset) is not None:
        minus = torch.where(grid.scale == 0, offset, minus)
    steps = (grid.scale / parts).expand(len(codes), -1)
    return GridLinear(codes, steps, steps * middle - minus, grid.group, bits=bits, dtype=dtype)


def rounded_to_8_bits(weight: Tensor) -> GridLinear:
    """Return the layer of a (out, in) weight whose rows are rounded to nearest, to 8 bits with one step each.

    Args:
        weight: Of any dtype; `in` is a multiple of 4.
    """
    steps, codes = weight.new_empty(len(weight), 1, dtype=torch.float32), torch.empty_like(weight, dtype=torch.int8)
    for a in range(0, len(weight), most := max(1, MAX_ROUNDED_WEIGHTS // weight.shape[1])):
        part = weight[a : a + most].float()
        step = part.abs().amax(1, keepdim=True) / 127
        steps[a : a + most] = step
        codes[a : a + most] = (part / step.clamp_min(torch.finfo(torch.float32).tiny)).round()
    group = torch.zeros(weight.shape[1], dtype=torch.int64)
    return GridLinear(codes, steps, torch.zeros_like(steps), group, bits=8, dtype=weight.dtype)


def _even_groups(grid: Grid, fields: int) -> bool:
    """Return whether all groups have the same number of columns, and these fill whole words."""
    sizes = torch.bincount(grid.group, minlength=grid.scale.shape[1])
    return bool((sizes == sizes[0]).all()) and int(sizes[0]) % fields == 0
