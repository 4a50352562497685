"""Targets that are shrunken for the noise of their rounding, as receivers with decision feedback do: what they would be worth."""

from __future__ import annotations

from torch import Tensor

from nearplane.lattice.factor import Factor


def shrunken(T: Tensor, factor: Factor, mu: float) -> Tensor:
    """Return (out, in) `T H_l (H_l + mu I)^-1`: the target with the least mean error once rounding noise is added to it.

    Rounding to steps `c / sqrt(d_j)` adds noise `c^2 / 12` to every plane; with `mu = c^2 / (12 mean(T^2))` what is rounded is the
    minimum-mean-square-error estimate, as in a receiver with decision feedback. Worth 0.1 to 0.2 bit near 1 bit per weight.

    Args:
        T: (out, in) target of the lattice problem.
        factor: of `H_l + mu I`, `H_l` the Hessian as damped before.
        mu: what was added.
    """
    return T if mu == 0 else T - mu * factor.solve(T.to(factor.U.dtype)).to(T.dtype)
