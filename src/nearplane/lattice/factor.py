"""One factorization of the Hessian, no inverse: `H[p][:, p] = U diag(d) U^T`, and the orders `p` in which columns are rounded.

`sqrt(d_j)` is the length of the j-th Gram-Schmidt vector of the layer's inputs; every bound and every loss is read off `d`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice.pivot import pivoted_order

Order = Literal["natural", "reversed", "activation", "pivoted"]
AUTO_DAMPS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """`(H + shift I)[p][:, p] = U diag(d) U^T`, everything in rounding order.

    Args:
        order: (in,) column that is rounded first, second, ...
        U: (in, in) unit upper triangular.
        d: (in,) squared Gram-Schmidt lengths, positive.
        damp: damping that was used, relative to the mean of the diagonal of H.
        shift: the same in the units of H: what was added to the diagonal.
        dead: (in,) bool in the *original* column order: inputs that were always 0.
    """

    order: Tensor
    U: Tensor
    d: Tensor
    damp: float
    shift: float
    dead: Tensor

    def solve(self, R: Tensor) -> Tensor:
        """Return (out, in) `R (H + shift I)^-1`, by two triangular solves in the dtype of the factor."""
        X = R[:, self.order].to(self.U.dtype).T  # (in, out)
        X = torch.linalg.solve_triangular(self.U, X, upper=True, unitriangular=True) / self.d[:, None]
        X = torch.linalg.solve_triangular(self.U.T, X, upper=False, unitriangular=True)
        solved = torch.empty_like(X)
        solved[self.order] = X
        return solved.T


def factorize(
    H: Tensor,
    order: Order | Tensor = "natural",
    *,
    damp: float | Literal["auto"] = 0.01,
    dtype: torch.dtype | None = None,
) -> Factor:
    """Factor `H + damp * mean(diag H) * I` in rounding order by one Cholesky decomposition.

    Args:
        H: (in, in) symmetric positive semi-definite.
        order: a name, or a permutation (in,) to use as it is.
        damp: relative damping; "auto" takes the first of 1e-4, 1e-3, ..., 1 that factors.
        dtype: of the factorization; None takes that of `H`.

    Raises:
        NumericalError: `H` is not finite, or not positive definite with this damping; names column and pivot.

    Equal to the three factorizations of GPTQ (Cholesky, inverse, Cholesky) at a quarter of the work.
    """
    if not bool(torch.isfinite(H).all()):
        raise NumericalError("The Hessian holds NaN or Inf: the calibration inputs of this layer are not finite.")
    H = H.to(dtype or H.dtype)
    diagonal = H.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.mean())
    for candidate in AUTO_DAMPS if damp == "auto" else (float(damp),):
        shift = candidate * mean
        damped = H.clone()
        damped.diagonal().add_(shift).masked_fill_(dead & (shift == 0), 1)  # any length does: nothing hangs on it
        p, flipped = _permuted(damped, order)
        L, info = torch.linalg.cholesky_ex(flipped)
        if int(info) == 0 and bool((L.diagonal() > 0).all()):
            U = L.flip(0, 1)
            lengths = U.diagonal().clone()
            return Factor(
                order=p, U=U.div_(lengths).contiguous(), d=lengths.square(), damp=candidate, shift=shift, dead=dead
            )
        failed = len(p) - int(info) if int(info) else len(p) - 1 - int((~(L.diagonal() > 0)).nonzero()[0])
    raise NumericalError(
        f"The Hessian is not positive definite: the pivot of column {int(p[failed])} is not positive with damping {damp}. "
        "Use more calibration tokens, a larger --damp, or --damp auto."
    )


def _permuted(H: Tensor, order: Order | Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounding order and `H` permuted by it and flipped in both axes, ready for a lower Cholesky."""
    p = order.to(H.device) if isinstance(order, Tensor) else rounding_order(H, order)
    back = p.flip(0)
    return p, H[back][:, back]


def rounding_order(H: Tensor, order: Order) -> Tensor:
    """Return the permutation (in,) of a named order: `p[0]` is rounded first.

    natural: 0, 1, ...; activation: descending diagonal of `H` ("act-order"); pivoted: the smallest remaining Schur complement
    is eliminated first and rounded last (Chen, Hoefler, Alistarh 2025, Algorithm 4).
    """
    n = len(H)
    match order:
        case "natural":
            return torch.arange(n, device=H.device)
        case "reversed":
            return torch.arange(n - 1, -1, -1, device=H.device)
        case "activation":
            return torch.argsort(H.diagonal(), descending=True, stable=True)
        case "pivoted":
            return pivoted_order(H)
