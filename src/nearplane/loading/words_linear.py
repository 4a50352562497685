"""Linear layers on the CPU whose codes stay packed in words of 32 bits: what those on grids and entropy-coded ones share.

Few rows of inputs are multiplied by the codes themselves, see `product_cpu.py`; many by decoded strips, on any device.
Sums are in float32. Inputs in float64, and those with gradients, are multiplied by strips, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nearplane.loading.product_cpu import BLOCK

MAX_ROWS = 16  # with more rows of inputs, codes are decoded first; measured in docs/results/answers.md
NATIVE = ("avx512_bf16", "amx_bf16")  # features of CPUs that multiply bfloat16 as fast as float32, or faster


@cache
def dense_dtype() -> torch.dtype:
    """Return the dtype in which this CPU multiplies bfloat16 inputs by decoded strips."""
    features = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(features.get(name) for name in NATIVE) else torch.float32


class WordsLinear(nn.Module):
    """`y = x @ values.T + bias` with packed (out, in) values.

    Its `state_dict` holds the decoded weight, as that of Linear does.

    Args:
        shape: (out, in) of the values.
        dtype: Dtype of `weight`.
        column_order: (in,) int32 column of x at each position; None where columns are in their order.

    Attributes:
        holds_codes: True, by which a packed network is known.
    """

    holds_codes: ClassVar[bool] = True

    bias: nn.Parameter | None
    column_order: Tensor | None

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, column_order: Tensor | None = None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.dtype = shape, dtype
        self.register_parameter("bias", None)
        self.register_buffer("column_order", column_order, persistent=False)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) of float32 inputs by position, at most `MAX_ROWS`, with the codes."""

    @abstractmethod
    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) float32 values, inputs by position: a block for each thread at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., out) for an input `x` (..., in), in its dtype."""
        order, bias = (
            self._buffers["column_order"],
            self._parameters["bias"],
        )  # by name nn.Module takes longer to find them
        flat = x.reshape(-1, self.in_features)
        flat = flat if order is None else flat.index_select(1, order)
        few = 0 < flat.shape[0] <= MAX_ROWS and flat.dtype != torch.float64 and flat.is_cpu
        if few and not (x.requires_grad and torch.is_grad_enabled()):
            y = self.product((flat.detach() if flat.requires_grad else flat).float()).to(x.dtype)
        else:
            y = self.by_strips(flat)
        y = y if y.shape[1] == self.out_features else y[:, : self.out_features]  # outputs fill whole blocks
        y = y if bias is None else y + bias.to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def by_strips(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) of inputs of any dtype, on any device, by strips decoded one by one."""
        dtype = dense_dtype() if x.dtype == torch.bfloat16 and x.is_cpu else x.dtype
        dense = x.to(dtype)
        return torch.cat([(dense @ strip.to(x.device, dtype)).to(x.dtype) for strip in self.strips()], dim=1)

    @property
    def weight(self) -> Tensor:
        """The (out, in) values, decoded at each access."""
        values = torch.cat([strip.to(self.dtype) for strip in self.strips()], dim=1)[:, : self.out_features].T
        if (order := self.column_order) is not None:
            values = values.index_select(1, order.cpu().argsort())
        decoded: Tensor = values
        return decoded

    def extra_repr(self) -> str:
        """Return the sizes as Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def by_block(numbers: Tensor) -> Tensor:
    """Return (out, groups) numbers as (blocks, groups, BLOCK) float32 seen as int32, so that no cast rounds them."""
    filled: Tensor = nn.functional.pad(numbers.float(), (0, 0, 0, -len(numbers) % BLOCK))
    blocks = filled.reshape(len(filled) // BLOCK, BLOCK, numbers.shape[1])
    return blocks.transpose(1, 2).contiguous().view(torch.int32)
