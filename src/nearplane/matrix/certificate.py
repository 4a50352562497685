"""What one quantized matrix lost, measured: the certificate that `quantize` writes down and `verify` compares with.

Needs the weights, the codes, and what calibration saw; not how the codes were found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from nearplane.coding.blob import size
from nearplane.errors import NumericalError
from nearplane.formats.native import contents
from nearplane.lattice.bounds import certify, limit, limit_of_all, losses_beside
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.solve import sweep_planes
from nearplane.lattice.solvers import SOLVERS
from nearplane.matrix.inputs import Inputs
from nearplane.memory import release
from nearplane.record import MAX_PROFILED_INPUTS, LayerRecord, Profile, row_groups
from nearplane.schemes import AnyScheme, Order, Scheme


def measure(
    name: str,
    W: Tensor,
    target: Tensor,
    matrix: QuantizedMatrix,
    inputs: Inputs,
    scheme: AnyScheme,
    *,
    correction: float,
    base: float | None = None,
    asked: float | None = None,
    outside: Tensor | None = None,
    tuned: bool = False,
) -> LayerRecord:
    """Measure a quantized matrix against its target.

    Args:
        name: of the layer.
        W: (out, in) weights.
        target: (out, in) what was quantized, see `inputs.corrected`.
        matrix: codes and grid as stored.
        inputs: what calibration saw.
        scheme: order and damping; of a fixed grid bits, group size and symmetry, else how codes are stored.
        correction: how far `target` went.
        base: step of exponent 0 in the sweep of entropy-coded weights.
        asked: bits per weight that they were to take.
        outside: (out,) clipped targets of the sweep on this grid, see `Solution`; None: it is swept again to know.
        tuned: whether codes and steps were trained after the sweep, which then bounds nothing.

    Returns:
        All of the record but seconds, bytes and checksum.
    """
    release()  # what solving took: measuring takes as much
    H, grid = inputs.moments.H, matrix.grid
    damped, sweep = inputs.damped_for_the_correction(scheme), inputs.factor_of_the_sweep(scheme)
    on_grid = QuantizedMatrix(codes=matrix.codes, grid=grid.scaled_to(base))  # what was swept
    bounded = SOLVERS[scheme.solver].bounded and not tuned and not scheme.joins_rows
    # where a sweep clips, other codes than its own do not show it
    if outside is None and bounded and isinstance(grid, Grid):
        outside = sweep_planes(target.to(torch.promote_types(W.dtype, torch.float32)), grid, sweep).outside
    values = None if base is None else matrix.decode()
    found = certify(W, target, on_grid, H, sweep, swept=bounded, outside=outside, values=values)
    extra: tuple[float | None, ...] = (None, None, None)
    if (beside := inputs.moments.extra) is not None:
        extra = losses_beside(W, target, on_grid, beside, values=values)
    losses = found.row_losses  # (out,), means over the inputs
    weight = grid.row_weight().to(losses)
    energy = target.to(losses).square().mean(1) * weight
    groups = losses.tensor_split(row_groups(*W.shape))
    bits, group_size, symmetric = scheme.layer_grid[:3]
    assert isinstance(bits, int | None), f"a matrix has a whole number of bits, found {bits}"
    assert group_size != "auto", "the scheme's group is not chosen yet"
    measured = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "row_losses"}
    return LayerRecord(
        name=name,
        out_features=W.shape[0],
        in_features=W.shape[1],
        **measured,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        blocks=scheme.layer_grid.blocks,
        row_losses=tuple(float(f"{float(group.mean()):.9g}") for group in groups),
        limit=None if len(H) > MAX_PROFILED_INPUTS else limit_under(inputs, float((losses * weight).mean()), energy),
        entropy=entropy(matrix, scheme),
        asked=asked,
        base=base,
        correction=correction,
        damp=damped.damp,
        sweep_damp=sweep.damp,
        extra_loss=extra[0],
        extra_relative_loss=extra[1],
        extra_nearest_loss=extra[2],
        dead=int(damped.dead.sum()),
        pruned=pruned(inputs, damped.dead),
        tokens=inputs.moments.tokens - (inputs.moments.blended or 0),
        alike=inputs.moments.alike,
        blended=inputs.moments.blended,
        order=scheme.order,
        seconds=0.0,
    )


def limit_under(inputs: Inputs, loss: float, row_energy: Tensor) -> float:
    """Return the limit, see `bounds.limit`, at the least cost: without eigenvalues where the water is below all of them."""
    least = float(row_energy.min())
    mean_log = inputs.mean_log_eigenvalue(loss / least) if least > 0 else None
    if mean_log is None:
        return limit(loss, row_energy, inputs.eigenvalues())
    return limit_of_all(loss, row_energy, mean_log)


def pruned(inputs: Inputs, dead: Tensor) -> int | None:
    """Return how many of the inputs that were always 0 (in,) were not in the original network; None where it did not run."""
    alive = inputs.moments.alive
    return None if alive is None else int((dead & alive).sum())


def entropy(matrix: QuantizedMatrix, scheme: AnyScheme) -> float | None:
    """Return bits per weight of the codes under the tables that the file stores; None on fixed grids."""
    if scheme.coding is None:
        return None
    coder, classes = scheme.coding
    return size(contents(matrix), coder=coder, classes=classes).payload / matrix.codes.numel()


PROFILED: tuple[Order, ...] = ("natural", "activation", "pivoted")


def profile(name: str, inputs: Inputs, scheme: Scheme, order: Order) -> Profile:
    """Return the Gram-Schmidt profile of a layer's inputs in an order, damped as in the sweep."""
    try:
        d = inputs.lengths(order, scheme).double()
    except NumericalError as error:
        raise NumericalError(f"{name}, {order} order ({inputs.moments.tokens} tokens): {error}") from error
    picked = torch.linspace(0, len(d) - 1, min(32, len(d)), dtype=torch.float64).round().long()
    return Profile(
        layer=name,
        order=order,
        lengths=tuple(float(f"{x:.6g}") for x in d.cpu()[picked].tolist()),
        trace=float(d.sum()),
        spread=0.5 * float(d.mean().log2() - d.log2().mean()),
    )


def profiles(name: str, inputs: Inputs, scheme: Scheme) -> Iterator[Profile]:
    """Yield the Gram-Schmidt profile of an input in the usual orders and that of a scheme, where it is not too wide."""
    if len(inputs.moments.H) <= MAX_PROFILED_INPUTS:
        for order in dict.fromkeys((*PROFILED, scheme.order)):
            yield profile(name, inputs, scheme, order)
