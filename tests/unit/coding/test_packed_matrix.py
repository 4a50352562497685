"""Coded matrices as they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coded import contents
from nearplane.coding.blob import decode_packed, encode
from nearplane.coding.packed_matrix import PackedMatrix
from nearplane.loading.coded_linear import CodedLinear


def filled(packed: PackedMatrix, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> CodedLinear:
    """Return a layer that holds a matrix."""
    layer = CodedLinear(packed, dtype)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return layer


def test_codes_near_zero_take_a_third_of_a_byte_each() -> None:
    case = contents(256, 512, spread=0.5)
    layer = filled(decode_packed(encode(case)))
    assert 4 * layer.words.numel() <= 0.35 * case.codes.size
