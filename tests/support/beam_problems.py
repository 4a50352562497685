"""Random problems for the beam in Triton, whose survivors are compared with those of `kernels_torch.py` in float64.

`interpreted_problems.py` runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearplane.lattice import beam_triton, kernels_torch
from nearplane.lattice.grid import Codebook, Weights
from triton_problems import BOOKS, STEPS

NEAR = 1e-5  # steps from a boundary between two codes, or part of a cost, within which rounding errors may decide


def problem(seed: int) -> dict[str, Any]:
    """Return the sizes and kinds of a problem."""
    draw = torch.Generator().manual_seed(seed)

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    wide = seed % 20 == 0  # several tiles, between which errors are fed forward in products
    return {
        "seed": seed, "book": list(BOOKS)[seed % len(BOOKS)], "step": of("usual", "usual", "huge", "tiny"),
        "dtype": of("float32", "float32", "float64"), "rows": of(1, 7, 33), "beam": of(1, 2, 3, 4),
        "columns": of(18, 37) if wide else of(1, 2, 5), "dead": of(False, True), "started": of(False, True),
    }  # fmt: skip


def doubtful(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> Tensor:
    """Return (out,) whether rounding errors may decide something of a row, by trying all codes near each target."""
    found = torch.zeros(len(target), dtype=torch.bool)
    survivors = kernels_torch._survivors

    def watched(t: Tensor, nearest: Tensor, column: Weights, side: Tensor, length: Tensor, cost: Tensor) -> Any:
        beam = t.shape[1]
        _, s, z, book = column
        codes = nearest[:, :, None] + torch.arange(-beam, beam + 2)
        residual = t[:, :, None] - s[:, :, None] * (book.position(codes) - z[:, :, None])
        total = cost[:, :, None] + length * residual.square()
        low, high = (-torch.inf if book.low is None else book.low), (torch.inf if book.high is None else book.high)
        total.masked_fill_((codes < low) | (codes > high), torch.inf)
        position = (t / s + z)[:, :, None]
        halves = (book.position(codes[:, :, 1:]) + book.position(codes[:, :, :-1])) / 2
        found.logical_or_(((position - halves).abs() < NEAR).flatten(1).any(1))
        result = survivors(t, nearest, column, side, length, cost)
        for place in range(beam) if length > 0 else ():
            taken = codes == result[0][:, place, None, None]
            taken &= (torch.arange(beam) == result[1][:, place, None])[:, :, None]
            if place:
                two = total[:, : place + 1].flatten(1).topk(2, largest=False).values
                near = two[:, 1] - two[:, 0] <= NEAR * torch.maximum(two[:, 1], length * s[:, 0].square())
                found.logical_or_(near & torch.isfinite(two[:, 1]))
            total.masked_fill_(taken, torch.inf)
        return result

    kernels_torch._survivors = watched
    try:
        kernels_torch.beam_paths(target, weights, U, d, cost.clone())
    finally:
        kernels_torch._survivors = survivors
    return found


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Sweep a block of columns; return how many rows differ from the torch form, and errors of E and of costs."""
    draw, dtype = torch.Generator().manual_seed(asked["seed"]), getattr(torch, asked["dtype"])
    n, out, beam, step = asked["columns"], asked["rows"], asked["beam"], STEPS[asked["step"]]
    book: Codebook = BOOKS[asked["book"]]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    scale = (step * (1 + normal(out, n).abs())).to(dtype)
    zero = torch.zeros_like(scale) if book.levels is not None else normal(out, n).mul(2).round()
    weights = Weights(4 * step * normal(out, n), scale, zero, book)
    target = weights.W[:, None] + 0 * normal(out, beam, n)
    U, d = (0.3 / n**0.5 * normal(n, n)).triu(1) + torch.eye(n, dtype=dtype), normal(n).abs()
    if asked["dead"]:
        d[n // 2] = 0
    cost = torch.full((out, beam), torch.inf, dtype=dtype)
    cost[:, 0] = 0
    if asked["started"]:  # as after an earlier block
        cost = step**2 * normal(out, beam).abs()
        target += step * normal(out, beam, n)
    given = target.clone(), Weights(*weights[:3], book), U, d
    wide = target.double(), Weights(*(part.double() for part in weights[:3]), book), U.double(), d.double()
    found, expected = cost.clone(), cost.double().clone()
    codes, E, ancestor = beam_triton.beam_paths(*given, found)
    twin, _, places = kernels_torch.beam_paths(*wide, expected)
    differ = (twin != codes).flatten(1).any(1) | (places != ancestor).any(1)
    excused = doubtful(*wide, cost.double())
    real = found < torch.inf
    t = wide[0].gather(1, ancestor[:, :, None].expand(-1, -1, n)) + E.double() @ (wide[2] - torch.eye(n))
    parts = (d.double() * (t - wide[1].W[:, None] + E.double()).square()).sum(2)  # squared distances from the values
    loss = cost.double().gather(1, ancestor) + parts
    size = (loss + (d.double() * wide[1].scale.square()).sum(1, keepdim=True)).clamp(min=1e-300)
    exact = kernels_torch.errors(weights, codes)
    return {
        "wrong_values": int((exact != E).sum()),
        "unlike_torch": int(differ.sum()),
        "unexcused": int((differ & ~excused).sum()),
        "excused": int(excused.sum()),
        "missing": int((real != (expected < torch.inf))[~excused].sum()),
        "loss": float(((loss - found.double()) / size).abs()[real].max()),
        "targets_written": int((given[0] != target).sum()),
    }
