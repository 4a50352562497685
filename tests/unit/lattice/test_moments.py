"""Sums of moments: of symmetric ones half is formed, and the means are whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice import kernels
from nearplane.lattice import moments as module
from nearplane.lattice.exact_sum import unit_of
from nearplane.lattice.moments import ExtraRows, MomentSums, bfloat16_parts, cross_product


def streams(columns: int, rows: int = 60) -> tuple[Tensor, Tensor]:
    """Return (rows, in) inputs of the quantized and of the original network, float32."""
    g = torch.Generator().manual_seed(columns)
    X = torch.randn(rows, columns, generator=g)
    return X, X + 0.1 * torch.randn(rows, columns, generator=g)


@pytest.mark.parametrize("columns", [1, 5, 16, 37])
def test_means_are_those_of_all_rows_however_they_came(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, a fifth of them held out; blocks that divide the columns, and that do not."""
    monkeypatch.setattr(kernels, "CPU", replace(kernels.CPU, span=8))
    X_hat, X = streams(columns)
    unit = unit_of(X_hat)
    sums, held, extra = MomentSums(unit=unit), MomentSums(unit=unit), ExtraRows()
    outputs = X_hat[:, :1] - X[:, :1]
    for rows, part in ((slice(0, 20), sums), (slice(20, 48), sums), (slice(48, 60), held)):
        part.add(X_hat[rows], X[rows], {"o": outputs[rows]})
        extra.add(X_hat[rows], X[rows])
    sums.merge(held)
    a, b = X_hat.double(), X.double()
    means, beside = sums.totals().means(), extra.together()
    for found, expected in (
        (means.H, a.T @ a), (means.C, b.T @ a), (means.lost["o"], outputs.double().T @ a),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected / 60, rtol=1e-5, atol=1e-6)
    apart = held.totals().means(torch.float32)
    for symmetric in (means.H, apart.H):
        assert torch.equal(symmetric.tril(-8), symmetric.T.tril(-8))
    assert (apart.H.dtype, apart.lost["o"].dtype, means.H.dtype) == (torch.float32, torch.float32, torch.float64)
    assert beside is not None
    assert torch.equal(beside.X_hat, X_hat)
    assert torch.equal(beside.X, X)


def test_what_a_layers_output_lost_takes_the_place_of_the_other_networks_moments() -> None:
    X_hat, X = streams(5)
    sums = MomentSums()
    sums.add(X_hat, X, {"o": X - X_hat}, crossed=False)
    means = sums.totals().means()
    assert means.C is None
    known = means.of("o", None)
    assert known.corrects
    torch.testing.assert_close(known.lost, ((X - X_hat).T @ X_hat / 60).double(), rtol=1e-5, atol=1e-6)
    assert not means.of("another", None).corrects


def test_rows_that_are_kept_are_copies_and_none_are_nothing() -> None:
    X_hat, X = streams(5)
    extra = ExtraRows()
    extra.add(X_hat[:0], X[:0])
    assert extra.together() is None
    extra.add(X_hat)
    before = X_hat.clone()
    X_hat.zero_()
    kept = extra.together()
    assert torch.equal(kept.X_hat, before)
    assert kept.X is None
    assert extra.together() is None


def test_blocks_below_the_diagonal_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four by four blocks ten are."""
    monkeypatch.setattr(kernels, "CPU", replace(kernels.CPU, span=8))
    formed: list[int] = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if function is Tensor.matmul or function is Tensor.__matmul__:
                formed.append(found.numel())
            return found

    with Counting():
        MomentSums().add(streams(32)[0])
    assert sum(formed) == 10 * 64


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_16_bit_rows_are_exact_and_their_sums_float32(dtype: torch.dtype) -> None:
    """One row has no sum: then every entry is that of float64. Many rows are off by what sums in float32 lose."""
    A, B = (x.to(dtype) for x in streams(24, rows=700))
    one = cross_product(A[:1], B[:1])
    assert one.dtype == torch.float32
    assert torch.equal(one.double(), A[:1].double().T @ B[:1].double())
    exact, size = A.double().T @ B.double(), A.double().abs().T @ B.double().abs()
    assert ((cross_product(A, B) - exact).abs() <= 1e-6 * size).all()
    rounded_once = (A.T @ B).double()
    assert ((rounded_once - exact).abs() > 1e-6 * size).any()  # what a product in 16 bits would lose


def test_rows_of_two_dtypes_are_multiplied_in_the_wider(generator: torch.Generator) -> None:
    """Differences of the two networks are float32 where rows are not."""
    A, B = torch.randn(9, 4, generator=generator), torch.randn(9, 5, generator=generator)
    assert torch.equal(cross_product(A, B.bfloat16()), A.T @ B.bfloat16().float())
    assert torch.equal(cross_product(A, B), A.T @ B)
    assert cross_product(A.double(), B).dtype == torch.float64


@given(st.integers(0, 1 << 30), st.integers(-90, 100))
def test_three_bfloat16_numbers_hold_a_float32_number(seed: int, exponent: int) -> None:
    A = torch.randn(8, 50, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    parts = bfloat16_parts(A)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    assert torch.equal(sum(part.double() for part in parts), A.double())


@pytest.mark.parametrize("dtype", HALVES)
def test_a_device_with_such_a_product_is_given_the_rows_as_they_are(dtype: torch.dtype) -> None:
    """Here the CPU gets one for the length of the test; what does not lie in 16 bits goes another way."""
    multiplied: list[tuple[torch.dtype, torch.dtype]] = []

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        multiplied.append((a.dtype, b.dtype))
        return a.to(out_dtype) @ b.to(out_dtype)

    X_hat, X = (x.to(dtype) for x in streams(20))
    outputs = {"o": X.float() - X_hat.float()}
    expected, found = MomentSums(), MomentSums()
    expected.add(X_hat, X, outputs)
    library = torch.library.Library("aten", "IMPL")
    module.sums_in_float32.cache_clear()
    try:
        library.impl("mm.dtype", product, "CPU")
        found.add(X_hat, X, outputs)
    finally:
        library._destroy()
        module.sums_in_float32.cache_clear()
    # a trial, H in one block, C, and the parts of a difference
    assert multiplied == [(dtype, dtype)] * (6 if dtype == torch.bfloat16 else 3)
    assert not module.sums_in_float32(X.device, dtype)
    ours, theirs = (sums.totals() for sums in (found, expected))
    assert torch.equal(ours.H, theirs.H)
    assert torch.equal(ours.C, theirs.C)
    assert torch.allclose(ours.lost["o"], theirs.lost["o"], rtol=0, atol=1e-6 * float(theirs.lost["o"].abs().max()))
    assert found.dtype == torch.float32
