"""A run of `quantize` under way: its plan, what it has written, and the journal from which a stopped run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nearplane.calibration.walk import Stage
from nearplane.calibration.windows import Windows
from nearplane.formats.container import Container
from nearplane.formats.table import FORMATS
from nearplane.matrix.on_grid import with_tensors
from nearplane.matrix.solve_layer import Task
from nearplane.models.model import Model
from nearplane.planning.forecast import Forecast
from nearplane.planning.ledger import Ledger, Solved
from nearplane.planning.request import quantization_config, with_types
from nearplane.planning.start import Options, beginning
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord
from nearplane.system.progress import counted
from nearplane.verbs.quantize_journal import Journal


class Run:
    """A run whose plan is made; `start_run` makes one.

    Attributes:
        model: that is quantized.
        recipe: as it is settled for the model, types of blocks that were chosen by measuring included.
        journal: what a stopped run had done, and what this one keeps.
        record: as far as it is known: without layers.
        ledger: the layers that are written, and the plan for the others.
        forecast: how it spares memory, and what it takes at the most.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        container: Container,
        journal: Journal,
        ledger: Ledger,
        record: RunRecord,
        forecast: Forecast,
        count: Callable[[int], None],
    ) -> None:
        self.model, self.recipe, self.journal, self.ledger, self.record = model, recipe, journal, ledger, record
        self.forecast, self._began = forecast, time.monotonic()
        self._container, self._count, self._measured = container, count, False
        self._storage = FORMATS[str(recipe.format)].layers.scale_dtype(model.dtype)

    def settle(self, stage: Stage) -> None:
        """Spread the bits that are left over the layers still to come, before those of a stage are solved."""
        if stage.first or self.ledger.solves_again(stage.layers):
            self.ledger.settle()

    def tasks(self, stage: Stage) -> Iterator[Task]:
        """Yield what is to be solved at a stage."""
        plan, again = self.ledger.planned, self.ledger.solves_again(stage.layers)
        for layer, inputs in zip(stage.layers, stage.inputs, strict=True):
            scheme = self.recipe.scheme_of(layer.name)
            yield Task(
                name=layer.name,
                W=layer.read(),
                inputs=inputs if again else inputs.used_once(),
                scheme=plan.scheme_of(layer, scheme),
                rate=plan.rate(layer) if layer.name in plan.rates else None,
                storage=self._storage,
                sensitivity=plan.sensitivity.get(layer.name),
                max_loss=self.recipe.max_loss,
                together=plan.together.get(layer.name, ()),
            )

    def pack(self, stage: Stage, solved: Sequence[Solved]) -> Sequence[Solved] | None:
        """Give solved layers to the container; return them with the bytes that they take.

        Returns:
            None where they are to be solved again at other rates: the last layers of a run with a limit on its size.
        """
        packed = [self._packed(each) for each in solved]
        return self.ledger.accepted(packed, stage.rest) if packed else packed

    def _packed(self, solved: Solved) -> Solved:
        name = solved.layer.written(self.model.weights)
        tensors = self._container.add(name, solved.matrix)
        return solved._replace(record=with_tensors(solved.record, name, tensors.bytes, tensors.checksum))

    def add(self, stage: Stage, packed: Sequence[Solved]) -> None:
        """Note the layers of a stage; at the end of a block write it, and keep what a stopped run needs to go on."""
        for layer, _, record in packed:
            self.ledger.add(layer, record)
        self._count(len(packed))
        if stage.ends_block:
            self._container.close_block(self.model.reader.read(stage.rest))
            self.ledger.close(stage.rest)
            if stage.blocks:
                self.journal.passed(stage.blocks, stage.stream)
                if not self._measured:
                    self._measured = True
                    self.forecast.measured(time.monotonic() - self._began, len(self.model.blocks) - stage.blocks)

    def finished(self) -> RunRecord:
        """Return the record of a run that has solved all layers, complete but for what `Container.seal` adds."""
        ledger = self.ledger
        record = replace(self.record, layers=tuple(ledger.layers))
        record = self._container.seal(record, lambda told: replace(told, seconds=self.journal.seconds))
        ledger.check(record)
        return record


@contextmanager
def start_run(
    model: Model,
    asked: Recipe,
    recipe: Recipe,
    windows: Windows,
    options: Options,
    container: Container,
    journal: Journal,
) -> Iterator[Run]:
    """Plan a run, or take up the plan of one that was stopped; see `beginning`, also for the errors.

    Args:
        model: to be quantized.
        asked: the recipe as it was given, and `recipe` as it is settled for this model.
        windows: for calibration.
        options: of the run.
        container: that it writes.
        journal: of the run.
    """
    with beginning(model, asked, recipe, windows, options, container, journal.before) as begun:
        record, plan, forecast = begun
        recipe = with_types(model, recipe, plan.types)
        container.config = quantization_config(model, recipe, plan.widths)
        ledger = Ledger(model, recipe, container, record, plan)
        journal.begin(ledger, model, record)
        total, blocks, there = len(model.layers), model.layers_by_block, len(ledger.layers)
        with counted(options.progress, "quantizing", total, blocks=blocks, there=there) as count:
            yield Run(model, recipe, container, journal, ledger, record, forecast, count)
