"""Kernels in torch for every device; the compiled kernels are tested against them. See `kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.lattice.grid import Codebook, Weights

NORM = 2.5  # exponent in the search for steps; 2.4 in GPTQ, here a square times a square root
LOW = 42  # bits from the unit of high integers of an exact sum to that of low ones
ADDED_AT_ONCE = 1 << 22  # numbers of a product that are added to an exact sum at once
BEAM_BYTES = 1 << 30  # targets and codes of the rows in a beam at a time: enough to keep a GPU busy


class Columns(NamedTuple):
    """Columns of weights and their grid for a sweep, transposed: one row per column or group.

    Args:
        W: (b, out) weights.
        scale, zero: (groups, out) scale and zero of the grid.
        group: (b,) group of every column, int64.
        codebook: Codebook of all columns.
    """

    W: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor
    codebook: Codebook


class Tally(NamedTuple):
    """Sums per row over the columns of a sweep, at almost no cost.

    Args:
        d: (b,) weight of every column: its squared length, or its diagonal entry of the Hessian.
        loss: (out,) sum of `d_j ((t_j - value_j)^2 - (t_j - W_j)^2)` if `moves`, else of `d_j (t_j - value_j)^2`.
        outside: (out,) int32 count of targets more than half a step beyond the codes; (0,) if it is not needed.
        moves: Whether `W` holds the values of the codes before the sweep instead of weights.
    """

    d: Tensor
    loss: Tensor
    outside: Tensor
    moves: bool


class Rounding(NamedTuple):
    """Rounding of positive steps to those that a file holds: floats of few bits, divided by a number.

    Args:
        mantissa: Bits of the floats behind the point. Powers of two, with 0, are not fitted by least squares: half and
            twice the step are tried with codes of their own, in groups of at most 32 columns.
        least: Smallest positive float; all are multiples of it.
        divisor: Number by which the file's floats are divided.
        largest: Largest step.
    """

    mantissa: int
    least: float
    divisor: float
    largest: float


@dataclass(slots=True, kw_only=True)
class State:
    """State of coordinate descent over codes and steps, columns first, so that blocks of columns are contiguous.

    Args:
        group: (in,) group of every column.
        codebook: Codebook of the grid.
        scale, zero: (groups, out) current steps and zeros.
        codes: (in, out) int32 current codes.
        E: (in, out) weights minus values.
        H: (in, in) Hessian.
        diagonal: (in,) diagonal of H, infinite for a dead input, whose codes then stay.
        gained, fitted: (out,) changes of the loss by moves of codes, and by moves of steps.
        moved: () bool, whether any code or step moved since it was cleared, kept on the device.
        groups: Number, first column and column after the last of every group, on the host; empty if steps are not fitted.
    """

    group: Tensor
    codebook: Codebook
    scale: Tensor
    zero: Tensor
    codes: Tensor
    E: Tensor
    H: Tensor
    diagonal: Tensor
    gained: Tensor
    fitted: Tensor
    moved: Tensor
    groups: Sequence[tuple[int, int, int]] = ()


class Spans(NamedTuple):
    """Column ranges of a pass of coordinate descent that is one kernel.

    Args:
        starts: (parts + 1,) int32 first column of every part, and the number of columns; with a rounding, a part is a group.
        firsts: (spans + 1,) int32 first part of every span, and the number of parts. Steps of a span are fitted before its
            codes move.
        longest: Number of columns of the longest span.
    """

    starts: Tensor
    firsts: Tensor
    longest: int


def sweep_block(target: Tensor, columns: Columns, U: Tensor, codes: Tensor, E: Tensor, tally: Tally) -> None:
    """Sweep one block of columns; fill `codes` and `E`.

    Args:
        target: (b, out) weights with the error of earlier blocks fed forward; may share the memory of `codes`, because
            row j is read before it is written.
        columns: Weights and grid.
        U: (b, b) triangle of the block, contiguous or not.
        codes: (b, out) int32, written.
        E: (b, out) errors, written.
        tally: Sums over the columns of the sweep, updated.
    """
    W, codebook = columns.W, columns.codebook
    scale, zero = columns.scale[columns.group], columns.zero[columns.group]  # (b, out)
    for j in range(len(W)):
        t = target[j] + U[:j, j] @ E[:j]
        position = t / scale[j] + zero[j]
        code = codebook.nearest(position)
        codes[j] = code
        E[j] = W[j] - scale[j] * (codebook.position(code) - zero[j])
        new_loss, old_loss = (t - W[j] + E[j]).square(), (t - W[j]).square()
        tally.loss.add_(tally.d[j].to(t) * (new_loss - old_loss if tally.moves else new_loss))
        if len(tally.outside):
            tally.outside.add_(codebook.outside(position))


def best_candidate(weights: Tensor, scale: Tensor, zero: Tensor, codebook: Codebook) -> Tensor:
    """Return (n,) the first candidate with the least error in every group.

        error = sum_k |e_k|^2.5,  e = weights - scale (codes - zero)

    Args:
        weights: (n, g) weights.
        scale, zero: (candidates, n) steps and zeros.
        codebook: Codebook of all groups.
    """
    least = torch.full_like(scale[0], torch.inf)
    best = torch.zeros_like(least, dtype=torch.int64)
    for c, (s, z) in enumerate(zip(scale, zero, strict=True)):
        codes = codebook.nearest((weights / s[:, None]).add_(z[:, None]))
        error = (codebook.position(codes) - z[:, None]).mul_(s[:, None]).sub_(weights).abs_().pow_(NORM).sum(-1)
        best.masked_fill_(error < least, c)
        least = torch.minimum(error, least)
    return best


def beam_paths(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sweep one block of columns with several candidates per row; update `cost`.

    Args:
        target: (out, beam, b) targets of every candidate, with the error of earlier blocks fed forward.
        weights: Weights and grid of these columns.
        U: (b, b) triangle of the block.
        d: (b,) squared lengths, 0 for a dead input.
        cost: (out, beam) cost of every candidate, infinite for one that does not exist.

    Returns:
        (out, beam, b) codes int32 of each candidate at the end of the block, (out, beam, b) their errors, weights minus
        values, and (out, beam) int64 its place before the block.
    """
    codes, ancestor = trace(*beam_block(target, weights, U, d, cost))
    return codes, errors(weights, codes), ancestor


def errors(weights: Weights, codes: Tensor) -> Tensor:
    """Return the errors of (out, beam, b) codes, weights minus values."""
    W, scale, zero, codebook = weights
    return W[:, None] - scale[:, None] * (codebook.position(codes, W.dtype) - zero[:, None])


def beam_block(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns with the arguments of `beam_paths`; update `cost`.

    Returns:
        (b, out, beam) chosen code of each place, and (b, out, beam) int64 the candidate that proposed it.
    """
    out, beam, width = target.shape
    target = target.clone()
    chosen = target.new_empty(width, out, beam)
    parent = torch.arange(beam, device=d.device).repeat(width, out, 1)
    side = (torch.arange(2 * beam, device=d.device, dtype=target.dtype) % 2 * 2 - 1).expand(out, -1)  # -1, 1, -1, ...
    for j in range(width):
        columns = slice(j, j + 1)
        column = Weights(weights.W[:, columns], weights.scale[:, columns], weights.zero[:, columns], weights.codebook)
        t, (w, s, z, codebook) = target[:, :, j], column
        chosen[j] = codebook.nearest(t / s + z)
        survivors = _survivors(t, chosen[j], column, side, d[j], cost)
        for kept, each in zip((chosen[j], parent[j], cost), survivors, strict=True):
            kept.copy_(torch.where(d[j] > 0, each, kept))  # a dead input keeps all candidates
        value = s * (codebook.position(chosen[j]) - z)
        target = target.gather(1, parent[j][:, :, None].expand(-1, -1, width))
        target[:, :, j + 1 :] += (w - value)[:, :, None] * U[j, j + 1 :]
    return chosen, parent


def _survivors(
    t: Tensor, nearest: Tensor, column: Weights, side: Tensor, length: Tensor, cost: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the places of one column.

    Return (out, beam) codes, (out, beam) int64 the candidate that proposed each, and (out, beam) the costs after this
    column, infinite where no proposal is left.

    Every candidate has two next proposals: one goes down from its nearest code, one goes up from the code above it.
    Distances grow in both directions, also on a table of levels.

    Args:
        t: (out, beam) targets.
        nearest: (out, beam) codes nearest to the targets.
        column: (out, 1) weights and grid.
        side: (out, 2 beam) directions of the proposals: -1, 1, -1, ...
        length: () squared length of this column.
        cost: (out, beam) costs before this column.
    """
    out, beam = t.shape
    _, s, z, codebook = column
    low = -torch.inf if codebook.low is None else codebook.low
    high = torch.inf if codebook.high is None else codebook.high
    code = torch.stack([nearest, nearest + 1], 2).view(out, -1)
    t, before = t.repeat_interleave(2, 1), cost.repeat_interleave(2, 1)

    def price(code: Tensor, t: Tensor, before: Tensor) -> Tensor:
        total = before + length * (t - s * (codebook.position(code) - z)).square()
        return total.masked_fill((code < low) | (code > high), torch.inf)

    total = price(code, t, before)
    chosen, proposers, costs = [], [], []
    for place in range(beam):
        proposals = slice(0, 2 * place + 2 if place else 1)
        cheapest = total[:, proposals].argmin(1, keepdim=True)  # (out, 1), the first of equal costs
        chosen.append(code.gather(1, cheapest))
        proposers.append(cheapest // 2)
        costs.append(total.gather(1, cheapest))
        next_code = chosen[-1] + side.gather(1, cheapest)
        code.scatter_(1, cheapest, next_code)
        total.scatter_(1, cheapest, price(next_code, t.gather(1, cheapest), before.gather(1, cheapest)))
    return torch.cat(chosen, 1), torch.cat(proposers, 1), torch.cat(costs, 1)


def trace(chosen: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the candidates at the end of a block back to its start.

    Args:
        chosen: (b, out, beam) chosen code of each place.
        parent: (b, out, beam) int64 previous place of the candidate that proposed it.

    Returns:
        (out, beam, b) codes int32 of each candidate, and (out, beam) its place before the block.
    """
    width, out, beam = chosen.shape
    codes = torch.empty(out, beam, width, dtype=torch.int32, device=chosen.device)
    place = torch.arange(beam, device=chosen.device).expand(out, beam)
    for j in range(width - 1, -1, -1):
        codes[:, :, j] = chosen[j].gather(1, place)
        place = parent[j].gather(1, place)
    return codes, place


def add_exactly(product: Tensor, high: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """Add a product to integers in place.

        high += trunc(x)    low += trunc((x - trunc(x)) 2^42)    x = product unit

    Args:
        product: (rows, columns) float32 or float64.
        high, low: (rows, columns) int64.
        unit: (1,) float64, a power of two.

    Returns:
        (1,) float64, the largest magnitude of the product; NaN if it has one. If it is above 2^62 / unit, the integers
        are without meaning.
    """
    step = max(1, ADDED_AT_ONCE // max(1, product.shape[1]))
    # fresh memory for each part would take longer than the sums
    scaled = torch.empty_like(product[:step], dtype=torch.float64)
    integers = torch.empty_like(scaled, dtype=torch.int64)
    for a in range(0, len(product), step):
        rows = slice(a, a + step)
        part = product[rows]
        x, whole = scaled[: len(part)], integers[: len(part)]
        high[rows].add_(whole.copy_(x.copy_(part).mul_(unit)))
        low[rows].add_(whole.copy_(x.frac_().mul_(1 << LOW)))
    smallest, largest = product.aminmax()
    return torch.maximum(-smallest, largest).double()[None]
