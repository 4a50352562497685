"""What a run has written so far, and what a limit on the size of its folder leaves for the layers still to come.

A size is a hard limit. All that is known is counted to the byte: shards, index, files beside them, and the record as it would be
written now. What the layers still to come add to these is foretold, see `folder_size.py`, the better the more of them are written.
The layers that are solved last are solved again until the folder ends within the limit and close to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from nearplane.errors import RecipeError
from nearplane.formats.container import Container
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix.to_rate import HIGHEST_RATE
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.allocate import LOW
from nearplane.planning.folder_size import SLACK, Foretold, aim_of, finished, foretell
from nearplane.planning.plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import RateScheme
from nearplane.recipe.sizes import size_text
from nearplane.record.record import LayerRecord, RunRecord

CLOSE = 0.004  # of the limit: a folder that ends at most so far below it is not solved again
LONGEST = 99999.999999  # seconds that a layer may take, of the length that they have in the record
TRIES = 8  # to solve the last layers


class Solved(NamedTuple):
    """A layer, the codes found for it, and what was measured of them."""

    layer: Layer
    matrix: QuantizedMatrix
    record: LayerRecord


class Ledger:
    """The layers that are written, and a plan for the others.

    Attributes:
        layers: what the record will hold of them.
        planned: what every layer may take.
    """

    def __init__(self, model: Model, recipe: Recipe, container: Container, record: RunRecord, planned: Plan) -> None:
        self.layers: list[LayerRecord] = []
        self.planned = planned
        self._model, self._container = model, container
        self._closed: set[str] = set()  # names of tensors that are not quantized and are written
        self._limit: int | None = None
        self._recipe = recipe
        self._tried: list[tuple[int, Sequence[Solved]]] = []  # bytes of the folder, by attempts at its last layers
        if isinstance(recipe.scheme, RateScheme) and (limit := recipe.scheme.bytes()) is not None:
            self._limit = limit
            self._record = finished(record, model, limit)
            self._told: Foretold = foretell(model, recipe, recipe.scheme)
            self.planned.bounds = (LOW, HIGHEST_RATE)

    def restore(self, record: RunRecord, closed: Iterable[str]) -> None:
        """Take over what another ledger, of the same plan as it is now, noted of layers and shards.

        Args:
            record: with them.
            closed: names of the tensors that are not quantized and are written.
        """
        self.layers = list(record.layers)
        self._closed.update(closed)

    def settle(self) -> None:
        """Spread what is left over the layers still to come. Call it before a block, and before the last layers of a limit.

        Raises:
            RecipeError: even at the least rate these would exceed the limit.
        """
        if self._limit is None or not self.planned.to_come:
            self.planned.settle()
            return
        bits, weights = 8 * self._room(self._limit), sum(self.planned.to_come.values())
        if bits < LOW * weights:
            least = (LOW * weights - bits) / 8 + self._limit
            raise RecipeError(self._missed(least, f"at least, with {len(self.planned.to_come)} layers still to come"))
        self.planned.settle(bits)

    def add(self, layer: Layer, record: LayerRecord) -> None:
        """Note a layer whose tensors the container has."""
        self.layers.append(record)
        self.planned.spend(layer, record.bytes)

    def close(self, rest: Sequence[str]) -> None:
        """Note that a shard was written, with these tensors as they are."""
        self._closed.update(rest)

    def solves_again(self, layers: Sequence[Layer]) -> bool:
        """Whether layers may be solved more than once: the last ones, where the folder has a limit."""
        return self._limit is not None and self.planned.to_come.keys() == {layer.name for layer in layers}

    def accepted(self, solved: Sequence[Solved], rest: Sequence[str]) -> Sequence[Solved] | None:
        """Return layers as they are to be written; None: they are to be solved again, at rates that have changed.

        Layers are solved again only where `solves_again`, until the folder keeps the limit and comes close to it.

        Args:
            solved: layers that share an input, as they were given to the container.
            rest: names of the tensors that go into the same shard as they are.

        Raises:
            RecipeError: the limit cannot be kept.
        """
        layers = [each.layer for each in solved]
        if self._limit is None or not self.solves_again(layers):
            return solved
        limit, weights = self._limit, sum(self.planned.to_come.values())
        size = self._size([each.record for each in solved], rest, end=True)
        self._tried.append((size, solved))
        near = (1 - CLOSE) * limit <= size <= limit - SLACK
        if not near and len(self._tried) < TRIES and self.planned.move(8 * (aim_of(limit) - size) / weights, layers):
            return None
        kept = [each for each in self._tried if each[0] <= limit - SLACK]
        if not kept:
            raise RecipeError(self._missed(min(size for size, _ in self._tried), "whatever its last layers take"))
        _, best = max(kept, key=lambda each: each[0])
        if best is not solved:
            for each in best:
                self._container.add(each.record.stored, each.matrix)
        self._tried = []
        return best

    def check(self, record: RunRecord) -> None:
        """Refuse a folder that exceeds the limit.

        Raises:
            RecipeError: it does.
        """
        asked = record.recipe.scheme.asked
        if asked is not None and asked[1] == "bytes" and record.folder > asked[0]:
            raise RecipeError(self._missed(record.folder, "in the end"))

    def _size(self, more: Sequence[LayerRecord] = (), rest: Sequence[str] = (), *, end: bool = False) -> int:
        """Return the bytes of the folder if it ended with more layers and the rest; or with all other tensors in a last shard."""
        reader, kept = self._model.reader, self._told.kept
        last = [name for name in kept if name not in self._closed and name not in rest] if end else []
        shards = [
            {name: (reader.dtype(name), reader.shape(name), kept[name]) for name in names} for names in (rest, last)
        ]
        layers = (replace(layer, seconds=LONGEST) for layer in (*self.layers, *more))  # else time would change codes
        record = replace(self._record, layers=tuple(layers))
        return self._container.size_with(*shards) + len(record.to_json().encode())

    def _room(self, limit: int) -> float:
        """Return the bytes that the codes of the layers still to come may take."""
        told, now = self._told, self._size()
        codes = sum(layer.bytes for layer in self.layers)
        said = now - codes - sum(told.kept[name] for name in self._closed) - told.beside - told.once
        foretold = sum(told.said[name] for name in (*(layer.name for layer in self.layers), *self._closed))
        still = (sum(told.said.values()) - foretold) * (said / foretold if foretold else 1.0)
        kept = sum(told.kept.values()) - sum(told.kept[name] for name in self._closed)
        return aim_of(limit) - now - still - kept

    def _missed(self, size: float, when: str) -> str:
        why, more = "", f"Ask for {size_text(math.ceil(1.01 * size))} or more."
        if (most := self._recipe.max_loss) is not None:
            why = f", as --max-loss {most:g} takes more bits than the size leaves"
            more = "Ask for more, or for a larger --max-loss."
        asked = getattr(self._recipe.scheme, "size", None)
        return f"--size {asked} cannot be kept: the folder would have {math.ceil(size):,} bytes {when}{why}. {more}"
