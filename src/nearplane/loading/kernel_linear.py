"""Linear layers of integer codes that torch's kernels for bfloat16 multiply on the CPU without decoding them.

| codes | steps | kernel of torch | held as |
|---|---|---|---|
| 2 to 4 bits | groups of a multiple of 32 inputs, or one step per row | `_weight_int4pack_mm_for_cpu` | 4 bits |
| 5 to 8 bits, symmetric | one step per row | `_weight_int8pack_mm` | 8 bits |

Weights are `step * (code - middle) + offset`. With 4 bits, steps that are bfloat16 in the file stay as they are; others
are rounded. Offsets are 0 on symmetric grids, else rounded once. With 8 bits, steps are exact. Inputs of another
dtype, and many rows of inputs, are multiplied by decoded strips.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.superblock import SuperGrid

GROUPS = (256, 128, 64, 32)  # group sizes of the kernel for 4 bits
MIDDLE = 8  # the stored code of 4 bits that stands for 0
MAX_STRIP_WEIGHTS = 2**20  # weights decoded at a time
NATIVE = ("avx512_bf16", "amx_bf16")  # features of CPUs that multiply bfloat16 as fast as float32, or faster


@cache
def dense_dtype() -> torch.dtype:
    """Return the dtype in which this CPU multiplies bfloat16 inputs by decoded strips."""
    features = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(features.get(name) for name in NATIVE) else torch.float32


@cache
def block_rows() -> Tensor:
    """Return the rows that torch packs together, (rows of a block,): those in low nibbles, then those in high ones.

    A block holds column after column, each with two rows in a byte. Which rows these are depends on the machine, so
    they are read off a packed matrix of row numbers.
    """
    rows = torch.arange(128, dtype=torch.int32)[:, None].repeat(1, 2)
    digits = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1).flatten() for part in (rows % 16, rows // 16)]
    low, high = ((digits[0] >> shift & 15).long() + 16 * (digits[1] >> shift & 15).long() for shift in (0, 4))
    half = int((low == low[0]).nonzero()[1])  # bytes until the next column
    return torch.cat([low[:half], high[:half]])


class KernelLinear(nn.Module):
    """`y = x @ values.T + bias` with packed (out, in) values.

    Its `state_dict` holds the decoded weight, as that of Linear does.

    Args:
        matrix: Codes on a grid that the kernel takes.

    Attributes:
        KERNEL: Name of the kernel.
        MAX_ROWS: With more rows of inputs, codes are decoded first; measured in docs/results/answers.md.
        codes: The codes as the kernel reads them.
        step_bits: Steps, and offsets where there are some: bfloat16 seen as int16, or float32 seen as int32, so that no
            cast of the module rounds them.
        column_order: (in,) int32 column of x at each position; None where columns are in their order.
    """

    KERNEL: ClassVar[str]
    MAX_ROWS: ClassVar[int]

    bias: nn.Parameter | None
    codes: Tensor
    step_bits: Tensor
    column_order: Tensor | None

    def __init__(self, matrix: QuantizedMatrix[Grid]) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.codes.shape
        self.register_parameter("bias", None)
        group = matrix.grid.group
        order = None if bool((group[1:] >= group[:-1]).all()) else group.argsort(stable=True).to(torch.int32)
        codes = matrix.codes if order is None else matrix.codes.index_select(1, order)
        stored, steps = self.packed(codes, matrix.grid)
        self.register_buffer("codes", stored, persistent=False)
        bits = steps.contiguous().view(torch.int16 if steps.dtype == torch.bfloat16 else torch.int32)
        self.register_buffer("step_bits", bits, persistent=False)
        self.register_buffer("column_order", order, persistent=False)

    @classmethod
    @abstractmethod
    def fits(cls, grid: Grid) -> bool:
        """Return whether the kernel takes the codes of a grid of integers."""

    @abstractmethod
    def packed(self, codes: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return (out, in) codes, sorted by group, as the kernel reads them, and steps and offsets as they are held."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, out) of bfloat16 inputs by the kernel."""

    @abstractmethod
    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) float32 values, outputs and inputs by position."""

    @property
    def positions(self) -> Tensor:
        """Position of each output in the joined strips, (out,)."""
        return torch.arange(self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) for an input `x` (..., in), in its dtype."""
        flat = x.reshape(-1, self.in_features)
        flat = flat if self.column_order is None else flat.index_select(1, self.column_order)
        few = 0 < len(flat) <= self.MAX_ROWS and flat.dtype == torch.bfloat16 and flat.device.type == "cpu"
        by_kernel = few and not (torch.is_grad_enabled() and x.requires_grad)
        y = self.product(flat)[:, : self.out_features] if by_kernel else self.by_strips(flat)
        y = y if self.bias is None else y + self.bias.to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def by_strips(self, x: Tensor) -> Tensor:
        """Return the product (rows, out) of inputs of any dtype, on any device, by strips decoded one by one."""
        dtype = dense_dtype() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x.dtype
        dense = x.to(dtype)
        y = torch.cat([dense @ strip.to(dtype) for strip in self.strips()], dim=1)
        return y.index_select(1, self.positions.to(y.device)).to(x.dtype)

    @property
    def weight(self) -> Tensor:
        """The (out, in) values in bfloat16, decoded at each access."""
        values = torch.cat(list(self.strips()), dim=1).T.index_select(0, self.positions.to(self.codes.device))
        values = values if self.column_order is None else values.index_select(1, self.column_order.argsort())
        return values.to(torch.bfloat16)

    def extra_repr(self) -> str:
        """Return the sizes as Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _steps(self) -> Tensor:
        return self.step_bits.view(torch.bfloat16 if self.step_bits.dtype == torch.int16 else torch.float32)


class Int4Linear(KernelLinear):
    """Codes of at most 4 bits; `step_bits` is (groups, outputs, 2) with the offset behind the step.

    Outputs are filled up to whole blocks of rows, see `block_rows`.
    """

    KERNEL = "_weight_int4pack_mm_for_cpu"
    MAX_ROWS = 192

    @classmethod
    def fits(cls, grid: Grid) -> bool:
        """Return whether codes have at most 4 bits, in groups of equal size that the kernel's groups divide."""
        return _bits(grid) <= 4 and _run(grid) is not None

    def packed(self, codes: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return packed codes (outputs, in / 2) uint8, and steps with offsets."""
        run, half = _run(grid), 2 ** (_bits(grid) - 1)
        assert run is not None, "see `fits`"
        low = 0 if grid.low is None else grid.low
        scale = grid.scale.to(torch.bfloat16).to(grid.scale.dtype)
        minus = scale * grid.zero
        if isinstance(grid, SuperGrid) and (offset := grid.offset) is not None:
            minus = torch.where(scale == 0, offset, minus)
        steps = torch.stack([scale, scale * (low + half) - minus], dim=2).transpose(0, 1)  # (groups, out, 2)
        steps = steps.repeat_interleave(self.in_features // len(steps) // run, dim=0)
        block, shift = len(block_rows()), MIDDLE - half - low
        outputs = self.out_features + -self.out_features % block
        packed = torch.empty(outputs, self.in_features // 2, dtype=torch.uint8)
        most = block * max(1, MAX_STRIP_WEIGHTS // (self.in_features * block))
        for a in range(0, outputs, most):
            part = codes[a : a + most] + shift
            part = nn.functional.pad(part, (0, 0, 0, min(most, outputs - a) - len(part)), value=MIDDLE)
            packed[a : a + most] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1)
        return packed, nn.functional.pad(steps, (0, 0, 0, outputs - self.out_features)).to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs)."""
        steps = self._steps()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.in_features // len(steps), steps)
        return y

    @property
    def positions(self) -> Tensor:
        """Position of each output in the joined strips, (out,)."""
        rows = block_rows()
        first = torch.arange(0, self.codes.shape[0], len(rows))
        return (first[:, None] + rows.argsort()).flatten()[: self.out_features]

    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) float32 values, outputs by position."""
        rows, columns = block_rows().to(self.codes.device), self.in_features
        block, half = len(rows), len(rows) // 2
        nibbles = self.codes.view(-1, columns, half)
        steps = self._steps().float().view(-1, len(nibbles), block, 2)[:, :, rows]  # (groups, blocks, block, 2)
        most = max(1, MAX_STRIP_WEIGHTS // (columns * block))
        for a in range(0, len(nibbles), most):
            part = nibbles[a : a + most].transpose(0, 1)  # (in, blocks, half)
            values = torch.empty(columns, part.shape[1], block, device=part.device)
            values[..., :half] = part & 15
            values[..., half:] = part >> 4
            scale, offset = (each.unsqueeze(1) for each in steps[:, a : a + most].unbind(-1))
            grouped = values.view(len(steps), -1, *values.shape[1:])
            grouped.sub_(MIDDLE).mul_(scale).add_(offset)
            yield values.view(columns, -1)


class Int8Linear(KernelLinear):
    """Codes of 5 to 8 bits with one step per row; `step_bits` is (out,).

    Steps that bfloat16 does not hold are multiplied behind the kernel: rounded ones would cost about as much as 8 bits.
    """

    KERNEL = "_weight_int8pack_mm"
    MAX_ROWS = 96

    @classmethod
    def fits(cls, grid: Grid) -> bool:
        """Return whether codes lie around 0, with one step for each row."""
        return grid.low is not None and grid.low < 0 and grid.scale.shape[1] == 1 and not bool(grid.zero.any())

    def packed(self, codes: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the codes (out, in) int8, and steps."""
        steps = grid.scale[:, 0].expand(self.out_features)
        short = steps.to(torch.bfloat16)
        return codes.to(torch.int8), short if torch.equal(short.to(steps.dtype), steps) else steps.float()

    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, out)."""
        steps = self._steps()
        exact = steps.dtype == torch.bfloat16
        factors = steps if exact else torch.ones_like(steps, dtype=torch.bfloat16)
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.codes, factors)
        return y if exact else (y * steps).to(torch.bfloat16)

    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) float32 values."""
        steps, most = self._steps().float(), max(1, MAX_STRIP_WEIGHTS // self.in_features)
        for a in range(0, self.out_features, most):
            yield (self.codes[a : a + most].float() * steps[a : a + most, None]).T


def kernel_linear(matrix: QuantizedMatrix[Any]) -> KernelLinear | None:
    """Return the layer of a quantized matrix on the CPU, without a bias; None where no kernel takes its grid."""
    grid = matrix.grid
    if not isinstance(grid, Grid) or grid.levels is not None or grid.low is None:
        return None
    return next((kind(matrix) for kind in (Int4Linear, Int8Linear) if kind.fits(grid)), None)


def _bits(grid: Grid) -> int:
    """Return the bits of a code."""
    return ((grid.high or 0) - (grid.low or 0)).bit_length()


def _run(grid: Grid) -> int | None:
    """Return the largest group size of the kernel that divides all groups of a grid; None where there is none."""
    sizes = torch.bincount(grid.group, minlength=grid.scale.shape[1])
    same = bool((sizes == sizes[0]).all())
    return next((run for run in GROUPS if same and int(sizes[0]) % run == 0), None)
