"""Codes of the seeds' algorithms on small seeded matrices, as commit 69cf7e8 computed them when they were part of the product."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane
from nearplane.recipe.recipe import Calibration
from nearplane.theory.obq import greedy_sweep
from nearplane.theory.qr_factor import append, factorize_root
from nearplane.verbs.hptq import hptq, hptq_recipe

GOLDEN = json.loads((Path(__file__).parent / "golden_codes.json").read_text())


def inputs_of(columns: int) -> Tensor:
    """Return (tokens, columns) float64 rows whose columns are correlated and of different sizes."""
    draw = torch.Generator().manual_seed(columns)
    mixing = torch.randn(columns, columns, generator=draw, dtype=torch.float64) / columns**0.5
    mixing.diagonal().add_(1.0)
    rows = torch.randn(4 * columns, columns, generator=draw, dtype=torch.float64) @ mixing
    return rows * torch.linspace(0.25, 2.0, columns, dtype=torch.float64)


def weights_of(out: int, columns: int) -> Tensor:
    """Return (out, columns) float64 weights."""
    draw = torch.Generator().manual_seed(columns + 1000)
    return torch.randn(out, columns, generator=draw, dtype=torch.float64) / columns**0.5


def grid_of(W: Tensor, bits: int, size: int) -> Grid:
    """Return asymmetric groups from the least to the largest weight."""
    out, n = W.shape
    parts = W.reshape(out, n // size, size)
    scale = (parts.amax(2) - parts.amin(2)) / (2**bits - 1)
    zero = (-parts.amin(2) / scale).round()
    return Grid(scale=scale, zero=zero, group=torch.arange(n) // size, low=0, high=2**bits - 1)


def numbers_in(case: str) -> list[Any]:
    """Return the numbers of a case's name, in their order."""
    return [json.loads(number) for number in re.findall(r"\d+(?:\.\d+)?", case)]


def digest(codes: Tensor) -> str:
    """Return the first half of the SHA-256 of integers as little-endian int32."""
    return hashlib.sha256(codes.to(torch.int32).contiguous().numpy().astype("<i4").tobytes()).hexdigest()[:32]


@pytest.mark.parametrize("case", GOLDEN["obq"])
def test_codes_and_orders_of_obq(case: str) -> None:
    out, columns, bits, size, damp = numbers_in(case)
    W, X, golden = weights_of(out, columns), inputs_of(columns), GOLDEN["obq"][case]
    H = X.T @ X / len(X)
    found = greedy_sweep(W, grid_of(W, bits, size), H, shift=damp * float(H.diagonal().mean()))
    assert found.order[0, :8].tolist() == golden["first_order"]
    assert found.matrix.codes.flatten()[:8].tolist() == golden["first"]
    assert digest(found.order) == golden["order"]
    assert digest(found.matrix.codes) == golden["sha256"]


@pytest.mark.parametrize("case", GOLDEN["qr"])
def test_codes_of_the_factor_by_qr(case: str) -> None:
    """Rows are taken in 37 at a time, as they came from calibration."""
    out, columns, bits, size, damp = numbers_in(case)
    W, X, golden = weights_of(out, columns), inputs_of(columns), GOLDEN["qr"][case]
    R = None
    for rows in X.split(37):
        R = append(R, rows)
    assert R is not None
    factor = factorize_root(R, len(X), case.rpartition(" ")[2], damp=damp)
    assert factor.d[:4].tolist() == pytest.approx(golden["first_d"], rel=1e-10)
    codes = nearest_plane(W, grid_of(W, bits, size), factor).codes
    assert codes.flatten()[:8].tolist() == golden["first"]
    assert digest(codes) == golden["sha256"]


@pytest.mark.parametrize("case", GOLDEN["hptq"])
def test_codes_of_hptq_and_of_rounding_to_nearest_with_huffman_codes(case: str) -> None:
    """Bytes were those of a coder in earnest; here they follow from the lengths of the code words."""
    out, columns, rate, damp = numbers_in(case)
    W, X, golden = weights_of(out, columns).float(), inputs_of(columns), GOLDEN["hptq"][case]
    scheme = hptq_recipe(rate, Calibration(), calibrated="nearest-plane" in case).scheme
    found = hptq(W, X.T @ X / len(X), replace(scheme, damp=damp))
    assert found.matrix.codes.flatten()[:8].tolist() == golden["first"]
    assert found.matrix.grid.base == golden["base"]
    assert digest(found.matrix.codes) == golden["sha256"]
    assert found.bytes == pytest.approx(golden["bytes"], rel=1e-3, abs=2)
