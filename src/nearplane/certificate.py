"""What one quantized matrix lost, measured: the certificate that `quantize` writes down and `verify` compares with.

Needs the weights, the codes, and what calibration saw; not how the codes were found.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from nearplane.coding.blob import size
from nearplane.errors import NumericalError
from nearplane.formats.native import contents
from nearplane.inputs import Inputs, damp_of_the_sweep
from nearplane.lattice.bounds import certify, limit, losses_beside
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.solve import nearest_plane
from nearplane.lattice.solvers import SOLVERS
from nearplane.recipe import Order, Rate, Rule
from nearplane.record import WIDE, LayerRecord, Profile, row_groups


def measure(
    name: str, W: Tensor, target: Tensor, matrix: QuantizedMatrix, inputs: Inputs, rule: Rule, wanted: Rate | None = None,
    *, correction: float, base: float | None = None, asked: float | None = None,
) -> LayerRecord:  # fmt: skip
    """Measure a quantized matrix against its target.

    Args:
        name: of the layer.
        W: (out, in) weights.
        target: (out, in) what was quantized, see `inputs.corrected`.
        matrix: codes and grid as stored.
        inputs: what calibration saw.
        rule: order and damping; bits, group size and symmetry of a fixed grid.
        wanted: how weights were entropy-coded; None on fixed grids.
        correction: how far `target` went.
        base: step of exponent 0 in the sweep of entropy-coded weights.
        asked: bits per weight that they were to take.

    Returns:
        All of the record but seconds, bytes and checksum.
    """
    H, grid, rule = inputs.moments.H, matrix.grid, rule.resolved(wanted)
    coded = wanted is not None
    factor = inputs.factor(rule.order, rule.damp)
    sweep = inputs.factor(rule.order, damp_of_the_sweep(inputs, rule, plain=coded and wanted.method == "hptq"))
    on_grid = QuantizedMatrix(codes=matrix.codes, grid=grid.scaled_to(base))  # what was swept
    bounded = SOLVERS[rule.solver].bounded and (
        not coded or (not wanted.shrink and wanted.gains == "none")  # else another target or grid was swept
    )
    first = None
    if bounded and isinstance(grid, Grid):  # where a sweep clips, other codes than its own do not show it
        first = nearest_plane(target.to(torch.promote_types(W.dtype, torch.float32)), grid, sweep).codes
    values = None if base is None else matrix.decode()
    found = certify(W, target, on_grid, H, sweep, swept=bounded, sweep=first, values=values)
    extra: tuple[float | None, ...] = (None, None, None)
    if (beside := inputs.moments.extra) is not None:
        extra = losses_beside(W, target, on_grid, (beside.H, beside.K, beside.Q), values=values)
    losses = found.row_losses  # (out,), means over the inputs
    weight = grid.row_weight().to(losses)
    energy = target.to(losses).square().mean(1) * weight
    groups = losses.tensor_split(row_groups(*W.shape))
    fixed = {} if coded else {"bits": rule.bits, "group_size": rule.group_size, "symmetric": rule.symmetric}
    measured = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "row_losses"}
    return LayerRecord(
        name=name, out_features=W.shape[0], in_features=W.shape[1], **measured, **fixed,
        row_losses=tuple(float(f"{float(group.mean()):.9g}") for group in groups),
        limit=None if len(H) > WIDE else limit(float((losses * weight).mean()), energy, inputs.eigenvalues()),
        entropy=size(contents(matrix), coder=wanted.coder, classes=wanted.classes).payload / W.numel() if coded else None,
        asked=asked, base=base, correction=correction, damp=factor.damp, sweep_damp=sweep.damp,
        extra_loss=extra[0], extra_relative_loss=extra[1], extra_nearest_loss=extra[2],
        dead=int(factor.dead.sum()), pruned=pruned(inputs, factor.dead), tokens=inputs.moments.tokens, order=rule.order,
        seconds=0.0,
    )  # fmt: skip


def pruned(inputs: Inputs, dead: Tensor) -> int | None:
    """Return how many of the inputs that were always 0 (in,) were not in the original network; None where it did not run."""
    alive = inputs.moments.alive
    return None if alive is None else int((dead & (alive > 0)).sum())


PROFILED: tuple[Order, ...] = ("natural", "activation", "pivoted")


def profile(name: str, inputs: Inputs, rule: Rule, wanted: Rate, order: Order) -> Profile:
    """Return the Gram-Schmidt profile of a layer's inputs in an order, damped as in the sweep."""
    plain = wanted.wanted and wanted.method == "hptq"
    try:
        d = inputs.factor(order, damp_of_the_sweep(inputs, rule, plain=plain)).d.double()
    except NumericalError as error:
        raise NumericalError(f"{name}, {order} order ({inputs.moments.tokens} tokens): {error}") from error
    picked = torch.linspace(0, len(d) - 1, min(32, len(d)), dtype=torch.float64).round().long()
    return Profile(
        layer=name, order=order, lengths=tuple(float(f"{x:.6g}") for x in d.cpu()[picked].tolist()),
        trace=float(d.sum()), spread=0.5 * float(d.mean().log2() - d.log2().mean()),
    )  # fmt: skip
