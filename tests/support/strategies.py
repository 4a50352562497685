"""Hypothesis strategies: problems of every shape that the solver may meet.

Hypothesis draws shapes, kinds and a seed; the tensors come from the seed: a failing example is one line to repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.grid import Grid
from oracles import damped

Kind = Literal[
    "tensor", "row", "grouped", "asymmetric", "column", "permuted", "one-sided", "unclipped", "unclipped rows"
]
KINDS: tuple[Kind, ...] = Kind.__args__
UNCLIPPED: tuple[Kind, ...] = ("unclipped", "unclipped rows")
ORDERS = ("natural", "reversed", "activation", "pivoted", "given")
SCALES = (1e-15, 1.0, 1e15)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One matrix to quantize, float64.

    Args:
        W: (out, in) weights.
        X: (tokens, in) inputs.
        H: (in, in) their Hessian, undamped.
        grid: to round to.
        damp: relative.
        permutation: (in,), the order named "given".
    """

    W: Tensor
    X: Tensor
    H: Tensor
    grid: Grid
    damp: float
    permutation: Tensor

    def factor(self, order: str) -> Factor:
        """Factor the Hessian in an order, "given" among them."""
        return factorize(self.H, self.permutation if order == "given" else order, damp=self.damp)

    def data(self, factor: Factor) -> Tensor:
        """Return (tokens + in, in) inputs with the damping appended."""
        return damped(self.X, factor.shift)

    def clipped(self, targets: Tensor) -> Tensor:
        """Return (out, in) bool, True where targets lie more than half a step beyond the limits of the grid."""
        scale, zero = self.grid.columns(slice(None))
        return self.grid.codebook.outside(targets / scale + zero)

    def damped_hessian(self, factor: Factor) -> Tensor:
        """Return the (in, in) Hessian that was factored."""
        return self.H + factor.shift * torch.eye(len(self.H), dtype=torch.float64)


def problem(
    seed: int = 0,
    out: int = 4,
    columns: int = 8,
    tokens: int = 32,
    kind: Kind = "grouped",
    bits: int = 3,
    dead: int = 0,
    damp: float = 0.01,
    weight_scale: float = 1.0,
    input_scale: float = 1.0,
) -> Problem:
    """Build a problem. With fewer tokens than columns the Hessian is singular undamped; the first column never dies."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    W = normal(out, columns) * normal(out, 1).mul(0.5).exp() * weight_scale
    mixing = normal(columns, columns) / columns**0.5 + torch.eye(columns, dtype=torch.float64)
    X = (normal(tokens, columns) @ mixing) * normal(columns).exp() * input_scale
    killed = torch.randperm(columns - 1, generator=g)[: min(dead, columns - 1)] + 1
    X[:, killed] = 0
    grid = _grid(kind, bits, W, weight_scale, g)
    permutation = torch.randperm(columns, generator=g)
    return Problem(W=W, X=X, H=X.T @ X / len(X), grid=grid, damp=damp, permutation=permutation)


def _grid(kind: Kind, bits: int, W: Tensor, weight_scale: float, g: torch.Generator) -> Grid:
    """Return a grid of a kind, its steps such that some weights clip and some do not."""
    out, columns = W.shape
    divisors = [d for d in range(1, columns + 1) if columns % d == 0]
    size = divisors[int(torch.randint(len(divisors), (1,), generator=g))]
    group, rows, low, high = torch.zeros(columns, dtype=torch.int64), out, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    match kind:
        case "tensor" | "unclipped":
            rows = 1
        case "column":
            rows, group = 1, torch.arange(columns)
        case "grouped" | "asymmetric" | "one-sided":
            group = torch.arange(columns) // size
        case "permuted":
            group = (torch.arange(columns) // size)[torch.randperm(columns, generator=g)]
    groups = int(group.max()) + 1
    scale = weight_scale * 2.0 ** (1 - bits) * (3 * torch.rand(rows, groups, generator=g, dtype=torch.float64) + 0.3)
    zero = torch.zeros_like(scale)
    if kind == "asymmetric":
        low, high = 0, 2**bits - 1
        zero = torch.randint(0, 2**bits, scale.shape, generator=g).double()
    lowest = None if kind in UNCLIPPED else low
    highest = None if kind in UNCLIPPED or kind == "one-sided" else high
    return Grid(scale=scale, zero=zero, group=group, low=lowest, high=highest)


def problems(
    kinds: tuple[Kind, ...] = KINDS,
    columns: int = 10,
    dead: int = 3,
    full_rank: bool = False,
    damps: tuple[float, ...] = (0.01, 0.1, 1.0),
) -> st.SearchStrategy[Problem]:
    """Draw problems: singular, with dead columns, one row, one column, huge and tiny, on the given kinds of grid."""
    return st.builds(
        problem,
        seed=st.integers(0, 2**32 - 1),
        out=st.integers(1, 4),
        columns=st.integers(1, columns),
        tokens=st.just(4 * columns) if full_rank else st.integers(1, 2 * columns),
        kind=st.sampled_from(kinds),
        bits=st.integers(2, 4),
        dead=st.integers(0, dead),
        damp=st.sampled_from(damps),
        weight_scale=st.sampled_from(SCALES),
        input_scale=st.sampled_from(SCALES),
    )


def groups(columns: int = 12) -> st.SearchStrategy[Tensor]:
    """Draw weights (out, groups, size), some groups of one sign, some zero, huge or tiny."""
    return st.builds(
        _weights,
        seed=st.integers(0, 2**32 - 1),
        shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, columns)),
        signs=st.sampled_from(("both", "positive", "negative")),
        scale=st.sampled_from((1e-2, 1.0, 1e2)),
        zero=st.booleans(),
    )


def _weights(seed: int, shape: tuple[int, ...], signs: str, scale: float, zero: bool) -> Tensor:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    if signs != "both":
        weights = weights.abs() * (1 if signs == "positive" else -1)
    if zero:
        weights[:, 0] = 0
    return weights
