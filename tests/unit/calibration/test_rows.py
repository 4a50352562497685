"""Rows of two networks that belong together."""

from __future__ import annotations

from fractions import Fraction

import torch

from nearplane.calibration.rows import RoutedRows
from nearplane.models.experts import Routed


def test_rows_are_paired_where_both_networks_send_a_token_to_the_expert() -> None:
    """Of the others nothing is known to be lost."""
    x_hat, x = torch.randn(5, 3), torch.randn(5, 3)
    token, expert = torch.tensor([0, 2, 3, 1, 4]), torch.tensor([0, 0, 0, 1, 1])
    quantized = Routed(x=x_hat, token=token, expert=expert, ends=(3, 5, 5), tokens=5, apart=False)
    token, expert = torch.tensor([2, 3, 4, 0, 1]), torch.tensor([0, 0, 0, 1, 2])
    original = Routed(x=x, token=token, expert=expert, ends=(3, 4, 5), tokens=5, apart=False)
    rows = RoutedRows(quantized=quantized, original=original).of(0)
    assert torch.equal(rows.X_hat, x_hat[[0, 2, 3]])
    assert torch.equal(rows.X, torch.stack([x_hat[0], x[2], x[3]]))
    assert (rows.alike, rows.before(Fraction(3, 5)), rows.before(Fraction(1, 5))) == (2, 2, 1)
    others = RoutedRows(quantized=quantized, original=original)
    assert (others.of(1).alike, others.of(2).alike, len(others.of(2).X_hat)) == (0, 0, 0)
    nothing = Routed(x=x[:0], token=token[:0], expert=token[:0], ends=(0, 0, 0), tokens=5, apart=True)
    unmet = RoutedRows(quantized=quantized, original=nothing).of(0)
    assert torch.equal(unmet.X, unmet.X_hat)
    assert unmet.alike == 0
