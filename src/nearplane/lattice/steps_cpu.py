"""Fit of steps to codes, and search among steps by squared errors, on the CPU, compiled by Numba.

`polish.py`, `octaves.py` and `scale.py` have the same algorithms in torch. Grids of four-bit floats have groups of 16 or 32
columns, so many that a few operations for each take longer than the arithmetic. Rows are independent: threads divide them, and
a strip of rows passes through all groups of a span before the next strip starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.lattice.grid import Codebook
from nearplane.lattice.kernels_cpu import Floats, feed_four, in_threads, position_of, round_to_levels
from nearplane.lattice.kernels_torch import Rounding, State

ROWS = 64  # of a strip: what changes in a span of its columns stays in the second-level cache
OCTAVES = (1.0, 0.5, 2.0)  # factors of a step that are tried
Group = tuple[int, int, int]


def fit_steps(state: State, groups: Sequence[Group], EH: Tensor, rounding: Rounding) -> None:
    """Fit the steps of adjacent groups one after another by least squares; see `polish.PlainFit`.

    Args:
        state: State of the descent in float32; scale, E, fitted and moved are updated.
        groups: Number, first column and column after the last of every group.
        EH: (n, out) `(E H)^T` of the columns of these groups, updated.
        rounding: How steps are rounded.
    """
    _fit(state, groups, EH, partial(_fit_rows, rounding=tuple(rounding)))


def fit_octaves(state: State, groups: Sequence[Group], EH: Tensor, limits: tuple[float, float]) -> None:
    """Try half and twice the step of adjacent groups one after another; see `octaves.OctaveFit`.

    Args:
        state: State of the descent in float32; scale, codes, E, fitted and moved are updated.
        groups, EH: See `fit_steps`.
        limits: Smallest and largest step.
    """
    _fit(state, groups, EH, partial(_try_octaves, limits=np.array(limits, np.float32)))


def _fit(state: State, groups: Sequence[Group], EH: Tensor, kernel: Callable[..., None]) -> None:
    first, end = groups[0][1], groups[-1][2]
    n, out = end - first, EH.shape[1]
    H = EH.new_zeros(n + 3, n + 3)  # three more complete groups of four columns
    H[:n, :n] = state.H[first:end, first:end]
    changes, moved = torch.empty_like(EH), torch.zeros(out, dtype=torch.bool)
    parts = torch.tensor(groups, dtype=torch.int64)
    parts[:, 1:] -= first
    arrays = H, EH, state.E[first:end], changes, state.codes[first:end], state.scale, state.zero, state.fitted, moved
    diagonal = state.diagonal[first:end].contiguous().numpy()
    block = (
        *(each.numpy() for each in arrays), diagonal, state.codebook.table(torch.float32), parts.numpy(),
    )  # fmt: skip
    in_threads(partial(kernel, block), out, run=ROWS)
    if bool(moved.any()):
        state.moved.fill_(True)
        EH.addmm_(state.H[first:end, first:end], changes)


def least_squares(groups: Tensor, weight: Tensor, codebook: Codebook, steps: Tensor) -> Tensor:
    """Return (out, groups) int64 which of several steps has the least error in every group; of equal ones the first.

    Args:
        groups: (out, groups, size) float32 weights.
        weight: (groups, size) weight of the squared errors of every column.
        codebook: Codebook with levels.
        steps: (trials, out, groups) steps to try.
    """
    out, count, size = groups.shape
    best = torch.empty(out, count, dtype=torch.int64)
    arrays = (each.contiguous().numpy() for each in (groups.flatten(1), weight.flatten(), steps, best))
    in_threads(partial(_search_rows, (*arrays, codebook.table(torch.float32), size)), out)
    return best


@compiled(error_model="numpy")
def _rounded(values: Floats, mantissa: int, least: float) -> None:
    """Round positive numbers to floats with this many bits behind the point, multiples of `least`; ties to even."""
    if mantissa < 23:
        bits, dropped = values.view(np.int32), np.int32(23 - mantissa)
        half, one = np.int32((1 << (22 - mantissa)) - 1), np.int32(1)
        normal = np.float32(least * (1 << mantissa))
        magic = np.float32(least * 12582912.0)  # 1.5 2^23: the sum has a last digit of `least`
        for r in range(values.shape[0]):
            if values[r] < normal:
                values[r] = (values[r] + magic) - magic
            else:
                bits[r] = ((bits[r] + half + ((bits[r] >> dropped) & one)) >> dropped) << dropped
    for r in range(values.shape[0]):
        values[r] = max(values[r], np.float32(least))


@compiled(error_model="numpy")
def _best_moves(
    old: Floats, energy: Floats, product: Floats, rounding: Any, move: Floats, change: Floats, stored: Floats
) -> None:
    """Find the moves of steps to the stored ones of least loss, 0 where that is not known or no gain, and the gains."""
    mantissa, least, divisor, largest = rounding
    divisor, largest = np.float32(divisor), np.float32(largest)
    for r in range(old.shape[0]):
        new = old[r] + product[r] / energy[r] if energy[r] > 0 else old[r]
        valid = new > old[r] / np.float32(3) and new < min(old[r] * np.float32(3), largest)
        move[r] = np.float32(valid)
        stored[r] = (new if valid else old[r]) * divisor
    _rounded(stored, mantissa, least)
    for r in range(old.shape[0]):
        step = stored[r] / divisor if mantissa < 23 else stored[r]
        moved = step - old[r]
        gain = moved * (moved * energy[r] - 2 * product[r])
        use = move[r] > 0 and gain < 0 and moved != 0
        move[r] = moved if use else np.float32(0)
        change[r] = gain if use else np.float32(0)


@compiled(error_model="numpy", fastmath={"contract"})
def _add_products(a: Floats, b: Floats, sums: Floats) -> None:
    for r in range(a.shape[0]):
        sums[r] += a[r] * b[r]


@compiled(error_model="numpy")
def _leave(c: Floats, E: Floats, changes: Floats, a: int, stop: int) -> None:
    """Add what changed in a strip of rows to its errors, and pass it on."""
    for k in range(E.shape[0]):
        for r in range(a, stop):
            changes[k, r] = c[k, r - a]
            E[k, r] += c[k, r - a]


@compiled(error_model="numpy")
def _fit_rows(block: Any, start: int, stop: int, rounding: Any) -> None:
    """Fit the steps of the rows from `start` to `stop`; see `fit_steps`."""
    H, EH, E, changes, codes, scale, zero, fitted, moved, _, table, parts = block
    widest = (parts[:, 2] - parts[:, 1]).max()
    v = np.zeros((widest + 3, ROWS), np.float32)  # codes in steps; strips are whole, so that no row depends on another
    c = np.zeros((E.shape[0] + 3, ROWS), np.float32)  # changes of errors so far
    vH, now = np.zeros((4, ROWS), np.float32), np.zeros((4, ROWS), np.float32)
    old = np.ones(ROWS, np.float32)
    buffers = np.zeros((5, ROWS), np.float32)
    energy, product, move, change, stored = buffers[0], buffers[1], buffers[2], buffers[3], buffers[4]
    for a in range(start, stop, ROWS):
        width = min(ROWS, stop - a)
        c[:] = 0
        for part in range(parts.shape[0]):
            g, first, end = parts[part]
            v[end - first :] = 0
            for k in range(first, end):
                for r in range(width):
                    v[k - first, r] = position_of(codes[k, a + r], table) - zero[g, a + r]
            energy[:], product[:] = 0, 0
            for k in range(first, end, 4):
                columns = min(4, end - k)
                vH[:], now[:] = 0, 0
                for i in range(columns):
                    for r in range(width):
                        now[i, r] = EH[k + i, a + r]
                feed_four(vH, v, H[k : k + 4, first:], end - first)
                feed_four(now, c, H[k : k + 4], first)
                for i in range(columns):
                    _add_products(v[k - first + i], vH[i], energy)
                    _add_products(v[k - first + i], now[i], product)
            for r in range(width):
                old[r] = scale[g, a + r]
            _best_moves(old, energy, product, rounding, move, change, stored)
            for r in range(width):
                fitted[a + r] += change[r]
                scale[g, a + r] += move[r]
                moved[a + r] |= move[r] != 0
            for k in range(first, end):
                for r in range(width):
                    c[k, r] = -(v[k - first, r] * move[r])
        _leave(c, E, changes, a, a + width)


@compiled(error_model="numpy", fastmath={"contract"})
def _feed_group(t: Floats, e: Floats, u: Floats) -> None:
    """Feed the errors of the columns before into the target of one column."""
    for k in range(u.shape[0]):
        for r in range(t.shape[0]):
            t[r] += e[k, r] * u[k]


@compiled(error_model="numpy")
def _try_octaves(block: Any, start: int, stop: int, limits: Floats) -> None:
    """Try other steps in the rows from `start` to `stop`; see `fit_octaves`."""
    H, EH, E, changes, codes, scale, _, fitted, moved, diagonal, table, parts = block
    widest = (parts[:, 2] - parts[:, 1]).max()
    matrices, vectors = np.zeros((6, widest, ROWS), np.float32), np.ones((7, ROWS), np.float32)
    values, misses, e, best, kept, tried = matrices[0], matrices[1], matrices[2], matrices[3], matrices[4], matrices[5]
    old, step, chosen, t, position = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4]
    loss, least = vectors[5], vectors[6]
    c, now = np.zeros((E.shape[0] + 3, ROWS), np.float32), np.zeros((4, ROWS), np.float32)
    for a in range(start, stop, ROWS):
        width = min(ROWS, stop - a)
        c[:] = 0
        for part in range(parts.shape[0]):
            g, first, end = parts[part]
            size = end - first
            for r in range(width):
                old[r] = scale[g, a + r]
            for k in range(first, end, 4):
                columns = min(4, end - k)
                now[:] = 0
                for i in range(columns):
                    for r in range(width):
                        now[i, r] = EH[k + i, a + r]
                feed_four(now, c, H[k : k + 4], first)
                for i in range(columns):
                    j = k - first + i
                    for r in range(width):
                        misses[j, r] = now[i, r] / diagonal[k + i]
                        values[j, r] = position_of(codes[k + i, a + r], table) * old[r]
            least[:], best[:] = 0, 0
            chosen[:] = old
            for r in range(width):
                for j in range(size):
                    kept[j, r] = codes[first + j, a + r]
            for factor in OCTAVES:
                for r in range(ROWS):
                    step[r] = min(max(old[r] * np.float32(factor), limits[0]), limits[1])
                loss[:] = 0
                for j in range(size):
                    d = diagonal[first + j]
                    for r in range(ROWS):
                        t[r] = misses[j, r] + values[j, r]
                    _feed_group(t, e, H[first + j, first : first + j] / d)
                    for r in range(ROWS):
                        position[r] = t[r] / step[r]
                    round_to_levels(position, table, tried[j])
                    weight = np.float32(0) if d == np.inf else d
                    for r in range(ROWS):
                        e[j, r] = values[j, r] - step[r] * position_of(tried[j, r], table)
                        loss[r] += weight * e[j, r] * (2 * (t[r] - values[j, r]) + e[j, r])
                for r in range(width):
                    if loss[r] < least[r]:
                        least[r], chosen[r] = loss[r], step[r]
                        for j in range(size):
                            kept[j, r], best[j, r] = tried[j, r], e[j, r]
            for r in range(width):
                fitted[a + r] += least[r]
                moved[a + r] |= least[r] < 0
                scale[g, a + r] = chosen[r]
            for j in range(size):
                for r in range(width):
                    codes[first + j, a + r] = np.int32(kept[j, r])
                    c[first + j, r] = best[j, r]
        _leave(c, E, changes, a, a + width)


@compiled(error_model="numpy", fastmath={"reassoc", "nsz"})
def _sum(values: Floats) -> np.float32:
    total = np.float32(0)
    for k in range(values.shape[0]):
        total += values[k]
    return total


@compiled(error_model="numpy")
def _search_rows(block: Any, start: int, stop: int) -> None:
    """Search the groups of the rows from `start` to `stop`; see `least_squares`."""
    weights, importance, steps, best, table, size = block
    columns, groups = weights.shape[1], best.shape[1]
    buffers = np.empty((4, columns), np.float32)
    step, position, code, error = buffers[0], buffers[1], buffers[2], buffers[3]
    least = np.empty(groups, np.float32)
    for row in range(start, stop):
        w = weights[row]
        least[:] = np.inf
        best[row] = 0
        for trial in range(steps.shape[0]):
            for g in range(groups):
                step[g * size : (g + 1) * size] = steps[trial, row, g]
            for k in range(columns):
                position[k] = w[k] / step[k]
            round_to_levels(position, table, code)
            for k in range(columns):
                miss = table.levels[int(code[k])] * step[k] - w[k]
                error[k] = miss * miss * importance[k]
            for g in range(groups):
                total = _sum(error[g * size : (g + 1) * size])
                if total < least[g]:
                    least[g] = total
                    best[row, g] = trial
