"""Strips of rows that are solved apart, as several processes do, have the bits of the whole layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nearplane.lattice.kernels import CPU
from nearplane.lattice.moments import Extra, Moments
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.on_grid import SolvedRows, check_rows, joined, solve_rows
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.number_formats import BY_NAME
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.schemes import GridScheme
from nightly import daily_of_several

SCHEMES: dict[str, GridScheme | BlockScheme] = {
    "4 bits": GridScheme(bits=4, group_size=64),
    "2 bits, not symmetric": GridScheme(bits=2, group_size=32, symmetric=False),
    "k-best": GridScheme(bits=3, group_size=64, solver="k-best", beam=4),
    "to nearest": GridScheme(bits=4, group_size=64, solver="round-to-nearest"),
    "8 bits": GridScheme(grid="int8"),
    "8-bit floats in tiles": GridScheme(grid="fp8-block"),
    "nvfp4": GridScheme(grid="nvfp4"),
    "mxfp4": GridScheme(grid="mxfp4"),
    "q4_k": BlockScheme("q4_k"),
    "q2_k": BlockScheme("q2_k"),
    "iq4_xs": BlockScheme("iq4_xs"),
}


def moments(columns: int, generator: torch.Generator) -> Moments:
    """Return moments of two networks, with windows that are held out and extra ones."""

    def seen(tokens: int) -> tuple[Tensor, Tensor]:
        X = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 2, columns)
        X[:, 7] = 0
        return X, X + 0.1 * torch.randn(X.shape, generator=generator, dtype=torch.float64).masked_fill(X == 0, 0)

    def of(X: Tensor, X_hat: Tensor) -> Moments:
        return Moments(H=X_hat.T @ X_hat / len(X), C=X.T @ X_hat / len(X), tokens=len(X))

    (X, X_hat), (_, extra) = seen(1000), seen(70)
    return replace(of(X, X_hat), held_out=of(X[:200], X_hat[:200]), extra=Extra(X_hat=extra.float()))


CASES = [*((name, 128) for name in SCHEMES), ("4 bits", 1), ("q4_k", 1)]
AT_NIGHT = [("8 bits", 128), ("mxfp4", 128), ("q2_k", 128)]


@pytest.mark.parametrize(("name", "last"), daily_of_several(CASES, [case for case in CASES if case not in AT_NIGHT]))
def test_rows_that_are_solved_apart_have_the_bits_of_the_whole(
    name: str, last: int, generator: torch.Generator
) -> None:
    rows, scheme = 2 * CPU.strip_rows + last, SCHEMES[name]
    columns = 256 if isinstance(scheme, BlockScheme) else 128
    W = torch.randn(rows, columns, generator=generator) * 0.02
    known = moments(columns, generator)
    matrix, record = quantize_matrix(W, known, scheme)
    cuts = [slice(0, CPU.strip_rows), slice(CPU.strip_rows, 2 * CPU.strip_rows), slice(2 * CPU.strip_rows, rows)]

    def solved(some: slice) -> SolvedRows:
        inputs = LayerInput.of(known)  # of its own
        target, storage = corrected(W, inputs, scheme, some), check_rows(W, scheme, torch.float16, "matrix")
        return solve_rows(W, some, target, inputs.with_a_target(), scheme, storage=storage)

    parts = [solved(some) for some in cuts]
    both, of_both = joined(parts, LayerInput.of(known), scheme, name="matrix")
    assert both.same_as(matrix)
    assert record.correction
    assert replace(of_both, seconds=0.0) == replace(record, seconds=0.0)


def test_rows_that_share_steps_are_in_one_strip() -> None:
    for kind in BY_NAME.values():
        assert CPU.strip_rows % kind.rows == 0, kind.name  # of a CPU, and a GPU has more
