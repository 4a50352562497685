"""The solvers: what rounds a matrix to a grid. Adding one is a function and a line of the table below.

Knows what each needs and promises; not how it works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nearplane.lattice.beam import k_best
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid
from nearplane.lattice.solve import Solution, round_to_nearest, sweep_planes


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a solver is given.

    Args:
        W: (out, in) what is to be rounded, float32 or float64.
        grid: to round to.
        factor: of `H + shift I`, in rounding order.
        H: (in, in) the Hessian.
        shift: what damping added to its diagonal.
        beam: candidates of every row, for solvers that keep several.
    """

    W: Tensor
    grid: Grid
    factor: Factor
    H: Tensor
    shift: float
    beam: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """One way to round.

    Args:
        round: from the problem to codes on its grid, and what was swept, see `Solution`.
        bounded: whether it begins with the codes of `nearest_plane` and never loses more, so that Babai's bounds hold.
        needs_inputs: whether it looks at the Hessian or its factor.
    """

    round: Callable[[Problem], Solution]
    bounded: bool
    needs_inputs: bool = True


SOLVERS: Mapping[str | None, Solver] = {
    "nearest-plane": Solver(round=lambda p: sweep_planes(p.W, p.grid, p.factor), bounded=True),
    "round-to-nearest": Solver(
        round=lambda p: Solution(matrix=round_to_nearest(p.W, p.grid)), bounded=False, needs_inputs=False
    ),
    "k-best": Solver(round=lambda p: Solution(matrix=k_best(p.W, p.grid, p.factor, beam=p.beam)), bounded=True),
}
