"""A beam through a block of columns on the CPU, compiled by Numba; `kernels_torch.py` has the same algorithm in torch."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.lattice.codebook import Table
from nearplane.lattice.grid import Weights
from nearplane.lattice.kernels_cpu import in_threads, position_of, round_code, round_integer

Floats = npt.NDArray[np.float64]  # or float32: the kernel is compiled for either
Indices = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int32]

ROWS = 32  # that are swept at a time, each a lane of the registers
MEMORY = 128 << 20  # bytes of the targets and codes of rows that are worked on at a time


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
    """What the compiled sweep of a block reads, and `cost`, `chosen` and `parent`, which it writes; see `beam_block`."""

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


def memory(_: torch.device) -> int:
    """Return the bytes that targets and codes may take: about what the caches hold."""
    return MEMORY


def trace(chosen: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the candidates at the end of a block back to its start. As the torch form."""
    width, out, beam = chosen.shape
    codes, ancestor = torch.empty(out, beam, width, dtype=torch.int32), torch.empty(out, beam, dtype=torch.int64)
    _trace_rows(chosen.numpy(), parent.numpy(), codes.numpy(), ancestor.numpy())
    return codes, ancestor


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _trace_rows(chosen: Floats, parent: Indices, codes: Integers, ancestor: Indices) -> None:
    """Write `trace` of all rows."""
    width, out, beam = chosen.shape
    for row in range(out):
        for end in range(beam):
            place = end
            for j in range(width - 1, -1, -1):
                codes[row, end, j] = chosen[j, row, place]
                place = parent[j, row, place]
            ancestor[row, end] = place


def beam_block(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns on the CPU, compiled, some rows at a time. As the torch form."""
    out, beam, width = target.shape
    chosen, parent = target.new_empty(width, out, beam), torch.empty(width, out, beam, dtype=torch.int64)
    t, W, s, z = (x.contiguous().numpy() for x in (target, weights.W, weights.scale, weights.zero))
    table = weights.codebook.table(target.dtype)
    work = Block(t, W, s, z, table, U.contiguous().numpy(), d.numpy(), cost.numpy(), chosen.numpy(), parent.numpy())
    in_threads(lambda start, stop: _sweep_rows(start, stop, work), out, run=ROWS)
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
