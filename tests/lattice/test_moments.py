"""Sums of moments: of symmetric ones half is formed, and the means are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nearplane.lattice import moments as module
from nearplane.lattice.moments import ExtraSums, MomentSums


def streams(columns: int, rows: int = 60) -> tuple[Tensor, Tensor]:
    """Return (rows, in) inputs of the quantized and of the original network, float32."""
    g = torch.Generator().manual_seed(columns)
    X = torch.randn(rows, columns, generator=g)
    return X, X + 0.1 * torch.randn(rows, columns, generator=g)


@pytest.mark.parametrize("columns", [1, 5, 16, 37])
def test_means_are_those_of_all_rows_however_they_came(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, a fifth of them held out; blocks that divide the columns, and that do not."""
    monkeypatch.setattr(module, "SPAN", 8)
    X_hat, X = streams(columns)
    sums, held, extra = MomentSums(), MomentSums(), ExtraSums()
    for rows, part in ((slice(0, 20), sums), (slice(20, 48), sums), (slice(48, 60), held)):
        part.add(X_hat[rows], X[rows], {"o": X[rows, :1]})
        extra.add(X_hat[rows], X[rows])
    sums.absorb(held)
    a, b = X_hat.double(), X.double()
    D = (X - X_hat).double()
    means, beside = sums.means(lambda x: x), extra.means(lambda x: x)
    assert beside is not None
    for found, expected in (
        (means.H, a.T @ a), (means.C, b.T @ a), (means.S["o"], b[:, :1].T @ a),
        (beside.H, a.T @ a), (beside.K, D.T @ a), (beside.Q, D.T @ D),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected / 60, rtol=1e-5, atol=1e-6)
    for symmetric in (means.H, beside.H, beside.Q, held.means(lambda x: x).H):
        assert torch.equal(symmetric.tril(-8), symmetric.T.tril(-8))


def test_blocks_below_the_diagonal_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four by four blocks ten are."""
    monkeypatch.setattr(module, "SPAN", 8)
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
