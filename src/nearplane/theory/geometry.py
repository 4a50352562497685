"""Geometry of quantizing two weights, in the plane, with the code that quantizes models; `pictures.py` draws it.

Two inputs `X` (tokens, 2) span a lattice in the plane. *Parameter space* holds weights `w` (2,), and its lattice is
Z^2; *data space* holds `B w`, where `B^T B = H = X^T X / tokens`, and squared length is the loss of a row. Steps are 1
and codes unbounded. Polygons are (corners, 2), convex and counter-clockwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from nearplane.lattice.bounds import certify, quadratic
from nearplane.lattice.factor import Order, factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane, round_to_nearest, sweep_planes

Method = Literal["optimum", "round to nearest", "nearest plane", "nearest plane, reversed"]
METHODS: tuple[Method, ...] = Method.__args__  # type: ignore[attr-defined]
ORDERS: dict[Method, Order] = {"nearest plane": "natural", "nearest plane, reversed": "reversed"}

ORDER_STARTING_WITH: tuple[Order, Order] = ("natural", "reversed")  # index: the weight that is rounded first

INPUTS = torch.tensor([[1.2, 1.6], [-1.2, -1.2], [-0.6, 0.4], [-1.6, -1.4]], dtype=torch.float64)  # correlation 0.9
WEIGHTS = torch.tensor([0.4, 0.2], dtype=torch.float64)  # rounding, nearest plane and the optimum differ here
ONE_BY_ONE = torch.ones(1, 1, dtype=torch.float64)
UNIT_GRID = Grid(scale=ONE_BY_ONE, zero=0 * ONE_BY_ONE, group=torch.zeros(2, dtype=torch.int64))


def hessian(X: Tensor) -> Tensor:
    """Return (2, 2) `X^T X / tokens`."""
    return X.T @ X / len(X)


def basis(H: Tensor) -> Tensor:
    """Return (2, 2) `B` with `B^T B = H`: column 1 lies along the first axis, column 0 above it.

    It is `diag(sqrt d) U^T` with its rows exchanged. The inputs span the same lattice, rotated in more dimensions.
    """
    factor = factorize(H, damp=0.0)
    return (factor.d.sqrt()[:, None] * factor.U.T).flip(0)


def reduced(B: Tensor) -> Tensor:
    """Return (2, 2) integer `T` such that `B T` is reduced, its shorter vector last (Lagrange; LLL in two dimensions).

    A basis (v, u) is reduced if `|u| <= |v|` and `|<u, v>| <= |u|^2 / 2`.
    """
    T = torch.eye(2, dtype=B.dtype)
    while True:
        lengths = (B @ T).square().sum(0)
        if lengths[0] < lengths[1]:
            T = T.flip(1)
        v, u = (B @ T).unbind(1)
        multiple = (v @ u / (u @ u)).round()
        if multiple == 0:
            return T.to(torch.int64)
        T[:, 0] -= multiple * T[:, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One row swept by nearest plane, in parameter space.

    Args:
        first, last: Column that is rounded first, and the one rounded last.
        codes: (2,) int32 codes.
        path: (3, 2) the weights; the point on the nearest plane after the first step, with the other weight adjusted;
            and the codes.
        loss: Squared length of the error in data space.
    """

    first: int
    last: int
    codes: Tensor
    path: Tensor
    loss: float


def sweep(w: Tensor, H: Tensor, order: Order = "natural") -> Sweep:
    """Round `w` (2,) by nearest plane and return its steps."""
    factor = factorize(H, order, damp=0.0)
    matrix = nearest_plane(w[None], UNIT_GRID, factor)
    values = matrix.decode()[0]  # (2,)
    first, last = factor.order.tolist()
    interim = values.clone()
    interim[last] = w[last] + (w[first] - values[first]) * factor.U[0, 1]
    path = torch.stack([w, interim, values])
    loss = float(quadratic((w - values)[None], H))
    return Sweep(first=first, last=last, codes=matrix.codes[0], path=path, loss=loss)


def gptq_first(w: Tensor, H: Tensor) -> tuple[int, Tensor]:
    """Return the code of weight 0 and (2,) the weights after GPTQ's first step: `w - e / [H^-1]_00 H^-1 [:, 0]`."""
    inverse = torch.linalg.inv(H)
    code = w[0].round()
    return int(code), w - (w[0] - code) / inverse[0, 0] * inverse[:, 0]


def plane_distances(w: Tensor, H: Tensor) -> Tensor:
    """Return (2,) distances in data space from `w` to the nearest plane `w_j = integer` of each weight.

    OBQ chooses the smallest `|round(w_j) - w_j| / sqrt([H^-1]_jj)` (Chen, Hoefler, Alistarh 2025, Corollary 4).
    """
    return (w.round() - w).abs().div(torch.linalg.inv(H).diagonal().sqrt())


def greedy(w: Tensor, H: Tensor) -> Sweep:
    """Round first the weight with the smallest distance to its nearest plane, as OBQ does."""
    return sweep(w, H, ORDER_STARTING_WITH[int(plane_distances(w, H).argmin())])


def solve(W: Tensor, H: Tensor, method: Method) -> Tensor:
    """Return (out, 2) integers for the rows of `W` (out, 2), in float64."""
    if method == "optimum":
        return closest(W, H)
    if method == "round to nearest":
        return round_to_nearest(W, UNIT_GRID).decode()
    return nearest_plane(W, UNIT_GRID, factorize(H, ORDERS[method], damp=0.0)).decode()


def closest(W: Tensor, H: Tensor) -> Tensor:
    """Return (out, 2) integers of least loss for every row, among all that may be better than nearest plane."""
    factor = factorize(H, damp=0.0)
    max_loss = factor.d.sum() / 4
    radii = [int(j) + 1 for j in (max_loss * torch.linalg.inv(H).diagonal()).sqrt() + 0.5]
    offsets = torch.tensor(list(product(*(range(-j, j + 1) for j in radii))), dtype=W.dtype)  # (candidates, 2)
    candidates = W.round()[:, None] + offsets  # (out, candidates, 2)
    E = W[:, None] - candidates
    best = ((E @ H) * E).sum(2).argmin(1)
    return candidates[torch.arange(len(W)), best]


def area(polygon: Tensor) -> float:
    """Return the area of a polygon."""
    return float(_doubled_areas(polygon).sum() / 2)


def mean_square(polygon: Tensor) -> float:
    """Return the mean squared distance from 0 over the polygon."""
    a, b = polygon, polygon.roll(-1, 0)
    return float((_doubled_areas(polygon) * (a * a + a * b + b * b).sum(1)).sum() / _doubled_areas(polygon).sum() / 6)


def _doubled_areas(polygon: Tensor) -> Tensor:
    """Return twice the areas of the triangles between 0 and every edge."""
    next_corners = polygon.roll(-1, 0)
    return polygon[:, 0] * next_corners[:, 1] - polygon[:, 1] * next_corners[:, 0]


def clip(polygon: Tensor, normal: Tensor, bound: Tensor) -> Tensor:
    """Return the part of a convex polygon where `<x, normal> <= bound` (Sutherland and Hodgman)."""
    heights = polygon @ normal - bound
    corners_kept: list[Tensor] = []
    for k, (a, b) in enumerate(zip(heights, heights.roll(-1), strict=True)):
        if a <= 0:
            corners_kept.append(polygon[k])
        if (a < 0 < b) or (b < 0 < a):
            next_corner = polygon[(k + 1) % len(polygon)]
            corners_kept.append(polygon[k] + (next_corner - polygon[k]) * a / (a - b))
    if not corners_kept:
        return polygon[:0]
    corners = torch.stack(corners_kept)
    lengths = (corners - corners.roll(-1, 0)).norm(dim=1)
    return corners[lengths > 1e-12 * polygon.abs().max()]  # shorter edges have no reliable direction


def intersection(clipped: Tensor, window: Tensor) -> Tensor:
    """Return the intersection of two convex polygons."""
    for a, b in zip(window, window.roll(-1, 0), strict=True):
        outward = torch.stack([b[1] - a[1], a[0] - b[0]])
        clipped = clip(clipped, outward, a @ outward)
    return clipped


def cell(H: Tensor, method: Method) -> Tensor:
    """Return the polygon in data space that a method rounds to 0; shifted by lattice points, it tiles the plane.

    For the optimum it is the Voronoi cell, for round to nearest the parallelogram of the basis, and for nearest plane
    the box of the Gram-Schmidt vectors, a rectangle with sides `sqrt(d_j)`.
    """
    B = basis(H)
    if method == "optimum":
        return _voronoi(B)
    if method in ORDERS:
        factor = factorize(H, ORDERS[method], damp=0.0)
        B = torch.linalg.solve_triangular(factor.U, B[:, factor.order].T, upper=True, unitriangular=True).T
    return _corners(B)


def _corners(G: Tensor) -> Tensor:
    """Return the parallelogram about 0 whose sides are the columns of `G`."""
    square = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]], dtype=G.dtype)
    polygon = square @ G.T
    return polygon if area(polygon) > 0 else polygon.flip(0)


def _voronoi(B: Tensor) -> Tensor:
    """Return the Voronoi cell of 0; in a reduced basis it is bounded by the eight neighbours of 0."""
    B = B @ reduced(B).to(B.dtype)
    polygon = _corners(8 * B)
    for z in product((-1.0, 0.0, 1.0), repeat=2):
        neighbour = B @ torch.tensor(z, dtype=B.dtype)
        if any(z):
            polygon = clip(polygon, neighbour, neighbour @ neighbour / 2)
    return polygon


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Cell of a method: the targets that are rounded to a lattice point are the cell, shifted to that point.

    Args:
        method: Method of rounding.
        cell: (corners, 2) targets in data space that are rounded to 0.
        agrees: (corners, 2) part of the cell where 0 is the closest lattice point.
        share: Share of the targets for which the method finds the optimum.
        mean, worst: Mean and largest squared error over the cell.
        measured: Mean squared error of rounding a fine grid of weights.
    """

    method: Method
    cell: Tensor
    agrees: Tensor
    share: float
    mean: float
    worst: float
    measured: float


def tiling(H: Tensor, method: Method, *, fineness: int = 64) -> Tiling:
    """Return the cell of a method; its mean error is measured on `fineness^2` rounded weights."""
    cell_of_0 = cell(H, method)
    agrees = intersection(cell_of_0, cell(H, "optimum"))
    coordinates = (torch.arange(fineness, dtype=H.dtype) + 0.5) / fineness
    W = torch.cartesian_prod(coordinates, coordinates)
    return Tiling(
        method=method,
        cell=cell_of_0,
        agrees=agrees,
        share=area(agrees) / area(cell_of_0),
        mean=mean_square(cell_of_0),
        worst=float(cell_of_0.square().sum(1).max()),
        measured=float(quadratic(W - solve(W, H, method), H).mean()),
    )


def bounds(H: Tensor, order: Order) -> tuple[float, float]:
    """Return the certificate's expected and worst squared error of a row in an order: `sum d / 12` and `sum d / 4`."""
    W = torch.zeros(1, 2, dtype=H.dtype)
    factor = factorize(H, order, damp=0.0)
    certificate = certify(W, W, sweep_planes(W, UNIT_GRID, factor), H, factor)
    assert certificate.expected is not None
    assert certificate.worst_case is not None
    return 2 * certificate.expected, 2 * certificate.worst_case  # sums over two weights; certificates hold means


def worked_example() -> tuple[Tensor, Tensor]:
    """Return weights (0.8, 0.6) and H with inverse [[1, -1], [-1, 2]]; rounding w_0 to 1 moves w_1 to 0.4."""
    return torch.tensor([0.8, 0.6], dtype=torch.float64), torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
