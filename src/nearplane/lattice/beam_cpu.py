"""Beam search through a block of columns on the CPU, compiled by Numba; its torch form is in `kernels_torch.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.lattice.grid import Table, Weights
from nearplane.lattice.kernels_cpu import in_threads, position_of, round_code, round_integer
from nearplane.lattice.kernels_torch import errors

Floats = npt.NDArray[np.float64]  # or float32: the kernels are compiled for either
Indices = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int32]

LANES = 32  # rows that are swept together, one per lane of the vector registers
BEAM_BYTES = 128 << 20  # targets and codes of the rows in work at a time: about the size of the caches


class PlaceBuffers(NamedTuple):
    """Work arrays (sides, candidates, rows) for one column of a strip of rows; see `_fill_places`."""

    before: Floats
    code: Floats
    total: Floats
    cheaper: Floats
    at: Integers
    chosen: Floats
    parent: Integers


def beam_paths(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sweep one block of columns with several candidates per row, as the torch form does."""
    codes, ancestor = trace(*beam_block(target, weights, U, d, cost))
    return codes, errors(weights, codes), ancestor


def trace(chosen: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the candidates at the end of a block back to its start, as the torch form does."""
    width, out, beam = chosen.shape
    codes, ancestor = torch.empty(out, beam, width, dtype=torch.int32), torch.empty(out, beam, dtype=torch.int64)
    _trace_rows(chosen.numpy(), parent.numpy(), codes.numpy(), ancestor.numpy())
    return codes, ancestor


@compiled(error_model="numpy")
def _trace_rows(chosen: Floats, parent: Indices, codes: Integers, ancestor: Indices) -> None:
    """Fill in the codes and ancestors of `trace`, row by row."""
    width, out, beam = chosen.shape
    for row in range(out):
        for end in range(beam):
            place = end
            for j in range(width - 1, -1, -1):
                codes[row, end, j] = chosen[j, row, place]
                place = parent[j, row, place]
            ancestor[row, end] = place


def beam_block(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns, `LANES` rows at a time, as the torch form does."""
    out, beam, width = target.shape
    chosen, parent = target.new_empty(width, out, beam), torch.empty(width, out, beam, dtype=torch.int64)
    t, W, s, z = (x.contiguous().numpy() for x in (target, weights.W, weights.scale, weights.zero))
    table = weights.codebook.table(target.dtype)
    block = t, W, s, z, table, U.contiguous().numpy(), d.numpy(), cost.numpy(), chosen.numpy(), parent.numpy()
    in_threads(partial(_sweep_rows, block), out, run=LANES)
    return chosen, parent


@compiled(error_model="numpy")
def _nearest(t: Floats, s: Floats, z: Floats, table: Table, code: Floats) -> None:
    """Write the codes nearest to the targets of some rows."""
    if len(table.levels) == 0:  # a separate loop, which the compiler vectorizes
        for r in range(len(t)):
            code[r] = round_integer(t[r] / s[r] + z[r], table.low, table.high)
        return
    for r in range(len(t)):
        code[r] = round_code(t[r] / s[r] + z[r], table)


@compiled(error_model="numpy")
def _costs_of(
    t: Floats, s: Floats, z: Floats, table: Table, length: float, before: Floats, code: Floats, total: Floats
) -> None:
    """Write the costs of candidates of some rows with the given codes; infinite above the grid."""
    infinite = t.dtype.type(np.inf)
    if len(table.levels) == 0:
        for r in range(len(t)):
            residual = t[r] - s[r] * (code[r] - z[r])
            candidate_cost = before[r] + length * (residual * residual)
            total[r] = infinite if code[r] > table.high else candidate_cost
        return
    for r in range(len(t)):
        residual = t[r] - s[r] * (position_of(code[r], table) - z[r])
        total[r] = infinite if code[r] > table.high else before[r] + length * (residual * residual)


@compiled(error_model="numpy")
def _argmin_candidates(totals: Floats, best: Floats, at: Integers) -> None:
    """Write the minimum over candidates of `totals` (candidates, rows), and the first candidate that reaches it."""
    for r in range(len(best)):
        best[r], at[r] = totals[0, r], 0
    for i in range(1, len(totals)):
        total, candidate = totals[i], np.int32(i)
        for r in range(len(best)):
            cheaper = total[r] < best[r]
            best[r] = total[r] if cheaper else best[r]
            at[r] = candidate if cheaper else at[r]


@compiled(error_model="numpy")
def _fill_places(
    t: Floats, s: Floats, z: Floats, table: Table, length: float, cost: Floats, places: PlaceBuffers
) -> None:
    """Fill the places of some rows in one column; arrays are (candidates, rows), with rows as lanes.

    Updates `cost`; its old entries are kept in `places.before`, because a candidate may propose again.
    """
    before, code, total, cheaper, at, chosen, parent = places
    one, infinite = t.dtype.type(1), t.dtype.type(np.inf)
    for i in range(len(t)):
        for r in range(len(s)):
            before[i, r] = cost[i, r]
        below, above = code[0, i], code[1, i]
        _nearest(t[i], s, z, table, below)
        for r in range(len(s)):
            above[r] = below[r] + one
        _costs_of(t[i], s, z, table, length, before[i], below, total[0, i])
        _costs_of(t[i], s, z, table, length, before[i], above, total[1, i])
        _cheaper(total[0, i], total[1, i], cheaper[i])
    integers = len(table.levels) == 0
    for place in range(len(t)):
        least, taken_code, proposer = cost[place], chosen[place], parent[place]
        _argmin_candidates(cheaper[: place + 1], least, at)
        for r in range(len(s)):
            k = np.uint64(at[r])
            side = np.uint64(total[1, k, r] < total[0, k, r] and place > 0)
            taken_code[r], proposer[r], least[r] = code[side, k, r], at[r], total[side, k, r]
            next_code = code[side, k, r] + (one if side else -one)
            position = next_code if integers else position_of(next_code, table)
            residual = t[k, r] - s[r] * (position - z[r])
            next_cost = before[k, r] + length * (residual * residual)
            next_cost = infinite if next_code < table.low or next_code > table.high else next_cost
            code[side, k, r], total[side, k, r] = next_code, next_cost
            cheaper[k, r] = min(next_cost, total[np.uint64(1) - side, k, r])


@compiled(error_model="numpy")
def _cheaper(one: Floats, other: Floats, least: Floats) -> None:
    """Write the elementwise minimum of two costs."""
    for r in range(len(least)):
        least[r] = min(one[r], other[r])


@compiled(error_model="numpy")
def _errors(w: Floats, s: Floats, z: Floats, table: Table, chosen: Floats, E: Floats) -> None:
    """Write the errors of the chosen codes, weights minus values, for some rows."""
    for i in range(len(chosen)):
        if len(table.levels) == 0:
            for r in range(len(w)):
                E[i, r] = w[r] - s[r] * (chosen[i, r] - z[r])
        else:
            for r in range(len(w)):
                E[i, r] = w[r] - s[r] * (position_of(chosen[i, r], table) - z[r])


@compiled(error_model="numpy")
def _reorder_targets(target: Floats, parent: Integers, E: Floats, u: Floats, first: int, reordered: Floats) -> None:
    """Move targets (rows, candidates, columns) to their new places and feed the errors forward, from column `first` on.

    Slices that start at 0 let the compiler vectorize the loop; it cannot where indices may be negative.
    """
    u = u[first:]
    for r in range(target.shape[0]):
        for i in range(target.shape[1]):
            before, e, new = target[r, parent[i, r], first:], E[i, r], reordered[r, i, first:]
            for c in range(len(u)):
                new[c] = before[c] + e * u[c]


@compiled(error_model="numpy")
def _sweep_rows(block: Any, start: int, stop: int) -> None:
    """Sweep the rows from `start` to `stop`, `LANES` at a time; targets go back and forth between two arrays."""
    target, W, scale, zero, table, U, d, cost, chosen, parent = block
    beam, width = target.shape[1:]
    targets, reordered = np.empty((LANES, beam, width), W.dtype), np.empty((LANES, beam, width), W.dtype)
    t, E, costs = np.empty((beam, LANES), W.dtype), np.empty((beam, LANES), W.dtype), np.empty((beam, LANES), W.dtype)
    w, s, z = np.empty(LANES, W.dtype), np.empty(LANES, W.dtype), np.empty(LANES, W.dtype)
    places = PlaceBuffers(
        np.empty((beam, LANES), W.dtype),
        np.empty((2, beam, LANES), W.dtype),
        np.empty((2, beam, LANES), W.dtype),
        np.empty((beam, LANES), W.dtype),
        np.empty(LANES, np.int32),
        np.empty((beam, LANES), W.dtype),
        np.empty((beam, LANES), np.int32),
    )
    rows = np.empty(LANES, np.int64)
    for a in range(start, stop, LANES):
        for r in range(LANES):  # loops, because assignments to slices would take seconds to compile
            rows[r] = min(a + r, stop - 1)  # the last row is repeated to fill the lanes
            for i in range(beam):
                costs[i, r] = cost[rows[r], i]
                for j in range(width):
                    targets[r, i, j] = target[rows[r], i, j]
        for j in range(width):
            for r in range(LANES):
                w[r], s[r], z[r] = W[rows[r], j], scale[rows[r], j], zero[rows[r], j]
                for i in range(beam):
                    t[i, r] = targets[r, i, j]
            if d[j] > 0:
                _fill_places(t, s, z, table, d[j], costs, places)
            else:
                for i in range(beam):
                    _nearest(t[i], s, z, table, places.chosen[i])
                    places.parent[i] = i
            _errors(w, s, z, table, places.chosen, E)
            for r in range(min(LANES, stop - a)):
                for i in range(beam):
                    chosen[j, a + r, i], parent[j, a + r, i] = places.chosen[i, r], places.parent[i, r]
            _reorder_targets(targets, places.parent, E, U[j], (j + 1) // 8 * 8, reordered)
            targets, reordered = reordered, targets
        for r in range(LANES):
            for i in range(beam):
                cost[rows[r], i] = costs[i, r]
