"""Linear layers of integer codes on grids that the CPU multiplies without decoding them.

Codes are held in 2, 4 or 8 bits, steps and offsets in float32, so that weights are those of the grid:
`step * (code - middle) + offset`. Few rows of inputs are multiplied by the codes, see `product_cpu.py`; many by decoded
strips. Sums are in float32. Levels that are small multiples of one number, as those of FP4 are, count as codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid
from nearplane.loading import product_cpu
from nearplane.loading.product_cpu import BLOCK, WIDTHS

MAX_ROWS = 8  # with more rows of inputs, codes are decoded first; measured in docs/results/answers.md
MAX_PACKED_WEIGHTS = 2**20  # weights packed at a time
NATIVE = ("avx512_bf16", "amx_bf16")  # features of CPUs that multiply bfloat16 as fast as float32, or faster


@cache
def dense_dtype() -> torch.dtype:
    """Return the dtype in which this CPU multiplies bfloat16 inputs by decoded strips."""
    features = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(features.get(name) for name in NATIVE) else torch.float32


class KernelLinear(nn.Module):
    """`y = x @ values.T + bias` with packed (out, in) values; `kernel_linear` makes it.

    Its `state_dict` holds the decoded weight, as that of Linear does.

    Args:
        codes: (out, in) integers from -2^(bits - 1) to 2^(bits - 1) - 1.
        steps, offsets: (out, groups) of groups of equal size, a multiple of `32 / bits`.
        group: (in,) group of every column.
        bits: Bits of a code, one of `WIDTHS`.
        dtype: Dtype of `weight`.

    Attributes:
        words: The codes as `product_cpu` reads them.
        step_bits, offset_bits: Steps and offsets, float32 seen as int32, so that no cast of the module rounds them.
        column_order: (in,) int32 column of x at each position; None where columns are in their order.
    """

    bias: nn.Parameter | None
    words: Tensor
    step_bits: Tensor
    offset_bits: Tensor
    column_order: Tensor | None

    def __init__(
        self, codes: Tensor, steps: Tensor, offsets: Tensor, group: Tensor, *, bits: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bits, self.dtype = codes.shape, bits, dtype
        self.register_parameter("bias", None)
        order = None if bool((group[1:] >= group[:-1]).all()) else group.argsort(stable=True).to(torch.int32)
        most = BLOCK * max(1, MAX_PACKED_WEIGHTS // (self.in_features * BLOCK))
        parts = codes.split(most)
        parts = parts if order is None else tuple(part.index_select(1, order) for part in parts)
        self.register_buffer("words", torch.cat([_packed(part, bits) for part in parts]), persistent=False)
        self.register_buffer("step_bits", _by_block(steps), persistent=False)
        none = bool((offsets == 0).all())
        self.register_buffer("offset_bits", _by_block(offsets[:, :0] if none else offsets), persistent=False)
        self.register_buffer("column_order", order, persistent=False)
        self._views: tuple[Tensor, tuple[product_cpu.Words, product_cpu.Floats, product_cpu.Floats]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, whose arrays are views of other tensors."""
        return self.__dict__ | {"_views": None}

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) for an input `x` (..., in), in its dtype."""
        flat, order, bias = x.reshape(-1, self.in_features), self.column_order, self.bias
        flat = flat if order is None else flat.index_select(1, order)
        few = 0 < flat.shape[0] <= MAX_ROWS and flat.dtype != torch.float64 and flat.is_cpu
        y = self.product(flat) if few and not (x.requires_grad and torch.is_grad_enabled()) else self.by_strips(flat)
        y = y if y.shape[1] == self.out_features else y[:, : self.out_features]
        y = y if bias is None else y + bias.to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) of inputs by position with the codes; outputs are filled up to blocks."""
        rows = (x.detach() if x.requires_grad else x).float().contiguous().numpy()
        return torch.from_numpy(product_cpu.product(rows, *self._arrays(), self.bits)).to(x.dtype)

    def by_strips(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) of inputs of any dtype, on any device, by strips decoded one by one."""
        dtype = dense_dtype() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x.dtype
        dense = x.to(dtype)
        return torch.cat([(dense @ strip.to(x.device, dtype)).to(x.dtype) for strip in self.strips()], dim=1)

    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) float32 values, inputs by position: a block for each thread at a time."""
        words, steps, offsets = self._arrays()
        for a in range(0, len(words), count := torch.get_num_threads()):
            part = slice(a, a + count)
            yield torch.from_numpy(product_cpu.values(words[part], steps[part], offsets[part], self.bits))

    @property
    def weight(self) -> Tensor:
        """The (out, in) values, decoded at each access."""
        values = torch.cat([strip.to(self.dtype) for strip in self.strips()], dim=1)[:, : self.out_features].T
        return values if self.column_order is None else values.index_select(1, self.column_order.argsort())

    def extra_repr(self) -> str:
        """Return the sizes as Linear does, and the bits of a code."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, bits={self.bits}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _arrays(self) -> tuple[product_cpu.Words, product_cpu.Floats, product_cpu.Floats]:
        if self._views is None or self._views[0] is not self.words:  # the layer is new, or was moved
            words, steps, offsets = (part.cpu().numpy() for part in (self.words, self.step_bits, self.offset_bits))
            self._views = self.words, (words, steps.view(np.float32), offsets.view(np.float32))
        return self._views[1]


def kernel_linear(matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> KernelLinear | None:
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
    codes = (codes if grid.levels is None else positions[codes.long()]) - middle
    minus = grid.scale * grid.zero
    if isinstance(grid, SuperGrid) and (offset := grid.offset) is not None:
        minus = torch.where(grid.scale == 0, offset, minus)
    steps = (grid.scale / parts).expand(len(codes), -1)
    return KernelLinear(codes, steps, steps * middle - minus, grid.group, bits=bits, dtype=dtype)


def rounded_to_8_bits(weight: Tensor) -> KernelLinear:
    """Return the layer of a (out, in) weight whose rows are rounded to nearest, to 8 bits with one step each.

    Args:
        weight: Of any dtype; `in` is a multiple of 4.
    """
    steps, codes = weight.new_empty(len(weight), 1, dtype=torch.float32), torch.empty_like(weight, dtype=torch.int8)
    for a in range(0, len(weight), most := max(1, MAX_PACKED_WEIGHTS // weight.shape[1])):
        part = weight[a : a + most].float()
        step = part.abs().amax(1, keepdim=True) / 127
        steps[a : a + most], codes[a : a + most] = step, (part / step.clamp_min(torch.finfo(torch.float32).tiny)).round()
    group = torch.zeros(weight.shape[1], dtype=torch.int64)
    return KernelLinear(codes, steps, torch.zeros_like(steps), group, bits=8, dtype=weight.dtype)


def _even_groups(grid: Grid, fields: int) -> bool:
    """Return whether all groups have the same number of columns, and these fill whole words."""
    sizes = torch.bincount(grid.group, minlength=grid.scale.shape[1])
    return bool((sizes == sizes[0]).all()) and int(sizes[0]) % fields == 0


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return the words of codes (outputs, in), which are filled up to whole blocks."""
    return torch.from_numpy(product_cpu.pack(_filled(codes.to(torch.int32)).numpy(), bits))


def _by_block(numbers: Tensor) -> Tensor:
    """Return (out, groups) numbers as (blocks, groups, BLOCK) float32 seen as int32."""
    blocks = _filled(numbers.float()).unflatten(0, (-1, BLOCK))
    return blocks.transpose(1, 2).contiguous().view(torch.int32)


def _filled(rows: Tensor) -> Tensor:
    return nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
