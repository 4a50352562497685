"""The solve of the layers of a stage. On several processes (ranks) each solves some of the layers, as wholes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.walk import Stage
from nearplane.lattice.grid import QuantizedMatrix, narrowed
from nearplane.lattice.scale import StepStorage
from nearplane.matrix.solve_layer import Task, solve_layer
from nearplane.models.layers import Layer
from nearplane.planning.ledger import Solved
from nearplane.recipe.schemes import AnyScheme
from nearplane.record.record import LayerRecord
from nearplane.system.out_of_memory import working_on
from nearplane.system.ranks import current


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a layer is to be solved, without its weights and inputs; see `Task` for the other fields.

    Args:
        number: Number of the layer in its stage.
        again: Whether it may be solved once more, so that its inputs are kept.
    """

    number: int
    again: bool
    scheme: AnyScheme
    storage: StepStorage
    rate: float | None
    sensitivity: Tensor | None
    max_loss: float | None
    together: tuple[Tensor, ...]

    def solved(self, stage: Stage) -> tuple[QuantizedMatrix, LayerRecord]:
        """Solve the layer with its weights and inputs on this rank."""
        layer, inputs = stage.layers[self.number], stage.inputs[self.number]
        task = Task(
            name=layer.name,
            W=layer.read(),
            inputs=inputs if self.again else inputs.used_once(),
            scheme=self.scheme,
            storage=self.storage,
            rate=self.rate,
            sensitivity=None if self.sensitivity is None else self.sensitivity.to(layer.weight.device),
            max_loss=self.max_loss,
            together=tuple(G.to(layer.weight.device) for G in self.together),
        )
        with working_on(layer.name):
            return solve_layer(task)


@dataclass(frozen=True, slots=True)
class _Share:
    """Orders by rank; each rank solves its own and keeps the results in the stage."""

    orders: tuple[tuple[Order, ...], ...]

    def __call__(self, stage: Stage) -> None:
        stage.solved = [order.solved(stage) for order in self.orders[current().rank]]


class _Sent(NamedTuple):
    """A solved layer on its way to rank 0: its matrix on the CPU with narrow codes, their dtype, and its record."""

    matrix: QuantizedMatrix
    dtype: torch.dtype
    record: LayerRecord

    def arrived(self) -> tuple[QuantizedMatrix, LayerRecord]:
        """Return the matrix with its codes as they were, and the record."""
        return replace(self.matrix, codes=self.matrix.codes.to(self.dtype)), self.record


def _results(stage: Stage) -> list[_Sent]:
    """Return what this rank has solved of a stage."""
    found = []
    for matrix, record in stage.solved:
        there = matrix.to("cpu")
        found.append(_Sent(replace(there, codes=narrowed(there.codes)), there.codes.dtype, record))
    stage.solved = []
    return found


def solve_stage(stage: Stage, orders: Sequence[Order]) -> list[Solved]:
    """Solve the layers of a stage, each by its scheme and with the second moments of its inputs, in their order.

    Each rank solves some of them. A layer is solved by one rank alone, so that results do not depend on their number.
    """
    if not orders:  # the end of a block
        return []
    ranks = current()
    share = _Share(dealt(orders, stage.layers, ranks.world))
    ranks.start(share)
    share(stage)
    found = dict(zip((order.number for order in share.orders[0]), stage.solved, strict=True))
    stage.solved = []
    for rank in ranks.others:
        if share.orders[rank]:
            numbers = [order.number for order in share.orders[rank]]
            found |= zip(numbers, (each.arrived() for each in ranks.ask(rank, _results)), strict=True)
    return [Solved(layer, *found[number]) for number, layer in enumerate(stage.layers)]


def dealt(orders: Sequence[Order], layers: Sequence[Layer], ranks: int) -> tuple[tuple[Order, ...], ...]:
    """Deal layers to ranks: the largest first, each to the rank that has the fewest weights so far."""
    shares: list[list[Order]] = [[] for _ in range(ranks)]
    weights = [0] * ranks
    for order in sorted(orders, key=lambda order: -layers[order.number].weight.numel()):
        rank = weights.index(min(weights))
        shares[rank].append(order)
        weights[rank] += layers[order.number].weight.numel()
    return tuple(tuple(sorted(share, key=lambda order: order.number)) for share in shares)
