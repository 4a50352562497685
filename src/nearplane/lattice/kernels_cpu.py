"""Sweep of a block of columns, search for steps and addition to exact sums, on the CPU, compiled by Numba.

`kernels_torch.py` has the same algorithms in torch, and does what is not float32. Rows are independent, and so are groups:
threads divide them and never wait for each other. The sweep handles rows in strips that fit the cache: a strip passes
through all columns of the block before the next strip starts. The first call compiles for a second or two; the result is
cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.compiled import compiled
from nearplane.lattice import kernels_torch
from nearplane.lattice.grid import LEADING, Codebook, Table
from nearplane.lattice.kernels_torch import LOW, Columns, Tally

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

STRIP_ROWS = 256  # the errors of a strip, STRIP_ROWS * block * 4 bytes, stay in the second-level cache
MIN_SEARCHED_WEIGHTS = 10_000  # per thread: a search of fewer weights is not worth a thread
MIN_ADDED = 1 << 16  # numbers per thread: fewer are not worth a thread
LOW_UNITS = 2.0**LOW
MAX_COUNTED = 16  # midpoints that are all compared with a position; among more it is looked up
# The last bits of float64(n + SHIFT) are those of the integer n, if |n| < 2^51. Processors convert no vectors otherwise.
SHIFT, SHIFT_BITS, SHIFTED = 1.5 * 2.0**52, 0x4338 << 48, 2.0**51


def in_threads(kernel: Callable[[int, int], Any], count: int, *, run: int = 1) -> None:
    """Call a kernel in torch's number of threads, with parts `start, stop` of `range(count)` in multiples of `run`."""
    threads = torch.get_num_threads()
    share = -(-count // (run * threads)) * run
    if share >= count:
        kernel(0, count)
        return
    starts = range(0, count, share)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(kernel, starts, [*starts[1:], count]))


def sweep_block(target: Tensor, columns: Columns, U: Tensor, codes: Tensor, E: Tensor, tally: Tally) -> None:
    """Sweep one block of columns, stored columns first; fill `codes` and `E`.

        t_j = target_j + sum_{k<j} E_k U_kj
        codes_j = clip(round(t_j / scale_j + zero_j)) ;  E_j = W_j - scale_j (codes_j - zero_j)

    Equal to the torch form except for the order of summation.

    Args:
        target: (b, out) weights with the error of earlier blocks fed forward.
        columns: Weights and grid; the torch form handles dtypes other than float32.
        U: (b, b) unit upper triangle of the block.
        codes: (b, out) int32, written; may share the memory of `target`.
        E: (b, out) errors, written.
        tally: Sums over the columns of the sweep, updated.
    """
    if columns.W.dtype != torch.float32:
        kernels_torch.sweep_block(target, columns, U, codes, E, tally)
        return
    b, out = columns.W.shape
    UT = U.new_zeros(b + 3, b)  # row j belongs to column j; three more rows complete groups of four columns
    UT[:b] = U.T
    t, w, s, z, group = (x.contiguous().numpy() for x in (target, *columns[:4]))
    book, d = columns.codebook, tally.d.to(torch.float32).contiguous().numpy()
    tallies = d, tally.loss.numpy(), tally.outside.numpy(), tally.moves, book.limits
    block = t, w, s, z, group, book.table(torch.float32), UT.numpy(), codes.numpy(), E.numpy(), *tallies
    in_threads(partial(_sweep_rows, block), out, run=16)  # whole cache lines


def best_candidate(weights: Tensor, scale: Tensor, zero: Tensor, codebook: Codebook) -> Tensor:
    """Return (n,) the first candidate with the least error in every group.

        error = sum_k |e_k|^2.5,  e = weights - scale (codes - zero)

    Args:
        weights: (n, g) weights; the torch form handles dtypes other than float32.
        scale, zero: (candidates, n) steps and zeros.
        codebook: Codebook of all groups.
    """
    if weights.dtype != torch.float32:
        return kernels_torch.best_candidate(weights, scale, zero, codebook)
    n, size = weights.shape
    best = torch.empty(n, dtype=torch.int64)
    w, s, z = (x.contiguous().numpy() for x in (weights, scale.T, zero.T))
    search = partial(_search_groups, w, s, z, codebook.table(weights.dtype), best.numpy())
    in_threads(search, n, run=-(-MIN_SEARCHED_WEIGHTS // size))
    return best


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place; the same bits as the torch form."""
    rows, columns = product.shape
    values, scale = product.contiguous().numpy(), float(unit)
    integer = np.int32 if values.dtype == np.float32 else np.int64
    bits, peaks = values.view(integer), np.empty(rows, integer)
    with np.errstate(over="ignore"):  # then all that is finite can be shifted
        limit = np.array([SHIFTED / scale]).astype(values.dtype).view(integer)[0]
    integers = _flat(high), _flat(low), high.stride(0), low.stride(0)
    in_threads(partial(_add_rows, values, bits, *integers, scale, limit, peaks), rows, run=-(-MIN_ADDED // columns))
    return torch.from_numpy(peaks.max(keepdims=True).view(values.dtype)).double()


def _flat(x: Tensor) -> Indices:
    """Return the memory between the first and the last number of a matrix, whose rows lie in order."""
    rows, columns = x.shape
    flat: Indices = x.as_strided(((rows - 1) * x.stride(0) + columns,), (1,)).numpy()
    return flat


@compiled(error_model="numpy")
def round_integer(position: Any, low: Any, high: Any) -> Any:
    """Return the integer nearest to a position within limits. NaN stays NaN; loops over it compile without branches."""
    code = np.rint(position)
    code = low if code < low else code
    return high if code > high else code


@compiled(error_model="numpy")
def round_code(position: Any, table: Table) -> Any:
    """Return the code nearest to a position."""
    if len(table.levels) == 0:
        return round_integer(position, table.low, table.high)
    return table.low + np.searchsorted(table.middles, position)


@compiled(error_model="numpy")
def round_to_levels(position: Floats, table: Table, codes: Floats) -> None:
    """Find the codes nearest to positions, which lie in order in memory, on a table of levels."""
    last = len(table.middles)
    if last > MAX_COUNTED:
        bits = position.view(np.uint32)
        for r in range(position.shape[0]):
            code = int(table.first[bits[r] >> LEADING])
            while code < last and table.middles[code] < position[r]:
                code += 1
            codes[r] = code
        return
    codes[:] = 0
    for middle in table.middles:
        for r in range(position.shape[0]):
            codes[r] += np.float32(position[r] > middle)


@compiled(error_model="numpy")
def position_of(code: Any, table: Table) -> Any:
    """Return the position of a code, in steps; a code beyond the levels has the position of the last one."""
    if len(table.levels) == 0:
        return code
    return table.levels[max(0, min(int(code), len(table.levels) - 1))]


@compiled(error_model="numpy", fastmath={"contract"})
def feed_four(t: Floats, e: Floats, u: Floats, j: int) -> None:
    """Feed the errors of the j columns before into the targets `t` (4, width) of four columns; `u` (4, >= j)."""
    for k in range(0, j, 4):
        a0, a1, a2, a3 = u[0, k], u[0, k + 1], u[0, k + 2], u[0, k + 3]
        b0, b1, b2, b3 = u[1, k], u[1, k + 1], u[1, k + 2], u[1, k + 3]
        c0, c1, c2, c3 = u[2, k], u[2, k + 1], u[2, k + 2], u[2, k + 3]
        d0, d1, d2, d3 = u[3, k], u[3, k + 1], u[3, k + 2], u[3, k + 3]
        for r in range(t.shape[1]):
            e0, e1, e2, e3 = e[k, r], e[k + 1, r], e[k + 2, r], e[k + 3, r]
            t[0, r] += e0 * a0 + e1 * a1 + e2 * a2 + e3 * a3
            t[1, r] += e0 * b0 + e1 * b1 + e2 * b2 + e3 * b3
            t[2, r] += e0 * c0 + e1 * c1 + e2 * c2 + e3 * c3
            t[3, r] += e0 * d0 + e1 * d1 + e2 * d2 + e3 * d3


@compiled(error_model="numpy", fastmath={"contract"})
def _feed(t: Floats, e: Floats, u: float) -> None:
    """Feed the errors of one earlier column into the targets of one column."""
    for r in range(t.shape[0]):
        t[r] += e[r] * u


@compiled(error_model="numpy")
def _round(
    t: Floats,
    w: Floats,
    scale: Floats,
    zero: Floats,
    table: Table,
    codes: Integers,
    E: Floats,
    e: Floats,
    scratch: Floats,
) -> None:
    """Round one column of a strip. No fused products here: values must equal the decoded codes exactly."""
    if len(table.levels) == 0:  # a separate loop, which the compiler vectorizes
        for r in range(t.shape[0]):
            code = round_integer(t[r] / scale[r] + zero[r], table.low, table.high)
            codes[r] = np.int32(code)
            E[r] = e[r] = w[r] - scale[r] * (code - zero[r])
        return
    position, found = scratch[0, : t.shape[0]], scratch[1, : t.shape[0]]
    for r in range(t.shape[0]):
        position[r] = t[r] / scale[r] + zero[r]
    round_to_levels(position, table, found)
    for r in range(t.shape[0]):
        codes[r] = np.int32(found[r])
        E[r] = e[r] = w[r] - scale[r] * (position_of(found[r], table) - zero[r])


@compiled(error_model="numpy", fastmath={"contract"})
def _tally(t: Floats, w: Floats, e: Floats, d: float, loss: Floats, moves: bool) -> None:
    """Add the loss of one column of a strip, or the change of loss by its moves."""
    if moves:
        for r in range(t.shape[0]):
            old_error = t[r] - w[r]
            loss[r] += d * e[r] * (old_error + old_error + e[r])
        return
    for r in range(t.shape[0]):
        residual = t[r] - w[r] + e[r]
        loss[r] += d * residual * residual


@compiled(error_model="numpy")
def _count(t: Floats, scale: Floats, zero: Floats, low: Any, high: Any, outside: Integers) -> None:
    """Count the targets of one column of a strip that lie beyond the limits."""
    for r in range(t.shape[0]):
        position = t[r] / scale[r] + zero[r]
        outside[r] += np.int32(position < low) + np.int32(position > high)


@compiled(error_model="numpy")
def _sweep_rows(block: Any, start: int, stop: int) -> None:
    """Sweep the rows from `start` to `stop`, strip by strip; see `sweep_block` and `Tally`."""
    target, W, scale, zero, group, table, UT, codes, E, d, loss, outside, moves, limits = block
    low, high = np.float32(limits[0]), np.float32(limits[1])
    width = min(STRIP_ROWS, stop - start)
    t = np.zeros((4, width), np.float32)
    e = np.zeros((W.shape[0], width), np.float32)
    scratch = np.empty((2, width), np.float32)
    for a in range(start, stop, width):
        c = min(a + width, stop)
        for first in range(0, W.shape[0], 4):
            columns = min(4, W.shape[0] - first)
            for i in range(columns):
                for r in range(a, c):
                    t[i, r - a] = target[first + i, r]
            feed_four(t, e, UT[first : first + 4], first)
            for i in range(columns):
                j = first + i
                for k in range(first, j):
                    _feed(t[i], e[k], UT[j, k])
                g = group[j]
                _round(
                    t[i, : c - a],
                    W[j, a:c],
                    scale[g, a:c],
                    zero[g, a:c],
                    table,
                    codes[j, a:c],
                    E[j, a:c],
                    e[j],
                    scratch,
                )
                _tally(t[i, : c - a], W[j, a:c], e[j, : c - a], d[j], loss[a:c], moves)
                if len(outside) > 0:
                    _count(t[i, : c - a], scale[g, a:c], zero[g, a:c], low, high, outside[a:c])


@compiled(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def _error_of_integers(w: Floats, s: float, z: float, low: float, high: float) -> np.float32:
    total = np.float32(0)
    for k in range(w.shape[0]):
        e = np.abs(w[k] - s * (round_integer(w[k] / s + z, low, high) - z))
        total += e * e * np.sqrt(e)
    return total


@compiled(error_model="numpy")
def _error_on_levels(w: Floats, s: float, z: float, table: Table, scratch: Floats) -> np.float32:
    total = np.float32(0)
    position, found = scratch[0], scratch[1]
    for k in range(w.shape[0]):
        position[k] = w[k] / s + z
    round_to_levels(position, table, found)
    for k in range(w.shape[0]):
        e = np.abs(w[k] - s * (position_of(found[k], table) - z))
        total += e * e * np.sqrt(e)
    return total


@compiled(error_model="numpy")
def _search_groups(
    weights: Floats, scale: Floats, zero: Floats, table: Table, best: Indices, start: int, stop: int
) -> None:
    """Search the groups from `start` to `stop`; see `best_candidate`."""
    scratch = np.empty((2, weights.shape[1]), np.float32)
    for i in range(start, stop):
        least = np.float32(np.inf)
        best[i] = 0
        for c in range(scale.shape[1]):
            w, s, z = weights[i], scale[i, c], zero[i, c]
            if len(table.levels) > 0:
                error = _error_on_levels(w, s, z, table, scratch)
            else:
                error = _error_of_integers(w, s, z, table.low, table.high)
            if error < least:
                least = error
                best[i] = c


@compiled(error_model="numpy")
def _add_rows(
    product: npt.NDArray[Any],
    bits: npt.NDArray[Any],
    high: Indices,
    low: Indices,
    high_stride: int,
    low_stride: int,
    unit: float,
    limit: Any,
    peaks: npt.NDArray[Any],
    start: int,
    stop: int,
) -> None:
    """Add the rows from `start` to `stop`.

    Args:
        product, bits: (rows, columns) numbers, and their bits as integers.
        high, low: Integers; rows begin `high_stride` and `low_stride` numbers apart.
        unit: Unit of the sum.
        limit: Bits of the first magnitude that cannot be shifted.
        peaks: (rows,) largest bits without the sign of each row, written; they are ordered as magnitudes, NaN last.
        start, stop: First row, and the one after the last.
    """
    columns = product.shape[1]
    unsigned = np.iinfo(bits.dtype).max
    shifted_high, shifted_low = np.empty(columns, np.float64), np.empty(columns, np.float64)
    integers_high, integers_low = shifted_high.view(np.int64), shifted_low.view(np.int64)
    for i in range(start, stop):
        row, row_bits = product[i], bits[i]
        wholes = high[i * high_stride : i * high_stride + columns]
        rests = low[i * low_stride : i * low_stride + columns]
        peak = row_bits[0] & unsigned
        for j in range(columns):
            peak = max(peak, row_bits[j] & unsigned)
        peaks[i] = peak
        if peak < limit:
            for j in range(columns):
                x = row[j] * unit
                whole = np.trunc(x)
                shifted_high[j] = whole + SHIFT
                shifted_low[j] = np.trunc((x - whole) * LOW_UNITS) + SHIFT
            for j in range(columns):
                wholes[j] += integers_high[j] - SHIFT_BITS
                rests[j] += integers_low[j] - SHIFT_BITS
        else:
            for j in range(columns):
                x = row[j] * unit
                whole = np.trunc(x)
                wholes[j] += np.int64(whole)
                rests[j] += np.int64((x - whole) * LOW_UNITS)
