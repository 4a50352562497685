"""Certificate of a quantized matrix: its measured losses and bounds, which `quantize` records and `verify` recomputes.

Needs the weights, the codes and the statistics of the inputs, but not the history of the solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nearplane.coding.blob import Contents, size
from nearplane.lattice.bounds import (
    MEASURED_ROWS,
    LayerFacts,
    certificate_of,
    figures_of_rows,
    limit,
    limit_of_all,
    losses_on_extra,
    means_on_extra,
)
from nearplane.lattice.factor import Factor, read, solved_strips, strips
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.solvers import SOLVERS, Solution, sweep_planes
from nearplane.matrix.inputs import LayerInput, SharedInput, Target
from nearplane.recipe.schemes import AnyScheme
from nearplane.recipe.thresholds import MAX_CERTIFIED_INPUTS
from nearplane.record.record import LayerRecord, row_groups
from nearplane.system.memory import release

FIGURES = 4  # of extra windows, see `means_on_extra`


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


class SharedFacts(NamedTuple):
    """Facts of a layer that all its rows share.

    Args:
        weights: See `bounds.LayerFacts`.
        swept: Whether the bounds of the sweep hold.
        correction: Part of the correction in the target.
        damp, sweep_damp: Damping of the correction's and of the sweep's factor.
        base: Step of exponent 0 in the sweep of entropy-coded weights.
    """

    weights: LayerFacts
    swept: bool
    correction: float
    damp: float
    sweep_damp: float
    base: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """Figures of some rows of a layer; `record_of` makes the layer's record from those of all rows.

    Args:
        figures: (8, rows) losses and bounds, see `bounds.figures_of_rows`.
        energy: (rows,) mean square of the target, times the weight of the row.
        weight: (rows,) weight of the errors of each row.
        dead: (2,) number of inputs that were always 0, and of those among them that are not 0 in the original model.
        on_extra: (parts, 4) losses on the extra windows, on all and on those of each text; see `bounds.losses_on_extra`.
        layer: Facts that the figures of all rows of the layer share.
    """

    figures: Tensor
    energy: Tensor
    weight: Tensor
    dead: Tensor
    on_extra: tuple[Tensor | None, ...]
    layer: SharedFacts

    def to(self, device: torch.device | str) -> MeasuredRows:
        """Return the figures on another device."""
        on_extra = tuple(None if part is None else part.to(device) for part in self.on_extra)
        moved = {name: getattr(self, name).to(device) for name in ("figures", "energy", "weight", "dead")}
        return replace(self, **moved, on_extra=on_extra)


def measured_rows(
    W: Tensor, rows: slice, aim: Target, known: SolvedMatrix, inputs: LayerInput, scheme: AnyScheme
) -> MeasuredRows:
    """Measure some rows of a quantized matrix against their target.

    Args:
        W: (out, in) weights of all rows.
        rows: Which are measured.
        aim: Their target.
        known: Their codes and grid.
        inputs: Statistics of the layer's inputs.
        scheme: Scheme of the layer: order, damping and storage of the codes.

    Raises:
        NumericalError: A Hessian cannot be factored.
    """
    release()  # free the solve's memory, because measuring needs as much
    target, matrix, base, outside = aim.values, known.matrix, known.base, known.outside
    moments, H, grid = inputs.moments, inputs.moments.H, matrix.grid
    sweep = inputs.factor_of_the_sweep(scheme)
    on_grid = matrix if base is None else replace(matrix, grid=replace(cast(ProductGrid, grid), base=base))  # as swept
    bounded = SOLVERS[scheme.solver].bounded and not known.tuned and not scheme.rows_compensate
    if not bounded:
        outside = None
    elif scheme.entropy_coded:  # codes have no limits
        outside = torch.zeros(len(target), dtype=torch.int32, device=target.device)
    elif outside is None:  # the final codes do not show where the sweep clipped
        wide = target.to(torch.promote_types(W.dtype, torch.float32))
        outside = clipped_targets(wide, cast(Grid, grid), sweep)
    values = None if base is None else matrix.decode()
    solution = Solution(matrix=cast("QuantizedMatrix[Grid]", on_grid), outside=outside)
    facts, weights = LayerFacts.of(W, H), W[rows]
    figures = figures_of_rows(weights, target, solution, H, sweep, facts, values=values)
    parts = [] if moments.extra is None else [moments.extra, *moments.extra.by_source()]
    on_extra = [
        None if part is None else losses_on_extra(weights, target, on_grid, part, values=values) for part in parts
    ]
    weight = grid.row_weight().to(figures).expand(len(target))
    pruned = aim.dead if moments.alive is None else aim.dead & moments.alive
    return MeasuredRows(
        figures=figures,
        energy=torch.cat([target[part].to(figures).square().mean(1) for part in strips(target, MEASURED_ROWS)])
        * weight,
        weight=weight,
        dead=torch.stack([aim.dead.sum(), pruned.sum()]),
        on_extra=tuple(on_extra),
        layer=SharedFacts(
            weights=facts,
            swept=outside is not None,
            correction=aim.correction,
            damp=aim.damp,
            sweep_damp=sweep.damp,
            base=base,
        ),
    )


def relative_loss(measured: MeasuredRows, columns: int) -> float:
    """Return the relative loss of a layer whose rows are all measured."""
    return certificate_of(measured.figures, measured.layer.weights, columns, swept=measured.layer.swept).relative_loss


def record_of(
    name: str, measured: Sequence[MeasuredRows], matrix: QuantizedMatrix, inputs: LayerInput, scheme: AnyScheme
) -> LayerRecord:
    """Return the record of a layer from its matrix and the figures of all its rows, in their order.

    It is without seconds, bytes, checksum and the rate that was asked for.
    """
    layer, moments, (out, columns) = measured[0].layer, inputs.moments, matrix.codes.shape
    figures = certificate_of(
        torch.cat([each.figures for each in measured], dim=1), layer.weights, columns, swept=layer.swept
    )
    entropy = None  # on fixed grids; else bits per weight under the tables in the file
    if isinstance(matrix.grid, ProductGrid):
        on_host = QuantizedMatrix(codes=matrix.codes, grid=matrix.grid).to("cpu")
        entropy = size(Contents.of(on_host.codes, on_host.grid)).payload / matrix.codes.numel()
    losses = figures.row_losses  # (out,), means over the inputs
    weight, energy = torch.cat([each.weight for each in measured]), torch.cat([each.energy for each in measured])
    groups = means(losses, row_groups(out, columns))
    parts = [
        None if each[0] is None else torch.cat(each) for each in zip(*(rows.on_extra for rows in measured), strict=True)
    ]
    on_extra = [means_on_extra(part, out) for part in parts if part is not None]
    facts = (losses * weight).mean(), energy.min(), energy.double().log2().mean()
    loss, least, mean_log_energy, dead, pruned, *others = read(*facts, measured[0].dead, groups, *on_extra)
    row_losses, found = others[: len(groups)], iter(others[len(groups) :])
    none: tuple[float | None, ...] = (None,) * FIGURES
    extra, *by_source = [none if part is None else tuple(islice(found, FIGURES)) for part in parts] or [none]
    groups_of_losses = {"row_losses": tuple(float(f"{each:.9g}") for each in row_losses)}
    return LayerRecord(
        name=name,
        out_features=out,
        in_features=columns,
        **figures._asdict() | groups_of_losses,
        format=scheme.number_format.name,
        limit=None
        if columns > MAX_CERTIFIED_INPUTS
        else limit_under(inputs.shared, loss, energy, least, mean_log_energy),
        entropy=entropy,
        base=layer.base,
        correction=layer.correction,
        damp=layer.damp,
        sweep_damp=layer.sweep_damp,
        extra_loss=extra[0],
        extra_relative_loss=extra[1],
        extra_nearest_loss=extra[2],
        extra_own_loss=extra[3],
        extra_by_source=tuple(each[1] for each in by_source),
        dead=int(dead),
        pruned=None if moments.alive is None else int(pruned),
        tokens=moments.tokens - (moments.blended or 0),
        alike=moments.alike,
        blended=moments.blended,
        positions=moments.positions,
        order=scheme.order,
        seconds=0.0,
    )


def clipped_targets(target: Tensor, grid: Grid, factor: Factor) -> Tensor:
    """Return (rows,) the number of clipped targets in a sweep of rows to a grid, strip by strip; see `Solution`."""
    parts = [
        sweep_planes(target[rows], grid.of_rows(rows), factor).outside
        for rows in solved_strips(len(target), target.device)
    ]
    return torch.cat([part for part in parts if part is not None])


def means(x: Tensor, count: int) -> Tensor:
    """Return (count,) the means of the parts of `x` (n,) by `tensor_split`."""
    if x.device.type == "cpu":
        return torch.stack([part.mean() for part in x.tensor_split(count)])
    size, larger = divmod(len(x), count)  # so many parts have one more
    cut = larger * (size + 1)
    return torch.cat([x[:cut].view(larger, size + 1).mean(1), x[cut:].view(count - larger, size).mean(1)])


def limit_under(shared: SharedInput, loss: float, row_energy: Tensor, least: float, mean_log_energy: float) -> float:
    """Return the limit of `bounds.limit`, without computing eigenvalues if the water level is below all of them.

    Args:
        shared, loss, row_energy: Input with H, loss, and (out,) mean square of every row.
        least, mean_log_energy: Least of these mean squares, and the mean of their base-2 logarithms.
    """
    mean_log = shared.mean_log_eigenvalue(loss / least) if least > 0 else None
    if mean_log is None:
        return limit(loss, row_energy, shared.eigenvalues)
    return limit_of_all(loss, mean_log_energy, mean_log)
