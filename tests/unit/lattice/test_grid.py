"""The grid: what rounding to it means, on every kind of grid."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given

from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.superblock import SuperGrid
from strategies import KINDS, Problem, problem, problems

CLIPPED = tuple(kind for kind in KINDS if kind not in ("one-sided", "unclipped", "unclipped rows"))


@given(problems(CLIPPED))
def test_no_level_of_a_bounded_grid_is_nearer_than_the_one_chosen(p: Problem) -> None:
    """Against all levels, one by one."""
    _, values = p.grid.round(p.W, slice(None))
    levels = torch.arange(p.grid.low, p.grid.high + 1, dtype=torch.float64)[:, None, None]
    zero = p.grid.zero[:, p.grid.group]
    distances = (p.grid.steps() * (levels - zero) - p.W).abs()  # (levels, out, in)
    assert bool(((values - p.W).abs() <= distances.amin(0) * (1 + 1e-12) + 1e-15 * p.W.abs()).all())


@given(problems())
def test_rounding_decodes_to_the_values_it_returns(p: Problem) -> None:
    codes, values = p.grid.round(p.W, slice(None))
    assert torch.equal(p.grid.decode(codes.int()), values)
    assert torch.equal(QuantizedMatrix(codes=codes.int(), grid=p.grid).decode(), values)


@given(problems())
def test_a_point_of_the_grid_rounds_to_itself(p: Problem) -> None:
    """Decoding and rounding again, as a reader of a checkpoint would, loses no code."""
    codes, values = p.grid.round(p.W, slice(None))
    again, same_values = p.grid.round(values, slice(None))
    assert torch.equal(again, codes)
    assert torch.equal(same_values, values)


@given(problems())
def test_codes_stay_within_the_limits(p: Problem) -> None:
    codes, _ = p.grid.round(100 * p.W, slice(None))
    if p.grid.low is not None:
        assert int(codes.min()) >= p.grid.low
    if p.grid.high is not None:
        assert int(codes.max()) <= p.grid.high


@given(problems())
def test_what_does_not_clip_is_within_half_a_step_and_what_clips_is_at_a_limit(p: Problem) -> None:
    codes, values = p.grid.round(p.W, slice(None))
    clipped = p.clipped(p.W)
    half = (p.grid.steps() / 2).expand_as(p.W)
    error = (p.W - values).abs()
    assert bool((error[~clipped] <= half[~clipped] * (1 + 1e-12)).all())
    assert bool((error[clipped] > half[clipped] * (1 - 1e-12)).all())
    limits = torch.tensor([x for x in (p.grid.low, p.grid.high) if x is not None], dtype=torch.float64)
    assert bool(torch.isin(codes[clipped], limits).all())


@given(problems())
def test_columns_are_rounded_alike_one_by_one_in_any_order_or_together(p: Problem) -> None:
    codes, values = p.grid.round(p.W, slice(None))
    some = p.permutation[: max(1, len(p.permutation) // 2)]
    assert torch.equal(p.grid.round(p.W[:, some], some)[0], codes[:, some])
    for j in range(p.W.shape[1]):
        alone_codes, alone_values = p.grid.round(p.W[:, j : j + 1], slice(j, j + 1))
        assert torch.equal(alone_codes[:, 0], codes[:, j])
        assert torch.equal(alone_values[:, 0], values[:, j])


@given(problems())
def test_every_grid_is_a_grid_with_one_step_per_weight(p: Problem) -> None:
    """Per tensor, per row, grouped, in activation order: all the same class, told apart by shapes only."""
    out, columns = p.W.shape
    scale, zero = (part.expand(out, columns).clone() for part in p.grid.columns(slice(None)))
    spelled_out = Grid(scale=scale, zero=zero, group=torch.arange(columns), low=p.grid.low, high=p.grid.high)
    assert torch.equal(spelled_out.round(p.W, slice(None))[0], p.grid.round(p.W, slice(None))[0])
    assert torch.equal(spelled_out.steps(), p.grid.steps().expand(out, columns))


def test_another_dtype_changes_steps_and_offsets_but_neither_groups_nor_limits() -> None:
    grid = problem(kind="asymmetric").grid
    single = grid.to(torch.float32)
    assert (single.scale.dtype, single.zero.dtype, single.group.dtype) == (torch.float32, torch.float32, torch.int64)
    assert (single.low, single.high) == (grid.low, grid.high)
    moved = single.to("cpu")
    assert torch.equal(moved.scale, single.scale)
    assert torch.equal(moved.group, grid.group)


def test_a_grid_cannot_be_changed() -> None:
    grid = problem().grid
    with pytest.raises(FrozenInstanceError):
        grid.low = 0  # type: ignore[misc]


SUPER = dict(d=torch.ones(2, 1), sc=torch.full((2, 2), 3.0), group=torch.arange(8) // 4, low=0, high=15)
STEPS = dict(scale=torch.ones(2, 2), zero=torch.zeros(2, 2), group=torch.arange(8) // 4)
GRIDS = {
    "integers": Grid(**STEPS, low=-8, high=7),
    "unbounded": Grid(**STEPS),
    "levels": Grid(**STEPS, low=0, high=3, levels=torch.tensor([-1.0, -0.25, 0.25, 1.0])),
    "ladders": ProductGrid(
        base=0.1, columns=torch.arange(8).int(), column_resolution=4, rows=torch.tensor([0, 1]).int(), row_resolution=2
    ),
    "two levels": SuperGrid(**SUPER),
    "two levels with minima": SuperGrid(**SUPER, dmin=torch.full((2, 1), 0.5), m=torch.ones(2, 2)),
}


@pytest.mark.parametrize("kind", GRIDS)
def test_a_matrix_is_the_same_in_another_process(kind: str) -> None:
    matrix = QuantizedMatrix(codes=torch.arange(16).view(2, 8).int() % 4, grid=GRIDS[kind])
    found = pickle.loads(pickle.dumps(matrix))
    assert type(found.grid) is type(matrix.grid)
    assert found.same_as(matrix)
    assert torch.equal(found.decode(), matrix.decode())
