"""Random problems for the Triton kernels that know no layer; `interpreted_problems.py` runs them.

A result says how far it is from the arithmetic that `kernels_torch.py` states, in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearplane.lattice import kernels_torch, kernels_triton
from nearplane.lattice.grid import Codebook
from nearplane.lattice.kernels_torch import Columns, Tally
from nearplane.number_formats import E2M1
from pretended_triton import interpreted

NEAR = 1e-5  # steps from a boundary between two codes, within which either is right
BOOKS = {
    "4 bits": Codebook(low=0, high=15),
    "symmetric": Codebook(low=-4, high=3),
    "2 bits": Codebook(low=0, high=3),
    "unbounded": Codebook(),
    "E2M1": Codebook(low=0, high=len(E2M1) - 1, levels=torch.tensor(E2M1, dtype=torch.float64)),
    "200 levels": Codebook(low=0, high=199, levels=torch.linspace(-1, 1, 200, dtype=torch.float64).pow(3)),
}
STEPS = {"usual": 0.2, "huge": 2.0**24, "tiny": 2.0**-24}


def problem(seed: int) -> dict[str, Any]:
    """Return the sizes and kinds of a problem."""
    draw = torch.Generator().manual_seed(seed)

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    return {
        "seed": seed, "book": list(BOOKS)[seed % len(BOOKS)], "step": of("usual", "usual", "huge", "tiny"),
        "dtype": of("float32", "float32", "float64"), "rows": of(1, 7, 33, 40), "columns": of(1, 5, 8, 13),
        "groups": of(1, 2), "dead": of(False, True), "moves": of(False, True), "shared": of(False, True),
    }  # fmt: skip


def swept(asked: dict[str, Any]) -> dict[str, Any]:
    """Sweep a block of columns; return errors of codes (distance from a boundary), of E, of the loss, and of the counts."""
    draw, dtype = torch.Generator().manual_seed(asked["seed"]), getattr(torch, asked["dtype"])
    b, out, book, step = asked["columns"], asked["rows"], BOOKS[asked["book"]], STEPS[asked["step"]]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    scale = (step * (1 + normal(asked["groups"], out).abs())).to(dtype)
    zero = torch.zeros_like(scale) if book.levels is not None else normal(*scale.shape).mul(2).round()
    group = torch.arange(b) * asked["groups"] // b
    W, target = 4 * step * normal(b, out), 4 * step * normal(b, out)
    U, d = (0.3 * normal(b, b)).triu(1) + torch.eye(b, dtype=dtype), normal(b).abs()
    if asked["dead"]:
        d[0] = 0
    used, E = target.clone(), torch.empty_like(W)
    codes = used.view(torch.int32)[:, :out] if asked["shared"] else torch.empty(b, out, dtype=torch.int32)
    loss, outside = torch.zeros(out, dtype=dtype), torch.zeros(0 if asked["moves"] else out, dtype=torch.int32)
    columns = Columns(W, scale, zero, group, book)
    kernels_triton.sweep_block(used, columns, U, codes, E, Tally(d, loss, outside, asked["moves"]))
    exact = W - scale[group] * (book.position(codes, dtype) - zero[group])
    wide = target.double() + (U.double() - torch.eye(b)).T @ E.double()
    position = wide / scale[group].double() + zero[group].double()
    nearest = book.nearest(position)
    moved = (nearest - codes).abs()
    boundary = (book.position(nearest) + book.position(codes, torch.float64)) / 2
    residual, before = wide - W.double() + E.double(), wide - W.double()
    true = (d.double()[:, None] * (residual.square() - (before.square() if asked["moves"] else 0))).sum(0)
    size = (d.double()[:, None] * (residual.square() + before.square())).sum(0).max().clamp(min=1e-300)
    counted = book.outside(position).sum(0)
    low, high = book.limits
    doubtful = ((position - low).abs() < NEAR) | ((position - high).abs() < NEAR)
    twin = torch.empty_like(codes)
    other = Tally(d, torch.zeros_like(loss), torch.zeros_like(outside), asked["moves"])
    kernels_torch.sweep_block(target.clone(), columns, U, twin, torch.empty_like(E), other)
    return {
        "wrong_values": int((exact != E).sum()),
        "off_boundary": float((torch.where(moved > 0, (position - boundary).abs(), 0)).max()),
        "far": int((moved > 1).sum()),
        "loss": float((loss - true).abs().max() / size),
        "miscounted": 0 if asked["moves"] else int(((outside - counted).abs() > doubtful.sum(0)).sum()),
        "unlike_torch": int((twin != codes).sum()),
    }


def searched(asked: dict[str, Any]) -> dict[str, Any]:
    """Search steps; return how much larger the error of the chosen candidate is than the least one."""
    draw, dtype = torch.Generator().manual_seed(asked["seed"] + 1), getattr(torch, asked["dtype"])
    book, step = BOOKS[asked["book"]], STEPS[asked["step"]]
    n, size, candidates = asked["rows"], 16 * asked["columns"], 3
    weights = (4 * step * torch.randn(n, size, generator=draw, dtype=torch.float64)).to(dtype)
    scale = (step * (0.5 + torch.rand(candidates, n, generator=draw, dtype=torch.float64))).to(dtype)
    zero = torch.zeros_like(scale) if book.levels is not None else torch.full_like(scale, 3)
    best = kernels_triton.best_candidate(weights, scale, zero, book)
    errors = []
    for s, z in zip(scale[:, :, None].double(), zero[:, :, None].double(), strict=True):
        codes = book.nearest(weights.double() / s + z)
        errors.append((weights.double() / s - (book.position(codes) - z)).abs().pow(2.5).sum(1) * s[:, 0].pow(2.5))
    error = torch.stack(errors)
    return {"excess": float((error.gather(0, best[None])[0] / error.amin(0) - 1).max())}


def added(asked: dict[str, Any]) -> dict[str, Any]:
    """Add a product to integers in views of larger matrices; return how many differ from those of the torch form."""
    draw, shape = torch.Generator().manual_seed(asked["seed"] + 2), (asked["rows"], 40 * asked["columns"])
    product = torch.randn(*shape, generator=draw, dtype=torch.float64).to(getattr(torch, asked["dtype"]))
    product *= torch.exp2(torch.randint(-60, 38, shape, generator=draw))
    wide = torch.randint(-(2**60), 2**60, (2, shape[0] + 3, shape[1] + 5), generator=draw)
    found, unit = wide.clone(), torch.tensor([2.0**20]).double()
    peaks = [
        add(product, sums[0, 3:, 2:-3], sums[1, :-3, 5:], unit)
        for add, sums in ((kernels_triton.add_exactly, found), (kernels_torch.add_exactly, wide))
    ]
    return {"unlike_sums": int((found != wide).sum()) + int(peaks[0] != peaks[1])}


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Sweep, search and add by the interpreter."""
    with interpreted():
        return swept(asked) | searched(asked) | added(asked)
