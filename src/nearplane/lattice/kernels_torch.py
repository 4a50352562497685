"""The kernels in torch, for every device: the oracles of the compiled ones. See `kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.lattice.codebook import Codebook
from nearplane.lattice.grid import Weights

NORM = 2.5  # of the error search; GPTQ's own is 2.4, this one is a square times a square root
MEMORY = 128 << 20  # bytes of a beam where the device does not say what is free


class Columns(NamedTuple):
    """Some columns as sweeps take them, a row for every column or group.

    Args:
        W: (b, out) weights.
        scale, zero: (groups, out) of the grid.
        group: (b,) group of every column, int64.
        codebook: of all of them.
    """

    W: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor
    codebook: Codebook


class Tally(NamedTuple):
    """What a sweep adds up on its way, row by row, at next to no cost.

    Args:
        d: (b,) weight of every column: its squared length, or its diagonal entry of the Hessian.
        loss: (out,) gets `sum_j d_j ((t_j - value_j)^2 - (t_j - W_j)^2)` if `moves`, else `sum_j d_j (t_j - value_j)^2`.
        outside: (out,) int32, gets how many targets lay more than half a step beyond the codes; (0,) where nobody asks.
        moves: whether `W` are values that the codes leave, and not weights.
    """

    d: Tensor
    loss: Tensor
    outside: Tensor
    moves: bool


def sweep_block(target: Tensor, columns: Columns, U: Tensor, codes: Tensor, E: Tensor, tally: Tally) -> None:
    """Sweep one block of columns; fills `codes` and `E`. The oracle of the compiled kernel.

    Args:
        target: (b, out) weights with the error of earlier blocks fed forward; maybe the memory of `codes`: row j is read first.
        columns: weights and grid.
        U: (b, b) the block's own triangle, contiguous or not.
        codes: (b, out) int32, written.
        E: (b, out) written.
        tally: what is added up besides.
    """
    W, scale, zero, group, codebook = columns
    for j, g in enumerate(group.tolist()):
        t = target[j] + U[:j, j] @ E[:j]
        position = t / scale[g] + zero[g]
        code = codebook.nearest(position)
        codes[j] = code
        E[j] = W[j] - scale[g] * (codebook.position(code) - zero[g])
        missed, before = (t - W[j] + E[j]).square(), (t - W[j]).square()
        tally.loss.add_(tally.d[j].to(t) * (missed - before if tally.moves else missed))
        if len(tally.outside):
            tally.outside.add_(codebook.outside(position))


def best_candidate(weights: Tensor, scale: Tensor, zero: Tensor, codebook: Codebook) -> Tensor:
    """Return (n,) the first candidate with the least error in every group.

        error = sum_k |e_k|^2.5,  e = weights - scale (codes - zero)

    Args:
        weights: (n, g).
        scale, zero: (candidates, n).
        codebook: of all groups.
    """
    least = torch.full_like(scale[0], torch.inf)
    best = torch.zeros_like(least, dtype=torch.int64)
    for c, (s, z) in enumerate(zip(scale, zero, strict=True)):
        codes = codebook.nearest((weights / s[:, None]).add_(z[:, None]))
        error = (codebook.position(codes) - z[:, None]).mul_(s[:, None]).sub_(weights).abs_().pow_(NORM).sum(-1)
        best.masked_fill_(error < least, c)
        least = torch.minimum(error, least)
    return best


def beam_block(target: Tensor, weights: Weights, U: Tensor, d: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns; updates `cost`. The oracle of the compiled kernel.

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
    low = -torch.inf if codebook.low is None else codebook.low
    high = torch.inf if codebook.high is None else codebook.high
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


def trace(chosen: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the candidates at the end of a block back to its start.

    Args:
        chosen: (b, out, beam) code that each place took.
        parent: (b, out, beam) int64, place before of the candidate that proposed it.

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


def memory(device: torch.device) -> int:
    """Return the bytes that the targets and codes of a beam may take: half of what a GPU has free."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else MEMORY
