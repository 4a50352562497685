"""Gram-Schmidt profile of a layer: the lengths of its inputs in a rounding order, from their Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nearplane.lattice.factor import Order, factorize


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Squared Gram-Schmidt lengths of a layer's inputs in one rounding order.

    The product of the lengths is the same in every order: the determinant of the damped Hessian.

    Args:
        order: Rounding order of the columns.
        lengths: (in,) `d_j` in rounding order.
    """

    order: Order
    lengths: Tensor

    @property
    def trace(self) -> float:
        """Sum of all `d_j`: four times the worst case of a row with step 1."""
        return float(self.lengths.sum())

    @property
    def spread(self) -> float:
        """`1/2 log2(AM / GM)` of all `d_j`: cost of equal steps for all columns, in bits per weight."""
        return 0.5 * float(self.lengths.mean().log2() - self.lengths.log2().mean())


def profile(H: Tensor, order: Order = "activation", *, damp: float | Literal["auto"] = 0.01) -> Profile:
    """Return the Gram-Schmidt profile of a layer from its Hessian (in, in), damped as in `factorize`."""
    return Profile(order=order, lengths=factorize(H.double(), order, damp=damp).d)
