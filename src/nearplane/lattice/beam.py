"""Several nearest planes at once: a beam of candidates for every row, nested so that a wider one is never worse.

Column by column every candidate proposes codes, and a fixed number of them survives (the M-algorithm). Inside a block of columns
candidates carry their own targets; what a block did wrong reaches the later columns as one matrix product, as in `solve.py`. The
block in torch is the reference and serves every device; on the CPU a compiled kernel does the same for some rows at a time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.codebook import Table, position_of, round_code, round_integer
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix, Weights

Floats = npt.NDArray[np.float64]  # or float32: the kernel is compiled for either
Indices = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int32]

ROWS = 32  # that are swept at a time on the CPU, each a lane of its registers
MEMORY = 128 << 20  # bytes of the targets and codes of rows that are worked on at a time, on the CPU


class Places(NamedTuple):
    """What the compiled sweep of a strip of rows works on, (sides, candidates, rows) of one column; see `_fill`."""

    before: Floats
    code: Floats
    total: Floats
    cheaper: Floats
    at: Integers
    chosen: Floats
    parent: Integers


class Block(NamedTuple):
    """What the compiled sweep of a block reads, and `cost`, `chosen` and `parent`, which it writes; see `sweep_block_torch`."""

    target: Floats
    W: Floats
    scale: Floats
    zero: Floats
    table: Table
    U: Floats
    d: Floats
    cost: Floats
    chosen: Floats
    parent: Indices


def k_best(
    W: Tensor, grid: Grid, factor: Factor, *, beam: int = 8, block: int = 64, memory: int | None = None
) -> QuantizedMatrix[Grid]:
    """Round each row of `W` to the best of `beam` candidates that are carried through all columns.

    In `factor.order`, candidate i has the target `t_i = W_j + E_i,{<j} U_{<j,j}` and has cost `sum_{k<j} d_k (t_k - value_k)^2`,
    its loss so far. It proposes every code of the grid, and one of the proposals takes each of the places 1, 2, ..., beam:

        place 1: the nearest code of candidate 1
        place i: the cheapest proposal, not yet taken, of candidates 1 to i

    Of equal costs the lowest candidate goes first. The cheapest candidate after the last column is the row.

    What is guaranteed: candidate 1 is nearest plane, so `beam=1` is, code for code. Candidates 1 to i never depend on those after
    them, so a wider beam holds those of every narrower one: the damped loss of no row ever rises with `beam`, for any widths and
    any grid, up to rounding errors of the sums. A clipped grid with at most `beam` code vectors is searched exhaustively.
    The usual survivors, the cheapest of all proposals, guarantee nothing of the kind: on synthetic Hessians 4 % to 30 % of the rows
    ended worse than with some narrower beam. Against them places cost 0 to 7 % of the mean loss at widths 2 and 4, 3 % at most
    at 8 and 16. Keeping the best of all widths 1, 2, 4, ... takes twice the time and mostly gained less than twice the places.

    Args:
        W: (out, in) weights, float32 or float64; the sweep runs in their dtype.
        grid: steps and limits of every column; see `Grid`.
        factor: of the layer's Hessian; see `factorize`.
        beam: candidates of every row; time and memory grow with it.
        block: columns swept before the error is propagated as one matrix product.
        memory: bytes that the targets and codes of the rows worked on at a time may take, at least those of one; None: 128 MiB,
            on a GPU half of what is free.

    Raises:
        NumericalError: `W` or the factor is not finite.
        RecipeError: the beam has no candidate.

    The M-algorithm: Anderson and Mohan (1984); the lattice: Babai (1986).
    """
    if beam < 1:
        raise RecipeError(f"A beam holds at least one candidate a row, found {beam}.")
    if not (bool(torch.isfinite(W).all()) and bool(torch.isfinite(factor.d).all())):
        raise NumericalError("A weight or the factor of the Hessian is NaN or Inf.")
    order = factor.order
    still = factor.dead[order]  # nothing hangs on these columns: no candidate is spent on them
    d = (factor.d / factor.d.masked_fill(still, 0).max().clamp(min=torch.finfo(factor.d.dtype).tiny)).to(W.dtype)
    d = d.masked_fill(still, 0)
    if memory is None:
        memory = torch.cuda.mem_get_info(W.device)[0] // 2 if W.device.type == "cuda" else MEMORY
    group = grid.group[order]
    each = 2 * W.element_size() + 4  # a target, its copy when candidates change places, a code
    most = max(1, memory // (each * beam * W.shape[1]))
    if ROWS < most < len(W):  # whole runs of lanes, about as many rows every time
        strips = -(-len(W) // (most // ROWS * ROWS))
        most = -(-len(W) // (strips * ROWS)) * ROWS
    codes = torch.empty_like(W, dtype=torch.int32)
    for a in range(0, len(W), most):
        part = slice(a, a + most)
        s, z = (x.expand(len(W), -1)[part][:, group].to(W.dtype) for x in (grid.scale, grid.zero))
        codes[part, order] = _best(Weights(W[part][:, order], s, z, grid.codebook), factor.U, d, beam, block)
    return QuantizedMatrix(codes=codes, grid=grid)


def _best(weights: Weights, U: Tensor, d: Tensor, beam: int, block: int) -> Tensor:
    """Return (out, in) codes int32 of a matrix, everything in rounding order."""
    W, codebook = weights.W, weights.codebook
    out, n = W.shape
    now, spare = W.new_empty(2, out * beam * n)  # targets change places between these two
    target = now.view(out, beam, n).copy_(W[:, None])  # (out, beam, in) of the columns that are left
    cost = W.new_full((out, beam), torch.inf)
    cost[:, 0] = 0  # one candidate to begin with
    row = torch.arange(out, device=W.device)
    history: list[tuple[Tensor, Tensor]] = []
    sweep = sweep_block if W.device.type == "cpu" else sweep_block_torch
    for a in range(0, n, block):
        b = min(a + block, n)
        part = slice(a, b)
        here = Weights(W[:, part], weights.scale[:, part], weights.zero[:, part], codebook)
        rows_of_U = U[part, a:].to(W.dtype)  # (b - a, columns that are left)
        chosen, parent = sweep(target[:, :, : b - a], here, rows_of_U[:, : b - a], d[part], cost)
        codes, ancestor = _trace(chosen, parent)
        history.append((codes, ancestor))
        if b < n:
            values = here.scale[:, None] * (codebook.position(codes, W.dtype) - here.zero[:, None])
            E = here.W[:, None] - values  # (out, beam, b)
            moved = (row[:, None] * beam + ancestor).flatten()
            left = spare[: out * beam * (n - b)].view(out * beam, n - b)
            torch.index_select(target.view(out * beam, -1)[:, b - a :], 0, moved, out=left)
            target = left.addmm_(E.reshape(out * beam, -1), rows_of_U[:, b - a :]).view(out, beam, n - b)
            now, spare = spare, now
    place = cost.argmin(1)  # (out,)
    found = []
    for codes, ancestor in reversed(history):
        found.append(codes[row, place])
        place = ancestor[row, place]
    return torch.cat(found[::-1], 1)


def _trace(chosen: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the candidates at the end of a block back to its start.

    Args:
        chosen: (b, out, beam) code that each place took.
        parent: (b, out, beam) int64, place before of the candidate that proposed it.

    Returns:
        (out, beam, b) codes int32 of each candidate, and (out, beam) its place before the block.
    """
    width, out, beam = chosen.shape
    codes = torch.empty(out, beam, width, dtype=torch.int32, device=chosen.device)
    if chosen.device.type == "cpu":
        ancestor = torch.empty(out, beam, dtype=torch.int64)
        _trace_rows(chosen.numpy(), parent.numpy(), codes.numpy(), ancestor.numpy())
        return codes, ancestor
    place = torch.arange(beam, device=chosen.device).expand(out, beam)
    for j in range(width - 1, -1, -1):
        codes[:, :, j] = chosen[j].gather(1, place)
        place = parent[j].gather(1, place)
    return codes, place


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _trace_rows(chosen: Floats, parent: Indices, codes: Integers, ancestor: Indices) -> None:
    """Write `_trace` of all rows, compiled."""
    width, out, beam = chosen.shape
    for row in range(out):
        for end in range(beam):
            place = end
            for j in range(width - 1, -1, -1):
                codes[row, end, j] = chosen[j, row, place]
                place = parent[j, row, place]
            ancestor[row, end] = place


def sweep_block_torch(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns; updates `cost`. The oracle of the compiled kernel, and the form for every device.

    Args:
        target: (out, beam, b) of every candidate, with the error of earlier blocks fed forward.
        weights: of these columns.
        U: (b, b) the block's own triangle.
        d: (b,) squared lengths, 0 for a dead input.
        cost: (out, beam) of every candidate, infinite for one that does not exist.

    Returns:
        (b, out, beam) code that each place took, and (b, out, beam) int64 the candidate that proposed it.
    """
    out, beam, width = target.shape
    target = target.clone()
    chosen = target.new_empty(width, out, beam)
    parent = torch.arange(beam, device=d.device).repeat(width, out, 1)
    for j, length in enumerate(d.tolist()):
        columns = slice(j, j + 1)
        column = Weights(weights.W[:, columns], weights.scale[:, columns], weights.zero[:, columns], weights.codebook)
        t, (w, s, z, codebook) = target[:, :, j], column
        chosen[j] = codebook.nearest(t / s + z)
        if length > 0:
            chosen[j], parent[j] = _survivors(t, chosen[j], column, length, cost)
        value = s * (codebook.position(chosen[j]) - z)
        target = target.gather(1, parent[j][:, :, None].expand(-1, -1, width))
        target[:, :, j + 1 :] += (w - value)[:, :, None] * U[j, j + 1 :]
    return chosen, parent


def _survivors(t: Tensor, nearest: Tensor, column: Weights, length: float, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Fill the places of one column; updates `cost`.

    Returns (out, beam) codes, and (out, beam) int64 which candidate proposed each. Where no proposal is left the cost is infinite.

    Every candidate has two next proposals: below, from its nearest code downwards, and above, from the code after it upwards.
    On a table of levels, too, distances grow on either side.

    Args:
        t: (out, beam) targets.
        nearest: (out, beam) codes.
        column: (out, 1) weights.
        length: of this column, squared.
        cost: (out, beam) before this column, and after it.
    """
    out, beam = t.shape
    _, s, z, codebook = column
    low, high = (
        (-torch.inf if codebook.low is None else codebook.low),
        (torch.inf if codebook.high is None else codebook.high),
    )
    side = torch.tensor([-1, 1], device=t.device, dtype=t.dtype).repeat(beam).expand(out, -1)  # (out, 2 beam)
    code = torch.stack([nearest, nearest + 1], 2).view(out, -1)
    t, before = t.repeat_interleave(2, 1), cost.repeat_interleave(2, 1)

    def price(code: Tensor, t: Tensor, before: Tensor) -> Tensor:
        total = before + length * (t - s * (codebook.position(code) - z)).square()
        return total.masked_fill((code < low) | (code > high), torch.inf)

    total = price(code, t, before)
    chosen, picked = [], []
    for place in range(beam):
        open_ = slice(0, 2 * place + 2 if place else 1)
        at = total[:, open_].argmin(1, keepdim=True)  # (out, 1), the first of equal ones
        chosen.append(code.gather(1, at))
        picked.append(at // 2)
        cost[:, place : place + 1] = total.gather(1, at)
        following = chosen[-1] + side.gather(1, at)
        code.scatter_(1, at, following)
        total.scatter_(1, at, price(following, t.gather(1, at), before.gather(1, at)))
    return torch.cat(chosen, 1), torch.cat(picked, 1)


def sweep_block(
    target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns on the CPU, compiled, some rows at a time. As `sweep_block_torch`."""
    out, beam, width = target.shape
    chosen, parent = target.new_empty(width, out, beam), torch.empty(width, out, beam, dtype=torch.int64)
    t, W, s, z = (x.contiguous().numpy() for x in (target, weights.W, weights.scale, weights.zero))
    table = weights.codebook.table(target.dtype)
    work = Block(t, W, s, z, table, U.contiguous().numpy(), d.numpy(), cost.numpy(), chosen.numpy(), parent.numpy())
    kernel: Any = _sweep_rows
    threads = threads or torch.get_num_threads()
    share = -(-out // (threads * ROWS)) * ROWS  # whole runs of lanes
    with ThreadPoolExecutor(threads) as pool:
        for part in [pool.submit(kernel, a, min(a + share, out), work) for a in range(0, out, share)]:
            part.result()
    return chosen, parent


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _nearest(t: Floats, s: Floats, z: Floats, table: Table, code: Floats) -> None:
    """Write the codes nearest to the targets of some rows."""
    if len(table.levels) == 0:  # a loop of its own, which takes many rows at once
        for r in range(len(t)):
            code[r] = round_integer(t[r] / s[r] + z[r], table.low, table.high)
        return
    for r in range(len(t)):
        code[r] = round_code(t[r] / s[r] + z[r], table)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _price(
    t: Floats, s: Floats, z: Floats, table: Table, length: float, before: Floats, code: Floats, total: Floats
) -> None:
    """Write what candidates of some rows cost with some codes."""
    none = t.dtype.type(np.inf)
    if len(table.levels) == 0:
        for r in range(len(t)):
            ahead = t[r] - s[r] * (code[r] - z[r])
            price = before[r] + length * (ahead * ahead)
            total[r] = none if code[r] > table.high else price
        return
    for r in range(len(t)):
        ahead = t[r] - s[r] * (position_of(code[r], table) - z[r])
        total[r] = none if code[r] > table.high else before[r] + length * (ahead * ahead)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _least(totals: Floats, best: Floats, at: Integers) -> None:
    """Write the least of totals (candidates, rows), and the first candidate that has it."""
    for r in range(len(best)):
        best[r], at[r] = totals[0, r], 0
    for i in range(1, len(totals)):
        total, here = totals[i], np.int32(i)
        for r in range(len(best)):
            less = total[r] < best[r]
            best[r] = total[r] if less else best[r]
            at[r] = here if less else at[r]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _fill(t: Floats, s: Floats, z: Floats, table: Table, length: float, cost: Floats, places: Places) -> None:
    """Fill the places of some rows in one column; all is (candidates, rows), with rows as lanes.

    Updates `cost`: what stood there is kept in `places.before`, as a candidate may propose again.
    """
    before, code, total, cheaper, at, chosen, parent = places
    one, none = t.dtype.type(1), t.dtype.type(np.inf)
    before[:] = cost
    for i in range(len(t)):
        below, above = code[0, i], code[1, i]
        _nearest(t[i], s, z, table, below)
        for r in range(len(s)):
            above[r] = below[r] + one
        _price(t[i], s, z, table, length, before[i], below, total[0, i])
        _price(t[i], s, z, table, length, before[i], above, total[1, i])
        _cheaper(total[0, i], total[1, i], cheaper[i])
    integers = len(table.levels) == 0
    for place in range(len(t)):
        least, took, proposer = cost[place], chosen[place], parent[place]
        _least(cheaper[: place + 1], least, at)
        for r in range(len(s)):
            k = np.uint64(at[r])
            side = np.uint64(total[1, k, r] < total[0, k, r] and place > 0)
            took[r], proposer[r], least[r] = code[side, k, r], at[r], total[side, k, r]
            following = code[side, k, r] + (one if side else -one)
            position = following if integers else position_of(following, table)
            ahead = t[k, r] - s[r] * (position - z[r])
            price = before[k, r] + length * (ahead * ahead)
            price = none if following < table.low or following > table.high else price
            code[side, k, r], total[side, k, r] = following, price
            cheaper[k, r] = min(price, total[np.uint64(1) - side, k, r])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _cheaper(one: Floats, other: Floats, least: Floats) -> None:
    """Write the lesser of two prices."""
    for r in range(len(least)):
        least[r] = min(one[r], other[r])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _errors(w: Floats, s: Floats, z: Floats, table: Table, chosen: Floats, E: Floats) -> None:
    """Write weights minus values of the codes that the places of some rows took."""
    for i in range(len(chosen)):
        if len(table.levels) == 0:
            for r in range(len(w)):
                E[i, r] = w[r] - s[r] * (chosen[i, r] - z[r])
        else:
            for r in range(len(w)):
                E[i, r] = w[r] - s[r] * (position_of(chosen[i, r], table) - z[r])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _moved(now: Floats, parent: Integers, E: Floats, u: Floats, first: int, then: Floats) -> None:
    """Bring targets (rows, candidates, columns) to their new places, from the column `first` on, with the errors fed forward.

    Slices from 0 on are what the compiler takes many at a time: with indices that may be negative it does not.
    """
    u = u[first:]
    for r in range(now.shape[0]):
        for i in range(now.shape[1]):
            before, e, after = now[r, parent[i, r], first:], E[i, r], then[r, i, first:]
            for c in range(len(u)):
                after[c] = before[c] + e * u[c]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sweep_rows(start: int, stop: int, block: Block) -> None:
    """Sweep the rows from `start` to `stop`, `ROWS` at a time; targets change places between two arrays."""
    target, W, scale, zero, table, U, d, cost, chosen, parent = block
    beam, width = target.shape[1:]
    now, then = np.empty((ROWS, beam, width), W.dtype), np.empty((ROWS, beam, width), W.dtype)
    t, E, costs = np.empty((beam, ROWS), W.dtype), np.empty((beam, ROWS), W.dtype), np.empty((beam, ROWS), W.dtype)
    w, s, z = np.empty(ROWS, W.dtype), np.empty(ROWS, W.dtype), np.empty(ROWS, W.dtype)
    places = Places(
        np.empty((beam, ROWS), W.dtype),
        np.empty((2, beam, ROWS), W.dtype),
        np.empty((2, beam, ROWS), W.dtype),
        np.empty((beam, ROWS), W.dtype),
        np.empty(ROWS, np.int32),
        np.empty((beam, ROWS), W.dtype),
        np.empty((beam, ROWS), np.int32),
    )
    for a in range(start, stop, ROWS):
        rows = np.minimum(np.arange(a, a + ROWS), stop - 1)  # the last one stands for those that are lacking
        for r in range(ROWS):
            now[r] = target[rows[r]]
            costs[:, r] = cost[rows[r]]
        for j in range(width):
            for r in range(ROWS):
                w[r], s[r], z[r] = W[rows[r], j], scale[rows[r], j], zero[rows[r], j]
                for i in range(beam):
                    t[i, r] = now[r, i, j]
            if d[j] > 0:
                _fill(t, s, z, table, d[j], costs, places)
            else:
                for i in range(beam):
                    _nearest(t[i], s, z, table, places.chosen[i])
                    places.parent[i] = i
            _errors(w, s, z, table, places.chosen, E)
            for r in range(min(ROWS, stop - a)):
                for i in range(beam):
                    chosen[j, a + r, i], parent[j, a + r, i] = places.chosen[i, r], places.parent[i, r]
            _moved(now, places.parent, E, U[j], (j + 1) // 8 * 8, then)
            now, then = then, now
        for r in range(ROWS):
            cost[rows[r]] = costs[:, r]
