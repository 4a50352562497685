"""The solve of the layers of a stage. On several processes (ranks) each solves some rows of the layers, or whole layers.

Rows of a layer on a fixed grid are divided between ranks in strips. A layer at a rate, whose search needs the coded size of
all its rows, is solved as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.walk import Stage
from nearplane.lattice.factor import solved_strips
from nearplane.lattice.grid import QuantizedMatrix, narrowed
from nearplane.lattice.scale import StepStorage
from nearplane.matrix.inputs import LayerInput, Target, named
from nearplane.matrix.on_grid import SolvedRows, check_rows, joined, solve_rows
from nearplane.matrix.to_rate import solve_to_rate
from nearplane.models.layers import Layer
from nearplane.recipe.layer_plan import LayerPlan
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.record.record import LayerRecord
from nearplane.system.memory import working_on
from nearplane.system.ranks import evened


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A layer to solve, without its weights and inputs.

    Args:
        number: Number of the layer in its stage.
        again: Whether it may be solved once more, so that its inputs are kept.
        plan: What is decided of the layer.
        storage: How steps of grids are stored.
        rows: The rows to solve; None: the whole layer.
    """

    number: int
    again: bool
    plan: LayerPlan
    storage: StepStorage
    rows: slice | None = None

    @property
    def divides(self) -> bool:
        """Whether ranks may solve some rows of the layer each."""
        return not self.plan.scheme.entropy_coded

    def solved(self, stage: Stage) -> SolvedRows:
        """Solve the layer, or its rows, with its weights and inputs on this rank."""
        layer, rows = stage.layers[self.number], self.rows or slice(None)
        with working_on(layer.name):
            W = layer.read()
            with named(layer.name, stage.inputs[self.number].moments.tokens):
                target = stage.target(self.number, W, self.plan.scheme, rows, again=self.again)
            inputs = stage.inputs[self.number]  # without the moments that only targets need
            found = solve_layer(layer.name, W, target, inputs, self.plan, self.storage, rows)
        if not self.again:
            stage.measured(self.number)
        return found


class Solved(NamedTuple):
    """A layer with its codes and its record."""

    layer: Layer
    matrix: QuantizedMatrix
    record: LayerRecord


def solve_layer(
    name: str,
    W: Tensor,
    target: Target,
    inputs: LayerInput,
    plan: LayerPlan,
    storage: StepStorage,
    rows: slice = slice(None),
) -> SolvedRows:
    """Quantize a layer as planned, or whole strips of its rows, deterministically; `joined` makes the layer of all rows.

    Args:
        name: Full name of the layer, for the record and for error messages.
        W: (out, in) weights.
        target: Target of the layer, or of these rows.
        inputs: Statistics of the layer's inputs, shared by layers of the same input.
        plan: What is decided of the layer.
        storage: How steps of grids are stored.
        rows: The rows to solve, whole strips of a layer on a fixed grid.

    Raises:
        NumericalError: A weight is not finite, or the Hessian is not positive definite.
    """
    scheme = plan.scheme
    if isinstance(scheme, RateScheme):
        sensitivity = None if plan.sensitivity is None else plan.sensitivity.to(W.device)
        return solve_to_rate(
            W, target, inputs, scheme, plan.rate, sensitivity=sensitivity, max_loss=plan.max_loss, name=name
        )
    storage = check_rows(W, scheme, storage, name)
    return solve_rows(W, rows, target, inputs, scheme, storage=storage, name=name)


@dataclass(frozen=True, slots=True)
class _Share:
    """Orders by rank; each rank solves its own and keeps the results in the stage."""

    orders: tuple[tuple[Order, ...], ...]

    def __call__(self, stage: Stage) -> None:
        stage.solved = [order.solved(stage) for order in self.orders[stage.ranks.rank]]


def _results(stage: Stage) -> list[SolvedRows]:
    """Return what this rank has solved of a stage, with matrices on the CPU and narrow codes."""
    found = [_moved(each, torch.device("cpu"), narrowed) for each in stage.solved]
    stage.solved = []
    return found


def _moved(found: SolvedRows, device: torch.device, codes: Callable[[Tensor], Tensor]) -> SolvedRows:
    """Return what was solved on another device, its codes in another dtype."""
    there, measured = found.matrix.to(device), found.measured.to(device)
    return replace(found, matrix=replace(there, codes=codes(there.codes)), measured=measured)


def solve_stage(stage: Stage, orders: Sequence[Order]) -> list[Solved]:
    """Solve the layers of a stage, each by its scheme and with the second moments of its inputs, in their order.

    Each rank solves some strips of rows, or whole layers, so that results do not depend on the number of ranks.
    """
    if not orders:  # the end of a block
        return []
    ranks = stage.ranks
    share = _Share(dealt(orders, stage.layers, ranks.world))
    ranks.start(share)
    share(stage)
    found: dict[int, list[SolvedRows]] = {order.number: [] for order in orders}
    for order, each in zip(share.orders[0], stage.solved, strict=True):
        found[order.number].append(each)
    stage.solved = []
    for rank in ranks.others:
        if share.orders[rank]:
            for order, each in zip(share.orders[rank], ranks.ask(rank, _results), strict=True):
                device = stage.layers[order.number].weight.device
                found[order.number].append(_moved(each, device, lambda codes: codes.to(torch.int32)))
    return [_whole(stage, order, found[order.number]) for order in orders]


def _whole(stage: Stage, order: Order, found: list[SolvedRows]) -> Solved:
    """Return a solved layer from what ranks found, in the order of its rows."""
    layer, inputs = stage.layers[order.number], stage.inputs[order.number]
    with working_on(layer.name):
        return Solved(layer, *joined(found, inputs, order.plan.scheme, name=layer.name))


def dealt(orders: Sequence[Order], layers: Sequence[Layer], ranks: int) -> tuple[tuple[Order, ...], ...]:
    """Deal layers to ranks: wholes first, the largest to the rank that has the fewest weights so far, then strips of rows.

    Strips go to the ranks in their order, until each has as many weights as the others. One rank solves all layers whole.
    """
    shares: list[list[Order]] = [[] for _ in range(ranks)]
    weights = [0] * ranks
    divided = [order for order in orders if ranks > 1 and order.divides]
    wholes = [order for order in orders if ranks == 1 or not order.divides]
    for order in sorted(wholes, key=lambda order: -prod(layers[order.number].shape)):
        rank = weights.index(min(weights))
        shares[rank].append(order)
        weights[rank] += prod(layers[order.number].shape)
    strips, sizes = [], []
    for order in divided:
        layer = layers[order.number]
        for rows in solved_strips(layer.shape[0], layer.weight.device):
            strips.append((order, rows))
            sizes.append((rows.stop - rows.start) * layer.shape[1])
    owners = evened(weights, sizes)
    for (_, rank), same in groupby(zip(strips, owners, strict=True), key=lambda each: (each[0][0].number, each[1])):
        (order, first), *_ = neighbours = [strip for strip, _ in same]
        rows = slice(first.start, neighbours[-1][1].stop)
        whole = rows == slice(0, layers[order.number].shape[0])
        shares[rank].append(order if whole else replace(order, rows=rows))
    return tuple(tuple(sorted(share, key=lambda order: order.number)) for share in shares)
