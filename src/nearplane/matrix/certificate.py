"""Certificate of a quantized matrix: its measured losses and bounds, which `quantize` records and `verify` recomputes.

Needs the weights, the codes and the statistics of the inputs, but not the history of the solve.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from nearplane.coding.blob import Contents, size
from nearplane.lattice.bounds import certify, limit, limit_of_all, losses_on_extra
from nearplane.lattice.factor import read
from nearplane.lattice.grid import Grid, ProductGrid, QuantizedMatrix
from nearplane.lattice.solvers import SOLVERS, Solution, sweep_planes
from nearplane.matrix.inputs import Inputs, corrected
from nearplane.recipe.schemes import AnyScheme
from nearplane.record.record import MAX_CERTIFIED_INPUTS, LayerRecord, row_groups
from nearplane.system.memory import release


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedMatrix:
    """A quantized matrix with facts about its solve.

    Args:
        matrix: Codes and grid as stored.
        base: Step of exponent 0 in the sweep of entropy-coded weights.
        outside: (out,) number of clipped targets in the sweep on this grid, see `Solution`; None: swept again.
        tuned: Whether codes and steps were trained after the sweep, so that no bound of the sweep holds.
    """

    matrix: QuantizedMatrix
    base: float | None = None
    outside: Tensor | None = None
    tuned: bool = False


def remeasure(name: str, W: Tensor, inputs: Inputs, scheme: AnyScheme, known: SolvedMatrix) -> LayerRecord:
    """Return the record that a run would write for a layer with known codes and grid; `verify` compares with it.

    Args:
        name: Full name of the layer.
        W: (out, in) original weights.
        inputs: Statistics of the layer's inputs.
        scheme: The layer's own scheme, with its own bits.
        known: Codes and grid of the layer.

    Raises:
        NumericalError: A Hessian cannot be factored.
    """
    known = replace(known, matrix=known.matrix.to(W.device))
    return measure(name, W, corrected(W, inputs, scheme), known, inputs, scheme)


def measure(
    name: str, W: Tensor, aim: tuple[Tensor, float], known: SolvedMatrix, inputs: Inputs, scheme: AnyScheme
) -> LayerRecord:
    """Measure a quantized matrix against its target.

    Args:
        name: Full name of the layer.
        W: (out, in) weights.
        aim: (out, in) target that was quantized, and the part of the correction in it; see `inputs.corrected`.
        known: Codes and grid.
        inputs: Statistics of the layer's inputs.
        scheme: Scheme of the layer: order, damping and storage of the codes.

    Returns:
        The layer's record without seconds, bytes, checksum and the rate that was asked for.
    """
    release()  # free the solve's memory, because measuring needs as much
    (target, correction), matrix, base, outside = aim, known.matrix, known.base, known.outside
    moments, H, grid = inputs.moments, inputs.moments.H, matrix.grid
    damped, sweep = inputs.damped_for_the_correction(scheme), inputs.factor_of_the_sweep(scheme)
    on_grid = QuantizedMatrix(codes=matrix.codes, grid=grid.scaled_to(base))  # as swept
    bounded = SOLVERS[scheme.solver].bounded and not known.tuned and not scheme.joins_rows
    if not bounded:
        outside = None
    elif scheme.entropy_coded:  # codes have no limits
        outside = torch.zeros(len(target), dtype=torch.int32, device=target.device)
    elif outside is None:  # the final codes do not show where the sweep clipped
        wide = target.to(torch.promote_types(W.dtype, torch.float32))
        outside = sweep_planes(wide, cast(Grid, grid), sweep).outside
    values = None if base is None else matrix.decode()
    solution = Solution(matrix=cast("QuantizedMatrix[Grid]", on_grid), outside=outside)
    figures, sweep_damp = certify(W, target, solution, H, sweep, values=values), sweep.damp
    del sweep
    inputs.certified(scheme)
    parts = [] if moments.extra is None else [moments.extra, *moments.extra.by_source()]
    on_extra = [losses_on_extra(W, target, on_grid, part, values=values) for part in parts if part is not None]
    entropy = None  # on fixed grids; else bits per weight under the tables in the file
    if isinstance(grid, ProductGrid):
        on_host = QuantizedMatrix(codes=matrix.codes, grid=grid).to("cpu")
        entropy = size(Contents.of(on_host.codes, on_host.grid)).payload / matrix.codes.numel()
    losses = figures.row_losses  # (out,), means over the inputs
    weight = grid.row_weight().to(losses)
    energy = target.to(losses).square().mean(1) * weight
    groups = means(losses, row_groups(*W.shape))
    pruned = damped.dead if moments.alive is None else damped.dead & moments.alive
    facts = (losses * weight).mean(), energy.min(), energy.double().log2().mean(), damped.dead.sum(), pruned.sum()
    loss, least, mean_log_energy, dead, pruned_inputs, *others = read(*facts, groups, *on_extra)
    row_losses, found = others[: len(groups)], iter(others[len(groups) :])
    none: tuple[float | None, ...] = (None, None, None)
    extra, *by_source = [none if part is None else (next(found), next(found), next(found)) for part in parts] or [none]
    measured = {field.name: getattr(figures, field.name) for field in fields(figures) if field.name != "row_losses"}
    return LayerRecord(
        name=name,
        out_features=W.shape[0],
        in_features=W.shape[1],
        **measured,
        format=scheme.number_format.name,
        row_losses=tuple(float(f"{each:.9g}") for each in row_losses),
        limit=None if len(H) > MAX_CERTIFIED_INPUTS else limit_under(inputs, loss, energy, least, mean_log_energy),
        entropy=entropy,
        base=base,
        correction=correction,
        damp=damped.damp,
        sweep_damp=sweep_damp,
        extra_loss=extra[0],
        extra_relative_loss=extra[1],
        extra_nearest_loss=extra[2],
        extra_by_source=tuple(each[1] for each in by_source),
        dead=int(dead),
        pruned=None if moments.alive is None else int(pruned_inputs),
        tokens=moments.tokens - (moments.blended or 0),
        alike=moments.alike,
        blended=moments.blended,
        order=scheme.order,
        seconds=0.0,
    )


def means(x: Tensor, count: int) -> Tensor:
    """Return (count,) the means of the parts of `x` (n,) by `tensor_split`."""
    if x.device.type == "cpu":
        return torch.stack([part.mean() for part in x.tensor_split(count)])
    size, larger = divmod(len(x), count)  # so many parts have one more
    cut = larger * (size + 1)
    return torch.cat([x[:cut].view(larger, size + 1).mean(1), x[cut:].view(count - larger, size).mean(1)])


def limit_under(inputs: Inputs, loss: float, row_energy: Tensor, least: float, mean_log_energy: float) -> float:
    """Return the limit of `bounds.limit`, without computing eigenvalues if the water level is below all of them.

    Args:
        inputs, loss, row_energy: Inputs with H, loss, and (out,) mean square of every row.
        least, mean_log_energy: Least of these mean squares, and the mean of their base-2 logarithms.
    """
    mean_log = inputs.mean_log_eigenvalue(loss / least) if least > 0 else None
    if mean_log is None:
        return limit(loss, row_energy, inputs.eigenvalues())
    return limit_of_all(loss, mean_log_energy, mean_log)
