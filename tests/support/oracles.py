"""The papers' algorithms (Chen et al. 2025, Birnick 2025), written out plainly in float64: what the lattice code is tested against.

[C25] Chen, Hoefler, Alistarh (2507.18553); [B25] Birnick (2508.01077); [F22] Frantar et al. (2210.17323).

Letters are theirs: `W` is (c, r), its columns are the rows of a layer's weight; `X` is (n, c) with damping already
appended below it, so that the Hessian is `X^T X`; indices count from 0. Every algorithm rounds by a `Rounding` and
returns codes (c, r).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import cholesky, inv, qr

from nearplane.lattice.grid import Grid

Fit = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class Rounding:
    """ROUND of the papers: row j of `W` to its grid, clipped. Remembers what it was asked and how near to a tie it came.

    Args:
        S, Z: (c, r) step and offset of every weight.
        low, high: limits of the codes, or None.
    """

    def __init__(self, S: Tensor, Z: Tensor, low: int | None, high: int | None) -> None:
        self.S, self.Z, self.low, self.high = S.clone(), Z.clone(), low, high
        self.targets = torch.full_like(S, torch.nan)
        self.margin = torch.inf

    @classmethod
    def of(cls, grid: Grid, rows: int, order: Tensor) -> Rounding:
        """Expand a grid to one step per weight, its columns in `order`."""
        scale, zero = (part[:, grid.group[order]].expand(rows, -1).T.double() for part in (grid.scale, grid.zero))
        return cls(scale, zero, grid.low, grid.high)

    def __call__(self, j: int, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes z and values q, (r,) each, of the weights `w` in row j."""
        low = -torch.inf if self.low is None else self.low
        high = torch.inf if self.high is None else self.high
        x = w / self.S[j] + self.Z[j]
        inside = x[(x > low) & (x < high)]  # elsewhere both sides of a tie clip to the same code
        self.margin = min([self.margin, *((inside - inside.floor() - 0.5).abs()).tolist()])
        self.targets[j] = w
        z = x.round().clamp(low, high)
        return z, self.S[j] * (z - self.Z[j])


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two float64 tensors agree to 1e-12 of their norm."""
    return actual.shape == expected.shape and bool((actual - expected).norm() <= 1e-12 * expected.norm())


def damped(X: Tensor, shift: float) -> Tensor:
    """Return `[X / sqrt(tokens); sqrt(shift) I]`, whose Gram matrix is the damped Hessian ([B25])."""
    return torch.cat([X / len(X) ** 0.5, shift**0.5 * torch.eye(X.shape[1], dtype=X.dtype)])


def unit_lower(A: Tensor) -> Tensor:
    """Return the unit lower L of `A = L D L^T`."""
    L = cholesky(A)
    return L / L.diagonal()


def unit_upper(A: Tensor) -> Tensor:
    """Return the unit upper U of `A = U D U^T`."""
    return unit_lower(A.flip(0, 1)).flip(0, 1)


def ql(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q with orthonormal columns and L lower triangular with a positive diagonal, `X = Q L`."""
    Q, R = qr(X.flip(1))
    Q, L = Q.flip(1), R.flip(0, 1)
    sign = L.diagonal().sign()
    return Q * sign, sign[:, None] * L


def gptq(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[C25] Algorithm 1 = 5: GPTQ on the lower factor of the inverse Hessian, relative error."""
    L, W, codes = unit_lower(inv(X.T @ X)), W.clone(), torch.empty_like(W)
    for j in range(len(W)):
        codes[j], q = rounding(j, W[j])
        W[j:] += torch.outer(L[j:, j], q - W[j])
    return codes


def gptq_absolute(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[C25] Algorithm 6: GPTQ with the absolute error of all rows rounded so far."""
    inverse, Q, codes = inv(unit_lower(inv(X.T @ X))), W.clone(), torch.empty_like(W)
    current = W
    for j in range(len(W)):
        codes[j], Q[j] = rounding(j, current[j])
        current = W - inverse @ (Q - W)
    return codes


def gptq_back_to_front(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[C25] Algorithm 7: the same from the last row to the first, on the upper factor ("UDU") of H^-1."""
    inverse, Q, codes = inv(unit_upper(inv(X.T @ X))), W.clone(), torch.empty_like(W)
    current = W
    for j in reversed(range(len(W))):
        codes[j], Q[j] = rounding(j, current[j])
        current = W - inverse @ (Q - W)
    return codes


def babai_cholesky(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[C25] Algorithm 3 = 8: Babai's nearest plane on the transposed Cholesky factor of the Hessian, back to front."""
    return _babai_cholesky(W, X, rounding, extra=False)


def babai_cholesky_and_gptq(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[C25] F.4: Algorithm 8 with one more GPTQ update of Y after every step."""
    return _babai_cholesky(W, X, rounding, extra=True)


def _babai_cholesky(W: Tensor, X: Tensor, rounding: Rounding, *, extra: bool) -> Tensor:
    A, codes = cholesky(X.T @ X).T, torch.empty_like(W)
    U, Y = unit_upper(inv(X.T @ X)), A @ W
    for j in reversed(range(len(W))):
        omega = Y[j] / A[j, j]
        codes[j], q = rounding(j, omega)
        Y = Y - torch.outer(A[:, j], q)
        if extra:
            Y = Y + torch.outer(A @ U[:, j], q - omega)
    return codes


def gptq_data(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[B25] GPTQ on the QL factor of the data."""
    M, W, codes = inv(ql(X)[1]), W.clone(), torch.empty_like(W)
    for j in range(len(W)):
        codes[j], q = rounding(j, W[j])
        W = W + torch.outer(M[:, j] / M[j, j], q - W[j])
    return codes


def gptq_recursive(W: Tensor, X: Tensor, rounding: Rounding, *, j: int = 0, as_printed: bool = False) -> Tensor:
    """[B25] GPTQ-REC: round the first weight, drop the first column of X. As printed it divides by L_11, not M_11."""
    if len(W) == 0:
        return W
    L = ql(X)[1]
    M = inv(L)
    z, q = rounding(j, W[0])
    W = W + torch.outer(M[:, 0] / (L if as_printed else M)[0, 0], q - W[0])
    return torch.cat([z[None], gptq_recursive(W[1:], X[:, 1:], rounding, j=j + 1, as_printed=as_printed)])


def babai_data(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[B25] BABAI: the target is `X W`, in the space of the data."""
    (Q, L), T, codes = ql(X), X @ W, torch.empty_like(W)
    for j in range(len(W)):
        codes[j], q = rounding(j, Q[:, j] @ T / L[j, j])
        T = T - torch.outer(X[:, j], q)
    return codes


def babai_projected(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """[B25] BABAI-PROJ-REC: after each step the target is projected on the span of the columns that are left."""
    return _babai_projected(X @ W, X, rounding, 0)


def _babai_projected(T: Tensor, X: Tensor, rounding: Rounding, j: int) -> Tensor:
    if X.shape[1] == 0:
        return T[:0]
    Q, L = ql(X)
    z, q = rounding(j, Q[:, 0] @ T / L[0, 0])
    T = T - torch.outer(X[:, 0], q)
    T = T - torch.outer(Q[:, 0], Q[:, 0] @ T)
    return torch.cat([z[None], _babai_projected(T, X[:, 1:], rounding, j + 1)])


def gptq_lazy(W: Tensor, X: Tensor, rounding: Rounding, *, B: int = 3) -> Tensor:
    """[F22] the textbook loop: upper Cholesky of the inverse Hessian, updates lazily batched in blocks of B columns."""
    G, W, codes = cholesky(inv(X.T @ X), upper=True), W.T.clone(), torch.empty_like(W.T)
    for a in range(0, W.shape[1], B):
        b = min(a + B, W.shape[1])
        E = torch.zeros_like(W[:, a:b])
        for j in range(a, b):
            codes[:, j], q = rounding(j, W[:, j])
            E[:, j - a] = (W[:, j] - q) / G[j, j]
            W[:, j:b] -= torch.outer(E[:, j - a], G[j, j:b])
        W[:, b:] -= E @ G[a:b, b:]
    return codes.T


def least_squares(W: Tensor, X: Tensor, rounding: Rounding) -> Tensor:
    """Tutorial 1: after each rounding the rows that are left move to the exact minimiser of the error."""
    H, W, codes = X.T @ X, W.clone(), torch.empty_like(W)
    for j in range(len(W)):
        codes[j], q = rounding(j, W[j])
        W[j + 1 :] -= torch.outer(torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j]), q - W[j])
    return codes


def lagrange(W: Tensor, X: Tensor, rounding: Rounding, *, downdate: bool = True) -> Tensor:
    """Tutorial 2: the constrained minimiser (Lagrange); without the downdate right for the first row only."""
    inverse, W, codes = inv(X.T @ X), W.clone(), torch.empty_like(W)
    for j in range(len(W)):
        codes[j], q = rounding(j, W[j])
        W += torch.outer(inverse[:, j] / inverse[j, j], q - W[j])
        if downdate:
            inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


FRONT_TO_BACK = {
    "C25 1 relative error": gptq,
    "C25 6 absolute error": gptq_absolute,
    "B25 GPTQ": gptq_data,
    "B25 GPTQ-REC": gptq_recursive,
    "B25 BABAI": babai_data,
    "B25 BABAI-PROJ-REC": babai_projected,
    "F22 lazy blocks": gptq_lazy,
    "least squares": least_squares,
    "Lagrange": lagrange,
}
BACK_TO_FRONT = {
    "C25 3 Babai": babai_cholesky,
    "C25 7 UDU": gptq_back_to_front,
    "C25 F.4 Babai and GPTQ": babai_cholesky_and_gptq,
}
ALL = FRONT_TO_BACK | BACK_TO_FRONT


def run(name: str, W: Tensor, X: Tensor, grid: Grid, order: Tensor) -> tuple[Tensor, Rounding]:
    """Run one of `ALL` on a layer's weight (out, in), its first column rounded being `order[0]`.

    Returns:
        (out, in) int32 codes in the column order of `W`, and the rounding, which knows targets and the margin to a tie.
    """
    p = order if name in FRONT_TO_BACK else order.flip(0)
    rounding = Rounding.of(grid, len(W), p)
    codes = torch.empty(W.shape, dtype=torch.int32)
    codes[:, p] = ALL[name](W.T[p], X[:, p], rounding).T.int()
    return codes, rounding


def min_pivot(H: Tensor) -> tuple[Tensor, float]:
    """[C25] Algorithm 4: smallest diagonal first, the order of elimination; and the least relative gap to the next."""
    H, left, sequence, gap = H.clone(), list(range(len(H))), [], torch.inf
    while left:
        diagonal = H.diagonal()[left]
        k = left[int(diagonal.argmin())]
        if len(left) > 1:
            first, second = diagonal.sort().values[:2].tolist()
            gap = min(gap, (second - first) / second)
        H = H - torch.outer(H[:, k], H[k]) / H[k, k]
        sequence.append(k)
        left.remove(k)
    return torch.tensor(sequence), gap


def closest_vector(w: Tensor, H: Tensor, s: Tensor, within: float, limit: int = 200_000) -> float | None:
    """Return the least `(w - s z)^T H (w - s z)` over all integers z, by trying; None if over `limit`.

    Args:
        w, s: (in,), in <= 6.
        within: a value that some z reaches. No better z is outside the box `|w_j - s_j z_j| <= sqrt(within [H^-1]_jj)`.
    """
    half = (within * inv(H).diagonal()).sqrt() * (1 + 1e-9)
    first, last = ((w - half) / s).ceil(), ((w + half) / s).floor()
    if float((last - first + 1).prod()) > limit:
        return None
    box = torch.cartesian_prod(*(torch.arange(a, b + 1, dtype=w.dtype) for a, b in zip(first, last, strict=True)))
    E = w - s * box.reshape(-1, len(w))
    return float(((E @ H) * E).sum(1).min())


def absmax(w: Tensor) -> tuple[Tensor, Tensor]:
    """CMU slides: int8 codes `round(127 w / max|w|)`, and the positions that were rounded."""
    x = 127 * w / w.abs().max()
    return x.round().int(), x


def zero_point(w: Tensor) -> tuple[Tensor, Tensor]:
    """CMU slides: int8 codes with `scale = 255 / (max - min)`, `zero = -round(scale min) - 128`; what was rounded."""
    scale = 255 / (w.max() - w.min())
    x = torch.cat([scale * w, (scale * w.min())[None]])
    return (x[:-1] - x[-1].round() - 128).round().clamp(-128, 127).int(), x
