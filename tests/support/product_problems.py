"""Random packed layers on the pretended GPU for the products in Triton, see `interpreted_problems.py`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from decode_problems import KINDS, contents
from nearplane.coding.blob import decode_packed, encode
from nearplane.formats.native import matrix_of
from nearplane.loading import packed_linear, product_triton
from nearplane.loading.packed_linear import PackedLinear
from pretended import pretended
from pretended_triton import interpreted


def problem(seed: int) -> dict[str, Any]:
    """Return the kind and size of a matrix, the dtype and rows of an input, and whether there is a bias."""
    rng = np.random.default_rng(seed)
    rows = [1, product_triton.MAX_PRODUCT_ROWS, product_triton.MAX_PRODUCT_ROWS + 1]
    return {
        "seed": seed, "kind": KINDS[seed % len(KINDS)], "shape": [int(rng.integers(1, 20)), int(rng.integers(1, 150))],
        "dtype": ["float32", "bfloat16", "float16"][seed % 3], "rows": rows[seed // 2 % 3], "biased": bool(rng.integers(2)),
    }  # fmt: skip


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in a dtype, as the interpreter converts them: it cuts bits off for bfloat16."""
    if dtype == torch.bfloat16:
        values = (values.view(torch.int32) & -65536).view(torch.float32)
    return values.to(dtype)


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Multiply; return wrong values, launches and waits of a product, and its error as a share of the bound on it.

    The bound for few rows is that of sums in float32 in any order, and of the rounding to the dtype of the input. For
    more rows the error is 0 if the result is that of torch with the same values, else 2.
    """
    rng, draw = np.random.default_rng(asked["seed"]), torch.Generator().manual_seed(asked["seed"])
    (out, width), dtype = asked["shape"], getattr(torch, asked["dtype"])
    case = contents(asked["kind"], asked["shape"], rng)
    layer = PackedLinear(width, out, bias=asked["biased"], dtype=dtype)
    bias = torch.randn(out, generator=draw).to(dtype) if asked["biased"] else torch.zeros(out, dtype=dtype)
    x = torch.randn(asked["rows"], width, generator=draw).to(dtype)
    exact, few = matrix_of(case).decode(), asked["rows"] <= product_triton.MAX_PRODUCT_ROWS
    products = {"pretend": packed_linear.PRODUCTS["cuda"]}
    with pretended() as gpu, interpreted(), mock.patch.dict(packed_linear.PRODUCTS, products):
        layer.fill(decode_packed(encode(case)), "pretend:0")
        if layer.bias is not None:
            layer.bias = nn.Parameter(bias.to("pretend:0"), requires_grad=False)
        on_gpu = x.to("pretend:0")
        gpu.forget()
        y = layer(on_gpu)
        launches, waits = gpu.total.launches, gpu.total.synchronizations + gpu.total.waiting
        y, weight = y.cpu(), layer.weight.cpu()
    if few:
        true = x.double() @ exact.double().T + bias.double()
        size = x.double().abs() @ exact.double().abs().T + bias.double().abs()
        sums = 2.0**-24 * (width + 4) * size
        allowed = sums + torch.finfo(dtype).eps * (true.abs() + sums) + torch.finfo(dtype).tiny
        error = float(((y.double() - true).abs() / allowed).max())
    else:
        error = 0.0 if torch.equal(y, nn.functional.linear(x, rounded(exact, dtype)) + bias) else 2.0
    wrong = int((weight != rounded(exact, dtype)).sum())
    return {"error": error, "wrong": wrong, "few": few, "launches": launches, "waits": waits}
