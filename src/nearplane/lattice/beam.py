"""Several nearest planes at once: a beam of candidates for every row, nested so that a wider one is never worse.

Column by column every candidate proposes codes, and a fixed number of them survives (the M-algorithm). Inside a block of columns
candidates carry their own targets; what a block did wrong reaches the later columns as one matrix product, as in `solvers.py`. A
block is swept by a kernel of the device (`kernels.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.errors import NumericalError, RecipeError
from nearplane.lattice.factor import Factor
from nearplane.lattice.grid import Grid, QuantizedMatrix, Weights
from nearplane.lattice.kernels import kernels_of


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
    kernels = kernels_of(W)
    if memory is None:
        memory = kernels.memory(W.device)
    group = grid.group[order]
    each = 2 * W.element_size() + 4  # a target, its copy when candidates change places, a code
    most = max(1, memory // (each * beam * W.shape[1]))
    if (lanes := kernels.lanes) < most < len(W):  # whole runs of lanes, about as many rows every time
        strips = -(-len(W) // (most // lanes * lanes))
        most = -(-len(W) // (strips * lanes)) * lanes
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
    kernels = kernels_of(W)
    for a in range(0, n, block):
        b = min(a + block, n)
        part = slice(a, b)
        here = Weights(W[:, part], weights.scale[:, part], weights.zero[:, part], codebook)
        rows_of_U = U[part, a:].to(W.dtype)  # (b - a, columns that are left)
        chosen, parent = kernels.beam(target[:, :, : b - a], here, rows_of_U[:, : b - a], d[part], cost)
        codes, ancestor = kernels.trace(chosen, parent)
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
