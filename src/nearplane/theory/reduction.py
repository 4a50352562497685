"""LLL reduction of a layer's lattice, and nearest-plane rounding in the reduced basis; for study, on unclipped grids.

The lattice is spanned by the columns of `X diag(s)`. Rows of a matrix share a reduction if their steps are parallel:
one step per matrix or per column is possible, one per group and row is not. The codes are integers of the *original*
basis, so stored codes keep their meaning. The Gram-Schmidt length of a basis vector is that of its part orthogonal to
the vectors *after* it in rounding order: LLL's first vector is rounded last, so the kernels work on the mirror image of
`Factor`, a lower triangle `L` whose rows are the basis.

Floating point: windows of the triangle are reduced separately with rotations, the other entries follow by matrix
products, and the result is factored anew from the exact integers and checked against the definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.errors import NumericalError
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.solvers import nearest_plane

Floats = npt.NDArray[np.float64]

MAX_EXACT_INTEGER = 2.0**52  # float64 combines integers up to this without rounding
REDUCED_TOLERANCE = 1e-7  # allowed excess of |mu| over 1/2, and deficit below delta, after a new factorization
MAX_REFRESHES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A reduced basis of a layer's lattice: `T^T diag(s) (H + shift I) diag(s) T = U diag(d) U^T`.

    Args:
        factor: Factor of the reduced basis in its own rounding order (`factor.order` is 0, 1, ...); `d` is the reduced
            profile, including steps.
        T: (in, in) int64, unimodular: column j holds the original coordinates of the basis vector that is rounded j-th.
        inverse: (in, in) int64 inverse of `T`, exact.
        step: (in,) `s`, the step of every original column, up to a common factor.
        before: (in,) profile of the original basis, `d_j s_j^2` in the rounding order of its factor.
    """

    factor: Factor
    T: Tensor
    inverse: Tensor
    step: Tensor
    before: Tensor


def reduce(factor: Factor, *, step: Tensor | None = None, delta: float = 0.75, window: int = 64) -> Reduced:
    """Reduce the basis `X diag(s)` of a factor by the algorithm of Lenstra, Lenstra and Lovasz.

        |U_ij| <= 1/2 for i < j ;  d_{j-1} >= (delta - U_{j-1,j}^2) d_j

    Args:
        factor: Factor of the damped Hessian on the CPU, in the initial order of the reduction.
        step: (in,) step of every column; None: the same step for all.
        delta: Constant of Lovasz' condition, in (1/4, 1).
        window: Number of basis vectors reduced together; with `in` or more this is the textbook algorithm.

    Raises:
        NumericalError: float64 cannot represent the lattice (its transformation or its determinant), or the algorithm
            does not converge.

    Lenstra, Lenstra, Lovasz (1982); delta 3/4 as in Chen, Hoefler, Alistarh (2025), Algorithm 2. In blocks after Koy
    and Schnorr (2001). A sweep over the windows costs about `in^3` multiplications.
    """
    if not 0.25 < delta < 1:
        raise NumericalError(f"delta is {delta}; the algorithm of Lenstra, Lenstra and Lovasz needs 1/4 < delta < 1.")
    d, n = factor.d.double(), len(factor.d)
    s = torch.ones_like(d) if step is None else step.to(d)
    if not (bool(torch.isfinite(factor.U).all()) and bool((d > 0).all()) and bool((s > 0).all())):
        raise NumericalError("A Gram-Schmidt length or a step is not positive, or the factor is not finite.")
    before = d * s[factor.order].square()
    unit = float(before.log().mean().mul(0.5).exp())
    rows = s[factor.order, None] * factor.U.double() * (d.sqrt() / unit)  # (in, in), upper triangular
    start: Floats = rows.flip(0, 1).contiguous().numpy()  # lower triangular: LLL's first vector is rounded last
    V = np.eye(n)
    L = start.copy()
    for _ in range(MAX_REFRESHES):
        _sweeps(L, V, delta, min(window, n))
        L = _lower(V @ start)
        drift = abs(float(np.log(L.diagonal()).mean()))  # 0 in exact arithmetic: the unit is the geometric mean
        if not drift < REDUCED_TOLERANCE:
            raise _precision_error(f"the geometric mean of its lengths moved by a factor of 1 + {drift:.2g}")
        if is_reduced(torch.from_numpy(L), delta):
            break
    else:
        raise _precision_error(f"the basis is not reduced after {MAX_REFRESHES} refreshed factorizations")
    R = torch.from_numpy(L).flip(0, 1)
    T = torch.empty(n, n, dtype=torch.int64)
    T[factor.order] = torch.from_numpy(V).flip(0, 1).T.to(torch.int64)
    lengths = R.diagonal()
    return Reduced(
        factor=Factor(
            order=torch.arange(n),
            U=R / lengths,
            d=(lengths * unit).square(),
            damp=factor.damp,
            shift=factor.shift,
            dead=torch.zeros(n, dtype=torch.bool),
        ),
        T=T,
        inverse=_inverse(T),
        step=s,
        before=before,
    )


def nearest_plane_reduced(W: Tensor, grid: Grid, reduced: Reduced) -> QuantizedMatrix:
    """Round each row of `W` (out, in) to the lattice of an unclipped `grid` by Babai's algorithm in a reduced basis.

        u = W / s + zero ;  z = T^-1 u ;  codes = T nearest_plane(z)

    The damped loss of a row is at most `1/4 sum_j d_j` of `reduced.factor`, times the square of the row's step over
    `reduced.step`.

    Returns:
        (out, in) int32 codes of the original basis, on the same grid.

    Raises:
        NumericalError: The grid clips, its steps are not parallel to those of the reduction, or codes do not fit 32
            bits.
    """
    if grid.low is not None or grid.high is not None:
        raise NumericalError("A reduced basis mixes columns, so codes cannot be clipped. Use a grid without limits.")
    steps = grid.steps().double()  # (out or 1, in)
    ratio = steps / reduced.step
    if not bool(((ratio / ratio[:, :1] - 1).abs() < 1e-6).all()):
        raise NumericalError(
            "The steps of the grid are not parallel to those of the reduction. Reduce with the grid's steps."
        )
    z = (W.double() / steps + grid.columns(slice(None))[1].double()) @ reduced.inverse.T.double()
    if not bool(z.abs().amax() < 2**31):
        raise NumericalError(
            "A weight is not finite, or its coordinates in the reduced basis exceed 32 bits. Use larger steps."
        )
    one = torch.ones(1, 1, dtype=torch.float64)
    unit = Grid(scale=one, zero=torch.zeros_like(one), group=torch.zeros(len(reduced.T), dtype=torch.int64))
    codes = nearest_plane(z, unit, reduced.factor).codes.long() @ reduced.T.T
    if not bool(codes.abs().amax() < 2**31):
        raise NumericalError("A code does not fit 32 bits. Use larger steps.")
    return QuantizedMatrix(codes=codes.to(torch.int32), grid=grid)


def is_reduced(L: Tensor, delta: float) -> bool:
    """Return whether the rows of the lower triangle `L` are a reduced basis, with LLL's first vector in the first row.

    mu_ki = L_ki / L_ii :  |mu_ki| <= 1/2 for i < k ;  L_kk^2 >= (delta - mu_{k,k-1}^2) L_{k-1,k-1}^2
    """
    lengths = L.diagonal().square()
    mu = (L / L.diagonal()).tril(-1)
    lovasz = lengths[1:] / lengths[:-1] + mu.diagonal(-1).square() >= delta - REDUCED_TOLERANCE
    return bool((mu.abs() <= 0.5 + REDUCED_TOLERANCE).all()) and bool(lovasz.all())


def _sweeps(L: Floats, V: Floats, delta: float, window: int) -> None:
    """Sweep windows up and down the triangle until no two vectors change places; update `L` and `V` in place."""
    n = len(L)
    starts = list(range(0, max(n - window, 0) + 1, max(window // 2, 1)))
    if starts[-1] + window < n:
        starts.append(n - window)
    potential = _potential(L)
    while True:
        _size_reduce(L, V, 1, n)
        swaps = sum(_reduce_window(L, V, a, min(a + window, n), delta) for a in starts)
        if swaps == 0:
            return
        decrease, potential = potential - _potential(L), _potential(L)
        if not decrease >= 0.99 * swaps * abs(math.log(delta)):  # each divides a determinant by 1 / delta or more
            raise _precision_error(f"{swaps} exchanges lowered the potential by {decrease:.3g} and may never end")
        starts.reverse()


def _reduce_window(L: Floats, V: Floats, a: int, b: int, delta: float) -> int:
    """Reduce the projected vectors `a` to `b`, update the other entries, and return the number of exchanges."""
    part = L[a:b, a:b].copy()
    transform, rotation = np.eye(b - a), np.eye(b - a)
    swaps = int(_textbook(part, transform, rotation, delta))
    if swaps < 0 or np.abs(transform).sum(1).max() * np.abs(V[a:b]).max() > MAX_EXACT_INTEGER:
        raise _precision_error("an integer of the transformation is above 2^52")
    if swaps == 0:
        return 0
    L[a:b, a:b] = part
    L[a:b, :a] = transform @ L[a:b, :a]
    L[b:, a:b] = L[b:, a:b] @ rotation
    V[a:b] = transform @ V[a:b]
    _size_reduce(L, V, a, b)  # before integers grow
    return swaps


def _size_reduce(L: Floats, V: Floats, a: int, b: int) -> None:
    """Make |mu_ki| <= 1/2 for all i < k in the rows from `a` to `b`."""
    if not all(_size_reduce_row(L, V, k) for k in range(a, b)):
        raise _precision_error("a vector cannot be size-reduced, or an integer of the transformation is above 2^52")


@compiled(error_model="numpy")
def _subtract(L: Floats, V: Floats, k: int, i: int) -> float:
    """Subtract a multiple of row `i` from row `k` so that |mu_ki| <= 1/2; return the largest new integer, or 0."""
    c = np.rint(L[k, i] / L[i, i])
    if c == 0:
        return 0.0
    for j in range(i + 1):
        L[k, j] -= c * L[i, j]
    largest = 1.0
    for j in range(V.shape[1]):
        V[k, j] -= c * V[i, j]
        largest = max(largest, abs(V[k, j]))
    return largest if np.isfinite(c) else np.inf


@compiled(error_model="numpy")
def _size_reduce_row(L: Floats, V: Floats, k: int) -> bool:
    """Make |mu_ki| <= 1/2 for all i < k; return False if this does not end or integers grow too large."""
    for _ in range(100):
        changed = False
        for i in range(k - 1, -1, -1):
            largest = _subtract(L, V, k, i)
            if not largest < MAX_EXACT_INTEGER:
                return False
            changed |= largest > 0
        if not changed:
            return True
    return False


@compiled(error_model="numpy")
def _textbook(L: Floats, V: Floats, Q: Floats, delta: float) -> int:
    """Reduce the rows of `L` in place; return the number of exchanges, or -1 if integers grow too large.

    The result is `V L Q` of the old `L`. A row is reduced against its neighbour, tested, then reduced against the
    others: the exchanges are those of the textbook. Each is followed by a rotation back to a triangle. The limit is
    1000 `in^2`.
    """
    n = L.shape[0]
    swaps, k = 0, 1
    while k < n and swaps < 1000 * n * n:
        if not _subtract(L, V, k, k - 1) < MAX_EXACT_INTEGER:
            return -1
        if L[k, k] * L[k, k] + L[k, k - 1] * L[k, k - 1] >= delta * L[k - 1, k - 1] * L[k - 1, k - 1]:
            if not _size_reduce_row(L, V, k):
                return -1
            k += 1
            continue
        for j in range(n):
            L[k, j], L[k - 1, j] = L[k - 1, j], L[k, j]
            V[k, j], V[k - 1, j] = V[k - 1, j], V[k, j]
        length = math.hypot(L[k - 1, k - 1], L[k - 1, k])
        cosine, sine = L[k - 1, k - 1] / length, L[k - 1, k] / length
        sign = 1.0 if cosine * L[k, k] > sine * L[k, k - 1] else -1.0  # diagonals stay positive
        _rotate(L[k - 1 :], k, cosine, sine, sign)
        _rotate(Q, k, cosine, sine, sign)
        L[k - 1, k] = 0.0
        swaps += 1
        k = max(k - 1, 1)
    return swaps


@compiled(error_model="numpy")
def _rotate(A: Floats, k: int, cosine: float, sine: float, sign: float) -> None:
    """Rotate columns k-1 and k of `A`."""
    for r in range(A.shape[0]):
        x, y = A[r, k - 1], A[r, k]
        A[r, k - 1] = cosine * x + sine * y
        A[r, k] = sign * (cosine * y - sine * x)


def _lower(basis: Floats) -> Floats:
    """Return the lower triangle with a positive diagonal whose rows are a rotation of those of `basis`."""
    L: Floats = torch.linalg.qr(torch.from_numpy(basis).T, mode="r").R.T.numpy()
    return np.ascontiguousarray(L * np.sign(L.diagonal()))


def _potential(L: Floats) -> float:
    """Return the logarithm of the product of the squared determinants of the first 1, 2, ... vectors."""
    return float(2 * (np.log(L.diagonal()) * np.arange(len(L), 0, -1)).sum())


def _inverse(T: Tensor) -> Tensor:
    """Return the exact int64 inverse of a unimodular matrix; its existence proves that the determinant is 1 or -1."""
    one = torch.eye(len(T), dtype=torch.int64)
    guess: Tensor = torch.linalg.inv(T.double())
    inverse: Tensor = guess.round().to(torch.int64)
    for _ in range(5):
        if float((T.double().abs() @ inverse.double().abs()).amax()) > MAX_EXACT_INTEGER:
            break
        residual = one - T @ inverse
        if not bool(residual.any()):
            return inverse
        inverse = inverse + (guess @ residual.double()).round().to(torch.int64)
    raise _precision_error("the inverse of the transformation is not made of integers")


def _precision_error(reason: str) -> NumericalError:
    return NumericalError(
        f"The lattice cannot be reduced in float64: {reason}. It is nearly singular; use a larger --damp, or steps "
        "that differ less."
    )
