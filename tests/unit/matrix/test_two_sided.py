"""Rows that make up for each other's errors: what every part is solved for, and what that is worth."""

from __future__ import annotations

import pytest
import torch

from nearplane.errors import NumericalError
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import Solution, round_to_nearest
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.matrix.two_sided import MIN_ROWS, ROW_DAMP, solve_compensating
from nearplane.number_formats import integers
from nearplane.recipe.schemes import GridScheme

IN, TOKENS = 24, 96
STEPS = Steps(format=integers(2, 8, symmetric=False), search="minmax", storage=torch.float32)


def correlated(size, generator, rank=3):
    """Return `E[g g^T]` of gradients that few directions make up."""
    g = torch.randn(400, rank, generator=generator) @ torch.randn(rank, size, generator=generator)
    g = g + 0.2 * torch.randn(400, size, generator=generator)
    return g.T @ g / len(g)


def plain(part):
    """Round every weight on a grid of its row."""
    return Solution(matrix=round_to_nearest(part, STEPS.grid(part)))


def damped(G):
    return G + ROW_DAMP * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype)


def test_rows_that_have_nothing_to_do_with_each_other_are_solved_as_alone(generator):
    W = torch.randn(40, IN, generator=generator)
    found = solve_compensating(W, [torch.rand(40, generator=generator).diag()], plain)
    assert found.matrix.same_as(plain(W).matrix)


def test_every_part_is_solved_for_what_is_best_if_the_rows_after_it_make_up_for_all(generator):
    """By the Schur complement: the rows behind a part are free, those before it are fixed."""
    W, G = torch.randn(40, IN, generator=generator), correlated(40, generator)
    given = []

    def solve(part):
        given.append(part)
        return plain(part)

    E = W - solve_compensating(W, [G], solve).matrix.decode()
    H, first = damped(G.double()), 0
    assert [len(part) for part in given] == [MIN_ROWS, MIN_ROWS, 40 - 2 * MIN_ROWS]
    for part in given:
        end = first + len(part)
        S = H[:end, :end] - H[:end, end:] @ torch.linalg.solve(H[end:, end:], H[end:, :end])
        wanted = W[first:end] + torch.linalg.solve(S[first:, first:], S[first:, :first] @ E[:first].double())
        torch.testing.assert_close(part.double(), wanted, rtol=1e-4, atol=1e-4)
        first = end


def test_runs_of_rows_do_not_know_of_each_other(generator):
    W = torch.randn(64, IN, generator=generator)
    runs = [correlated(20, generator), correlated(44, generator)]
    both = solve_compensating(W, runs, plain).matrix
    alone = [solve_compensating(part, [G], plain).matrix for part, G in zip(W.split([20, 44]), runs, strict=True)]
    assert torch.equal(both.codes, torch.cat([each.codes for each in alone]))
    torch.testing.assert_close(both.decode(), torch.cat([each.decode() for each in alone]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", ["nearest-plane", "k-best"])
def test_what_both_sides_cost_is_less(generator, solver):
    W, X = torch.randn(64, IN, generator=generator), torch.randn(TOKENS, IN, generator=generator)
    H, G = X.T @ X / TOKENS, correlated(64, generator)

    def cost(scheme):
        matrix, record = quantize_matrix(W, H, scheme, together=[G])
        E = (W - matrix.decode()).double()
        return float((damped(G).double() @ E @ H.double() * E).sum()), record

    scheme = {"bits": 2, "group_size": 8, "symmetric": False, "solver": solver}
    (rows_alone, bounded), (together, record) = cost(GridScheme(**scheme)), cost(GridScheme(**scheme, two_sided=True))
    assert together < 0.8 * rows_alone
    assert record.loss > bounded.loss  # of the layer by itself, which is no longer what is aimed at
    assert bounded.worst_case is not None
    assert (record.worst_case, record.expected, record.gamma) == (None, None, None)


def test_without_gradients_rows_are_solved_as_alone(generator):
    """As those of layers that no gradient reaches."""
    W, H = torch.randn(20, IN, generator=generator), torch.eye(IN)
    found, _ = quantize_matrix(W, H, GridScheme(bits=3, group_size=8, two_sided=True))
    assert found.same_as(quantize_matrix(W, H, GridScheme(bits=3, group_size=8))[0])


def test_gradients_of_other_rows_are_refused(generator):
    with pytest.raises(NumericalError, match=r"Found gradients of 12 outputs; expected 20\."):
        solve_compensating(torch.randn(20, IN, generator=generator), [torch.eye(12)], plain)
