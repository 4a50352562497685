"""Exact sums: any order and any grouping of batches gives the same bits, and the error is that of the products."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice import kernels_cpu, kernels_torch
from nearplane.lattice.exact_sum import ExactSum, unit_of
from nearplane.lattice.moments import MomentSums
from pretended import pretended

BATCHES, ROWS, SPAN = 6, 12, 8
KINDS = ("alike", "dead at first and huge later", "huge at first", "zero at first", "magnitudes of float32")


def inputs(kind: str, columns: int, seed: int) -> list[Tensor]:
    """Return the rows (tokens, in) of each batch, float32; columns differ by up to 2^10."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(BATCHES, ROWS, columns, generator=g)
    X *= torch.exp2(torch.randint(-5, 6, (columns,), generator=g))
    some = torch.rand(columns, generator=g) < 0.5
    some[0] = True
    if kind == "dead at first and huge later":
        X[0][:, some], X[3:, :, some] = 0, X[3:, :, some] * 64
    elif kind == "huge at first":
        X[0] *= 1024
    elif kind == "zero at first":
        X[0] = 0
    elif kind == "magnitudes of float32":
        X *= torch.exp2(torch.randint(-20, 10, X.shape, generator=g))
    return [*X]


def summed(unit: Tensor, products: list[Tensor], span: int | None = None) -> ExactSum:
    rows, columns = products[0].shape
    sums = ExactSum(unit, (rows, columns), span=span)
    for product in products:
        for at in range(0, rows, span or rows):
            sums.add(product[at : at + (span or rows), at if span else 0 :], at)
    return sums


cases = given(
    kind=st.sampled_from(KINDS), columns=st.integers(1, 29), seed=st.integers(0, 2**31), data=st.data()
)  # fmt: skip


@cases
def test_order_and_grouping_change_no_bit(kind: str, columns: int, seed: int, data: st.DataObject) -> None:
    X = inputs(kind, columns, seed)
    unit = unit_of(X[0])
    order = data.draw(st.permutations(range(BATCHES)))
    cuts = sorted(data.draw(st.lists(st.integers(0, BATCHES), max_size=3)))
    groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, BATCHES], strict=True)]
    products = [x.T @ x for x in X]
    for span in (None, SPAN):
        whole, parts = summed(unit, products, span), ExactSum(unit, (columns, columns), span=span)
        for group in groups:
            if group:
                parts.merge(summed(unit, [products[i] for i in group], span))
        assert all(torch.all(flag) for flag in whole.within())
        assert all(torch.equal(a, b) for a, b in zip(whole.parts(), parts.parts(), strict=True))
        assert torch.equal(whole.value().triu(), parts.value().triu())


@cases
def test_the_error_is_no_larger_than_that_of_float32_products(
    kind: str, columns: int, seed: int, data: st.DataObject
) -> None:
    """That is 2^-24 of the lengths of both inputs, down to lengths of 2^-18 of the first batch's largest."""
    X = inputs(kind, columns, seed)
    products = [x.T @ x for x in X]
    found = summed(unit_of(X[0]), products).value()
    plain = reduce(lambda sums, product: sums.add_(product), products, torch.zeros(columns, columns).double())
    lengths = plain.diagonal().sqrt()
    first = X[0].square().sum(0).max().sqrt().double() if X[0].any() else torch.tensor(64.0).double()
    lengths = lengths.maximum(first * 2**-18)
    assert ((found - plain).abs() <= 2**-24 * lengths[:, None] * lengths).all()


def test_sums_of_symmetric_matrices_are_those_of_whole_ones_in_half_the_memory() -> None:
    for columns in (1, 7, 8, 9, 16, 29):
        X = inputs("alike", columns, columns)
        products = [x.T @ x for x in X]
        halves, whole = (summed(unit_of(X[0]), products, span) for span in (SPAN, None))
        entries = sum(part.numel() for part in halves.parts())
        assert entries <= columns * (columns + 2 * SPAN)
        assert torch.equal(halves.value().triu(), whole.value().triu())


def test_a_rank_without_rows_adds_nothing() -> None:
    """Of an expert, say: its sums take those of others, and the others are as they were."""
    X = inputs("alike", 9, 0)
    few, none, more = (MomentSums(unit=unit_of(X[0])) for _ in range(3))
    none.add(X[0][:0], X[0][:0], {"o": X[0][:0]})
    for rows in X:
        for sums in (few, more):
            sums.add(rows, 2 * rows, {"o": rows[:, :4]})
    few.merge(none)
    none.merge(few)
    expected, *others = (sums.totals() for sums in (more, few, none))
    for totals in others:
        assert torch.equal(totals.H, expected.H)
        assert torch.equal(totals.C, expected.C)
        assert torch.equal(totals.lost["o"], expected.lost["o"])
        assert torch.equal(totals.alive, expected.alive)
        assert totals.tokens == expected.tokens == BATCHES * ROWS
    empty = MomentSums()
    empty.merge(MomentSums())
    assert empty.totals().H is None


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e15])
def test_sums_scale_with_the_inputs(size: float) -> None:
    """By a power of two nothing but the exponent changes."""
    size = 2.0 ** round(torch.tensor(size).log2().item())
    X = [rows.double() for rows in inputs("alike", 5, 2)]
    plain, scaled = (summed(unit_of(f * X[0]), [(f * x).T @ (f * x) for x in X]).value() for f in (1.0, size))
    assert torch.equal(plain * size**2, scaled)


@pytest.mark.parametrize(("growth", "fits"), [(2.0**16, True), (2.0**20, False), (1e30, False)])
def test_what_outgrows_the_integers_is_found(growth: float, fits: bool) -> None:
    rows = torch.eye(3)
    sums = summed(unit_of(rows), [rows, growth**2 * rows])
    finite, within = sums.within()
    assert bool(within) == fits
    assert bool(finite) == (growth < 1e20)
    if fits:
        assert torch.equal(sums.value(), (1 + growth**2) * torch.eye(3).double())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(bad: float) -> None:
    products = [torch.eye(3), torch.eye(3)]
    products[1][2, 0] = bad
    finite, within = summed(unit_of(torch.eye(3)), products).within()
    assert not finite
    assert not within


def test_too_many_batches_are_found() -> None:
    """2^21 of them fill a low integer at worst."""
    sums = summed(unit_of(torch.eye(2)), [torch.zeros(2, 2)])
    for _ in range(21):
        sums.merge(sums)
    assert sums.within()[1]
    sums.merge(sums)
    assert not sums.within()[1]


def test_sums_of_different_units_are_refused() -> None:
    a, b = (summed(unit_of(rows), [rows]) for rows in (torch.eye(2), 2 * torch.eye(2)))
    with pytest.raises(NumericalError, match=r"units .* cannot be added"):
        a.merge(b)


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(3, 2), torch.empty(0, 2), torch.full((1, 2), torch.nan), torch.full((1, 2), torch.inf),
        torch.full((1, 2), 1e-300, dtype=torch.float64), torch.full((1, 2), 1e150, dtype=torch.float64),
        torch.full((1, 2), 3.0),
    ],
)  # fmt: skip
def test_the_unit_is_a_power_of_two(rows: Tensor) -> None:
    unit = unit_of(rows)
    assert unit.shape == (1,)
    assert torch.frexp(unit).mantissa == 0.5
    if float(rows.sum()) == 6:  # a squared length of 9
        assert float(unit) == 2.0**24 / 16


def test_a_gpu_sums_as_a_cpu_does_and_is_not_waited_for() -> None:
    X = inputs("alike", 20, 3)
    expected = summed(unit_of(X[0]), [x.T @ x for x in X], SPAN)
    with pretended() as gpu:
        there = [x.to("pretend:0") for x in X]
        products = [x.T @ x for x in there]
        before = gpu.total.synchronizations
        found = summed(unit_of(there[0]), products, SPAN)
        found.merge(summed(found.unit, products, SPAN))
        assert gpu.total.synchronizations == before
        value = found.value().cpu()
    expected.merge(expected)
    assert torch.equal(value.triu(), expected.value().triu())


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_the_compiled_addition_is_that_of_torch(
    rows: int, columns: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    """Bit for bit, in views of larger matrices, on products of all magnitudes and of both signs."""
    g = torch.Generator().manual_seed(seed)
    product = torch.randn(rows, columns, generator=g, dtype=dtype)
    product *= torch.exp2(torch.randint(-60, 38, product.shape, generator=g))
    unit = torch.tensor([2.0**20]).double()
    wide = torch.randint(-(2**60), 2**60, (2, rows + 3, columns + 5), generator=g)
    found, before = wide.clone(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels_cpu, "MIN_ADDED", 16)
            peaks = [
                add(product, sums[0, 3:, 2:-3], sums[1, :-3, 5:], unit)
                for add, sums in ((kernels_cpu.add_exactly, found), (kernels_torch.add_exactly, wide))
            ]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, wide)
    assert torch.equal(*peaks)
    assert torch.equal(peaks[0], product.abs().max().double()[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("add", [kernels_cpu.add_exactly, kernels_torch.add_exactly])
def test_the_largest_magnitude_tells_of_what_is_not_finite(add: Any, bad: float, dtype: torch.dtype) -> None:
    product = torch.ones(3, 4, dtype=dtype)
    product[1, 2], product[2, 0] = bad, -5
    peak = add(product, *torch.zeros(2, 3, 4, dtype=torch.int64), torch.tensor([1.0]).double())
    assert (peak.shape, peak.dtype) == ((1,), torch.float64)
    assert not peak.isfinite()
