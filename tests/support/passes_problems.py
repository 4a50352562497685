"""Random problems for whole passes in Triton, started from a pretended GPU; `interpreted_problems.py` runs them.

Each problem is a nearest-plane sweep and a descent of a few passes, called as a run calls them. Their results are compared
with the formulas in float64, decision by decision, and with the torch forms on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nearplane.lattice import kernels, passes_triton, polish, solvers
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.kernels_torch import Columns, Rounding, Spans, State, Tally
from nearplane.lattice.octaves import OctaveFit
from nearplane.lattice.polish import Fit, PlainFit
from nearplane.lattice.shared_grid import E4M3, SharedFit, SharedGrid
from pretended import Pretend, pretended
from pretended_triton import interpreted
from triton_problems import BOOKS, NEAR, STEPS

FITS = ("none", "float16", "bfloat16", "float32", "E4M3", "octaves", "octaves")
SWEEPS = 2


def problem(seed: int) -> dict[str, Any]:
    """Return the sizes and kinds of a problem."""
    draw = torch.Generator().manual_seed(seed + 1000)

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    fit = FITS[seed % len(FITS)]
    sizes = (1, 3, 4) if fit == "octaves" else (1, 3, 4, 13)  # such groups are tiles
    return {
        "seed": seed, "book": list(BOOKS)[seed % len(BOOKS)], "fit": fit,
        "step": of("usual", "usual", "huge", "tiny"), "dtype": of("float32", "float32", "float64"),
        "rows": of(1, 5, 9), "columns": of(1, 4, 7, 13), "size": of(*sizes), "mixed": of(False, True),
        "dead": of(False, True),
    }  # fmt: skip


class Case:
    """The tensors of a problem, on the CPU."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.draw, self.dtype = torch.Generator().manual_seed(asked["seed"]), getattr(torch, asked["dtype"])
        n, out, book = asked["columns"], asked["rows"], BOOKS[asked["book"]]
        X = self.normal(3 * n, n) @ (torch.eye(n, dtype=torch.float64) + 0.3 * self.normal(n, n))
        if asked["dead"]:
            X[:, 0] = 0
        self.H = X.T @ X / len(X)
        self.grid, self.fit = self.of_kind(asked, -(-n // asked["size"]))
        if asked["mixed"]:  # groups are not neighbours
            self.grid = replace(self.grid, group=self.grid.group[torch.randperm(n, generator=self.draw)])
        step = self.grid.scale.mean().double()
        self.W = (4 * step * self.normal(out, n)).to(self.dtype)
        low, high = (-8 if book.low is None else book.low), (8 if book.high is None else book.high)
        shape = (out, n)
        self.codes = torch.randint(low, high + 1, shape, generator=self.draw, dtype=torch.int32)
        order = torch.randperm(n, generator=self.draw)
        U = (0.3 * self.normal(n, n)).triu(1) + torch.eye(n, dtype=torch.float64)
        self.factor = Factor(
            order=order, U=U, d=self.normal(n).abs() + 0.1, damp=0.0, shift=0.0, dead=self.H.diagonal() == 0
        )

    def normal(self, *shape: int) -> Tensor:
        """Draw float64 numbers."""
        return torch.randn(*shape, generator=self.draw, dtype=torch.float64)

    def of_kind(self, asked: dict[str, Any], groups: int) -> tuple[Grid, Fit | None]:
        """Return a grid and its fit."""
        book, out, n = BOOKS[asked["book"]], asked["rows"], asked["columns"]
        limits = dict(low=book.low, high=book.high, levels=book.levels, group=torch.arange(n) // asked["size"])
        if asked["fit"] == "octaves":
            scale = (
                torch.exp2(torch.randint(-2, 3, (out, groups), generator=self.draw).to(self.dtype))
                * STEPS[asked["step"]]
            )
            scale = torch.exp2(scale.log2().round())
            return Grid(scale=scale, zero=torch.zeros_like(scale), **limits), OctaveFit()
        if asked["fit"] == "E4M3":
            blocks = E4M3[torch.randint(20, 100, (out, groups), generator=self.draw)].to(self.dtype)
            divisor = float(torch.tensor(20 / STEPS[asked["step"]], dtype=torch.float32))
            return SharedGrid(block=blocks, divisor=divisor, **limits), SharedFit(divisor)
        storage = torch.float32 if asked["fit"] == "none" else getattr(torch, asked["fit"])
        fit = None if asked["fit"] == "none" else PlainFit(storage)
        step = STEPS[asked["step"]]
        if storage == torch.float16 and step > 1:
            step = 2.0**10  # twice this fits float16
        scale = (step * (1 + self.normal(out, groups).abs())).to(storage).to(self.dtype)
        whole = torch.zeros_like(scale) if book.levels is not None else self.normal(out, groups).mul(2).round()
        return Grid(scale=scale, zero=whole.to(self.dtype), **limits), fit


def on_card(x: Tensor) -> Tensor:
    """Return a tensor on the card, nothing of it counted."""
    return Pretend(x.clone(), 0)


def grid_on_card(grid: Grid) -> Grid:
    """Return a grid on the card."""
    parts = {name: on_card(part) for name, part in grid.parts.items()}
    return replace(grid.with_parts(parts), group=on_card(grid.group))


def between(codes: Tensor, position: Tensor, book: Any) -> tuple[Tensor, Tensor]:
    """Return how far positions are from the boundary to the nearest code, 0 where codes are it, and codes between."""
    nearest = book.nearest(position)
    moved = (nearest - codes).abs()
    boundary = (book.position(nearest) + book.position(codes, torch.float64)) / 2
    return torch.where(moved > 0, (position - boundary).abs(), 0), moved


def swept(case: Case) -> dict[str, Any]:
    """Sweep a matrix; return how far codes, E, losses and counts are from the formulas."""
    seen: list[tuple[Columns, Tensor, Tensor, Tensor, Tally]] = []

    def kept(columns: Columns, U: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        weights = columns.W.clone()
        codes, E = passes_triton.solve_pass(columns, U, tally)
        seen.append((columns._replace(W=weights), U, codes.clone(), E.clone(), tally))
        return codes, E

    kernels.KERNELS["pretend"] = lambda: replace(kernels._triton(), solve_pass=kept)
    factor = replace(case.factor, **{x: on_card(getattr(case.factor, x)) for x in ("order", "U", "d", "dead")})
    there = grid_on_card(case.grid)
    with interpreted() as count:
        found = solvers.sweep_planes(on_card(case.W), there, factor)
    (columns, U, codes, E, tally), book = seen[0], case.grid.codebook
    W, scale, zero, E, codes, U = (x.held for x in (columns.W, columns.scale, columns.zero, E, codes, U))
    group, loss, outside, d = (x.held for x in (columns.group, tally.loss, tally.outside, tally.d))
    s, z = scale[group], zero[group]
    wide = W.double() + (U.double() - torch.eye(len(U))).T @ E.double()
    position = wide / s.double() + z.double()
    off, moved = between(codes, position, book)
    residual = wide - W.double() + E.double()
    true = (d.double()[:, None] * residual.square()).sum(0)
    size = (d.double()[:, None] * residual.abs() * (residual.abs() + wide.abs())).sum(0).max().clamp(min=1e-300)
    low, high = book.limits
    doubtful = ((position - low).abs() < NEAR) | ((position - high).abs() < NEAR)
    twin = solvers.sweep_planes(case.W, case.grid, case.factor)
    return {
        "wrong_values": int((W - s * (book.position(codes, W.dtype) - z) != E).sum()),
        "off_boundary": float(off.max()),
        "far": int((moved > 1).sum()),
        "loss": float((loss - true).abs().max() / size),
        "miscounted": int(((outside - book.outside(position).sum(0)).abs() > doubtful.sum(0)).sum()),
        "unlike_torch": int((found.matrix.codes.held != twin.matrix.codes).any(1).sum()),
        "launches": count.launches,
    }


def descended(case: Case) -> dict[str, Any]:
    """Descend from random codes; return how far codes, E, steps and losses are from the formulas."""
    found = {"wrong_values": 0, "off_boundary": 0.0, "far": 0, "loss": 0.0, "wrong_steps": 0}
    passes = 0
    book, H = case.grid.codebook, case.H.to(case.dtype)

    def replayed(state: State, W: Tensor, spans: Spans, rounding: Rounding | None, *, begins: bool) -> None:
        names = ("H", "diagonal", "scale", "zero", "codes", "E", "gained", "fitted")
        before = {name: getattr(state, name).held.clone() for name in names}
        nonlocal passes
        passes += 1
        before |= {"W": W.held, "group": state.group.held}
        before |= {"starts": spans.starts.held, "spans": spans.firsts.held}
        passes_triton.descend_pass(state, W, spans, rounding, begins=begins)
        after = {name: getattr(state, name).held for name in names}
        for name, value in replay(before, after, bool(state.moved.held), book, rounding).items():
            found[name] = max(found[name], value)

    kernels.KERNELS["pretend"] = lambda: replace(kernels._triton(), descend_pass=replayed)
    matrix = QuantizedMatrix(codes=on_card(case.codes), grid=grid_on_card(case.grid))
    with interpreted() as count:
        there, _ = polish.descend(on_card(case.W), matrix, on_card(H), sweeps=SWEEPS, fit=case.fit)
    here = QuantizedMatrix(codes=case.codes, grid=case.grid)
    twin, _ = polish.descend(case.W, here, H, sweeps=SWEEPS, fit=case.fit)
    close = torch.isclose(there.grid.scale.held, twin.grid.scale, rtol=1e-5, atol=0)  # float32 keeps last digits
    unlike = (there.codes.held != twin.codes).any(1) | ~close.all(1)
    return found | {"unlike_torch": int(unlike.sum()), "passes": passes, "launches": count.launches}


def replay(
    before: dict[str, Tensor], after: dict[str, Tensor], moved: bool, book: Any, rounding: Any
) -> dict[str, float]:
    """Repeat a pass in float64, each decision from the codes and steps that the kernel had reached by then."""
    W, H, d = before["W"].T.double(), before["H"].double(), before["diagonal"].double()
    group, codes, scale, zero = before["group"], before["codes"].clone(), before["scale"].clone(), before["zero"]
    starts, spans = before["starts"].tolist(), before["spans"].tolist()
    off, far, wrong_steps = 0.0, 0, 0

    def values() -> Tensor:
        return scale[group].double() * (book.position(codes, torch.float64) - zero[group].double())

    first = W - values()
    if (
        rounding is not None and not rounding.mantissa
    ):  # codes that trials leave are not seen: the torch form is compared
        codes, scale, spans = after["codes"], after["scale"], []
    for a, b in pairwise(spans):
        for part in range(a, b) if rounding is not None else ():
            columns, g = slice(starts[part], starts[part + 1]), int(group[starts[part]])
            v = book.position(codes[columns], torch.float64) - zero[g].double()
            energy = (v * (H[columns, columns] @ v)).sum(0)
            product = (v * (H[columns] @ (W - values()))).sum(0)
            wrong_steps += wrong(scale[g], after["scale"][g], energy, product, rounding)
            scale[g] = after["scale"][g]
        for j in range(starts[a], starts[b]):
            t = values()[j] + H[j] @ (W - values()) / d[j]
            distance, steps = between(after["codes"][j], t / scale[group[j]] + zero[group[j]], book)
            off, far = max(off, float(distance.max())), far + int((steps > 1).sum())
            codes[j] = after["codes"][j]
    last = W - values()
    sizes = [(e * (H @ e)).sum(0) for e in (first, last)]
    scale_of_sums = sum([*sizes, before["gained"].abs(), before["fitted"].abs()])
    gained = (after["gained"] - before["gained"] + after["fitted"] - before["fitted"]).double()
    exact = before["W"].T - scale[group] * (book.position(codes, scale.dtype) - zero[group])
    changed = not (torch.equal(before["codes"], codes) and torch.equal(before["scale"], scale))
    return {
        "wrong_values": int((exact != after["E"]).sum()) + (changed != moved),
        "off_boundary": off,
        "far": far,
        "loss": float((gained - sizes[1] + sizes[0]).abs().max() / scale_of_sums.max().clamp(min=1e-300)),
        "wrong_steps": wrong_steps,
    }


def wrong(old: Tensor, new: Tensor, energy: Tensor, product: Tensor, rounding: Any) -> int:
    """Return how many new steps are none of those that numbers within 1e-5 of the exact ones would give."""
    mantissa, least, divisor, largest = rounding
    start = old.double()
    best = torch.where(energy > 0, start + product / energy, start)
    right = torch.zeros_like(new, dtype=torch.bool)
    for shift in (0.0, 1e-5, -1e-5):
        number = best + shift * (best.abs() + start)
        exponent = torch.frexp((number * divisor).clamp(min=least))[1] - 1
        unit = torch.maximum(torch.exp2(exponent.double() - mantissa), torch.tensor(least, dtype=torch.float64))
        stored = ((number * divisor / unit).round() * unit).clamp(min=least).float() / torch.tensor(divisor).float()
        move = stored.to(old.dtype).double() - start
        moves = move * (move * energy - 2 * product)
        scale = move.square() * energy + 2 * (move * product).abs()
        bound = (1e-5 * start, (number - start / 3).abs(), (number - (start * 3).clamp(max=largest)).abs())
        valid = (number > start / 3) & (number < (start * 3).clamp(max=largest))
        doubtful = (torch.minimum(*bound[1:]) < bound[0]) | (moves.abs() <= 1e-5 * scale)
        near = (new.double() - stored).abs() <= 1e-5 * stored
        right |= torch.where(valid & (moves < 0), near, new == old) | (doubtful & (near | (new == old)))
    return int((~right).sum())


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Return how far sweeps and descents are from their formulas, and their launches."""
    case = Case(asked)
    with pretended(), small_tiles(), mock.patch.dict(kernels.KERNELS, {"cpu": kernels.torch_kernels}):
        return {f"sweep_{name}": value for name, value in swept(case).items()} | {
            f"descent_{name}": value for name, value in descended(case).items()
        }


@contextmanager
def small_tiles() -> Iterator[None]:
    """Let small problems have several strips, blocks, tiles and spans."""
    sizes = {"ROWS": 8, "BLOCK": 8, "TILE": 4, "INNER": 4, "PROGRAMS": 1}  # nine rows are those of a larger program
    with mock.patch.multiple(passes_triton, **sizes), mock.patch.object(polish, "SPAN", 8):
        yield
