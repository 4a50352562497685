"""Bits of entropy-coded layers: those that a run has written so far, and those that are left for the remaining layers.

A size is a hard limit. Weight files, index, other files and the record in its present form are counted to the byte. What
the remaining layers add to them is predicted by `folder_size.py`, and the prediction improves as layers are written. The
last layers are solved again until the folder ends close below the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nearplane.errors import RecipeError
from nearplane.formats.container import Container
from nearplane.matrix.to_rate import HIGHEST_RATE
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.allocate import MIN_RATE
from nearplane.planning.size_budget import RESERVED_BYTES, Overhead, aim_of, completed_record, predict_overhead
from nearplane.planning.solve_stage import Solved
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.sizes import size_text

ACCEPTED_GAP = 0.004  # largest distance below the limit, relative to it, at which the last layers are not solved again
MAX_SECONDS = 99999.999999  # duration of a layer in the length that the record reserves
MAX_CARRYOVER = 0.02  # largest relative deviation from a planned rate, to absorb surplus or excess of earlier blocks
MAX_TRIES = 8  # maximum number of solutions of the last layers


@dataclass(slots=True)
class Budget:
    """Bits of entropy-coded layers.

    Args:
        rates: Planned bits per weight by layer, with every byte counted.
        to_come: Number of weights of each layer that is not quantized yet.
        bounds: Lowest and highest rate that a layer may be moved to; None: within `MAX_CARRYOVER` of its planned rate.
    """

    rates: Mapping[str, float]
    to_come: dict[str, int]
    bounds: tuple[float, float] | None = None
    _left: float = 0.0  # bits that the layers so far have left over
    _shift: float = 0.0  # bits per weight by which rates currently differ from the plan

    def settle(self, bits: float | None = None) -> None:
        """Distribute surplus or excess bits over the remaining layers. Call it before a block.

        Rates are fixed within a block, so its layers do not depend on each other's sizes; the last block absorbs the rest.

        Args:
            bits: Total bits of the remaining layers; None: the sum of their planned rates.
        """
        if not self.to_come:
            return
        if bits is not None:
            self._left = bits - sum(self.rates[name] * weights for name, weights in self.to_come.items())
        self._shift = self._left / sum(self.to_come.values())

    def move(self, bits: float, layers: Sequence[str]) -> bool:
        """Change the rates by `bits` per weight until `settle`; return whether a rate of these layers changes."""
        before = [self.rate(layer) for layer in layers]
        self._shift += bits
        return before != [self.rate(layer) for layer in layers]

    def rate(self, layer: str) -> float:
        """Return the present rate of a layer in bits per weight."""
        asked = self.rates[layer]
        least, most = self.bounds or (asked - MAX_CARRYOVER * asked, asked + MAX_CARRYOVER * asked)
        return min(max(most, asked), max(min(least, asked), asked + self._shift))

    def spend(self, layer: str, size: int) -> None:
        """Note the bytes that a layer took in the file."""
        self._left += self.rates[layer] * self.to_come.pop(layer) - 8 * size


class Ledger:
    """Bits of entropy-coded layers: what the written ones took, and what is left for the others.

    Args:
        model: Model that is quantized.
        container: Container that holds the layers so far.
        record: Run record without layers.
        plan: What is decided of all layers, with their rates.
    """

    def __init__(self, model: Model, container: Container, record: RunRecord, plan: Plan) -> None:
        rates = {name: each.rate for name, each in plan.layers.items() if each.rate is not None}
        self._budget = Budget(rates, {layer.name: math.prod(layer.shape) for layer in model.layers})
        self._model, self._container, self._recipe = model, container, plan.recipe
        self._layers: list[LayerRecord] = []
        self._closed: set[str] = set()  # names of unquantized tensors that are written
        self._limit = plan.recipe.scheme.limit
        self._tries: list[tuple[int, Sequence[Solved]]] = []  # bytes of the folder for each solution of the last layers
        if self._limit is not None:
            self._record = completed_record(record, model, self._limit)
            self._overhead: Overhead = predict_overhead(model, plan.recipe)
            self._budget.bounds = (MIN_RATE, HIGHEST_RATE)

    def rate(self, layer: Layer) -> float:
        """Return the present rate of a layer in bits per weight."""
        return self._budget.rate(layer.name)

    def settle(self) -> None:
        """Distribute the remaining bits over the remaining layers. Call it before a block, and before the last layers of a limit.

        Raises:
            RecipeError: The remaining layers would exceed the limit even at the lowest rate.
        """
        to_come = self._budget.to_come
        if self._limit is None or not to_come:
            self._budget.settle()
            return
        bits, weights = 8 * self._room(self._limit), sum(to_come.values())
        if bits < MIN_RATE * weights:
            least = (MIN_RATE * weights - bits) / 8 + self._limit
            raise RecipeError(missed_size(self._recipe, least, f"at least, with {len(to_come)} layers left"))
        self._budget.settle(bits)

    def add(self, layers: Sequence[LayerRecord], closed: Sequence[str]) -> None:
        """Note layers whose tensors are in the container, and the names of unquantized tensors that were written."""
        for layer in layers:
            self._budget.spend(layer.name, layer.bytes)
        self._layers += layers
        self._closed.update(closed)

    def solves_again(self, layers: Sequence[Layer]) -> bool:
        """Return whether layers may be solved more than once, as the last layers of a limited folder are."""
        return self._limit is not None and self._budget.to_come.keys() == {layer.name for layer in layers}

    def accepted(self, solved: Sequence[Solved], rest: Sequence[str]) -> Sequence[Solved] | None:
        """Return the layers to write, or None if they must be solved again (see `solves_again`) at changed rates.

        Args:
            solved: Layers that share an input, as they were given to the container.
            rest: Names of the unquantized tensors that are written with them.

        Raises:
            RecipeError: The limit cannot be met.
        """
        layers = [each.layer for each in solved]
        if not self.solves_again(layers) or self._limit is None:
            return solved
        limit, weights = self._limit, sum(self._budget.to_come.values())
        size = self._size([each.record for each in solved], rest, end=True)
        self._tries.append((size, solved))
        near = (1 - ACCEPTED_GAP) * limit <= size <= limit - RESERVED_BYTES
        if (
            not near
            and len(self._tries) < MAX_TRIES
            and self._budget.move(8 * (aim_of(limit) - size) / weights, [layer.name for layer in layers])
        ):
            return None
        fitting = [each for each in self._tries if each[0] <= limit - RESERVED_BYTES]
        if not fitting:
            raise RecipeError(
                missed_size(self._recipe, min(size for size, _ in self._tries), "however its last layers are solved")
            )
        _, best = max(fitting, key=lambda each: each[0])
        if best is not solved:
            for each in best:
                self._container.add(each.record.stored, each.matrix)
        self._tries = []
        return best

    def _size(self, more: Sequence[LayerRecord] = (), rest: Sequence[str] = (), *, end: bool = False) -> int:
        """Return the bytes of the folder if it ended with `more` layers and `rest`; at the `end`, with all other tensors too."""
        reader, dense = self._model.reader, self._overhead.dense
        last = [name for name in dense if name not in self._closed and name not in rest] if end else []
        shards = [
            {name: (reader.dtype(name), reader.shape(name), dense[name]) for name in names} for names in (rest, last)
        ]
        layers = (replace(layer, seconds=MAX_SECONDS) for layer in (*self._layers, *more))  # time must not affect codes
        record = replace(self._record, layers=tuple(layers))
        card = self._container.card(record)
        return self._container.size_with(*shards) + len(record.to_json().encode()) + len(card.encode())

    def _room(self, limit: int) -> float:
        """Return the bytes that the codes of the remaining layers may take."""
        overhead, now = self._overhead, self._size()
        codes = sum(layer.bytes for layer in self._layers)
        written = now - codes - sum(overhead.dense[name] for name in self._closed) - overhead.files - overhead.fixed
        predicted = sum(overhead.entries[name] for name in (*(layer.name for layer in self._layers), *self._closed))
        left = (sum(overhead.entries.values()) - predicted) * (written / predicted if predicted else 1.0)
        dense = sum(overhead.dense.values()) - sum(overhead.dense[name] for name in self._closed)
        return aim_of(limit) - now - left - dense


def missed_size(recipe: Recipe, size: float, when: str) -> str:
    """Return the message that the folder has more bytes than its limit."""
    reason, advice = "", f"Use {size_text(math.ceil(1.01 * size))} or more."
    if (max_loss := recipe.max_loss) is not None:
        reason = f", because --max-loss {max_loss:g} needs more bits than the size leaves"
        advice = "Use a larger --size or a larger --max-loss."
    return f"--size {recipe.scheme.size} cannot be met: the folder would have {math.ceil(size):,} bytes {when}{reason}. {advice}"
