"""A run of `quantize` under way: its plan, what it has written, and the journal from which a stopped run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nearplane.calibration.walk import Stage
from nearplane.formats.container import Container
from nearplane.formats.table import FORMATS
from nearplane.matrix.on_grid import with_tensors
from nearplane.matrix.solve_layer import Task
from nearplane.planning.ledger import Ledger, Solved
from nearplane.planning.request import quantization_config, with_types
from nearplane.planning.start import Decided, Job, decide
from nearplane.record.record import RunRecord
from nearplane.system.progress import counted
from nearplane.verbs.quantize_journal import Journal


class Run:
    """A run whose plan is made; `start_run` makes one.

    Attributes:
        model: that is quantized.
        recipe: as it is settled for the model, types of blocks that were chosen by measuring included.
        ledger: the layers that are written, and the plan for the others.
        setting: how its walk spares memory.
        moments: what stands for second moments of the inputs of embeddings, where these are quantized.
        count: called with the number of layers that are written more; set once the run begins.
    """

    def __init__(self, job: Job, container: Container, journal: Journal, decided: Decided) -> None:
        self.model, self._container, self._journal = job.model, container, journal
        self._record, plan, self._forecast = decided
        self.setting = replace(self._forecast.setting, folder=container.folder)
        self.recipe = with_types(self.model, job.recipe, plan.types)
        container.config = quantization_config(self.model, self.recipe, plan.widths)
        self.ledger = Ledger(self.model, self.recipe, container, self._record, plan)
        self.moments = plan.moments
        self.count: Callable[[int], None] = lambda _: None
        self._began, self._measured = time.monotonic(), False
        self._storage = FORMATS[str(self.recipe.format)].layers.scale_dtype(self.model.dtype)
        journal.begin(self.ledger, self.model, self._record)

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
        self.count(len(packed))
        if stage.ends_block:
            self._container.close_block(self.model.reader.read(stage.rest))
            self.ledger.close(stage.rest)
            if stage.blocks:
                self._journal.passed(stage.blocks, stage.stream)
                if not self._measured:
                    self._measured = True
                    self._forecast.measured(time.monotonic() - self._began, len(self.model.blocks) - stage.blocks)

    def finished(self) -> RunRecord:
        """Return the record of a run that has solved all layers, complete but for what `Container.seal` adds."""
        ledger = self.ledger
        record = replace(self._record, layers=tuple(ledger.layers))
        record = self._container.seal(record, lambda told: replace(told, seconds=self._journal.seconds))
        ledger.check(record)
        return record


@contextmanager
def start_run(job: Job, container: Container, journal: Journal) -> Iterator[Run]:
    """Plan a run, or take up the plan of one that was stopped; see `decide`, also for the errors.

    Args:
        job: what is to be done.
        container: that it writes.
        journal: of the run.
    """
    with decide(job, container, journal.before) as decided:
        run = Run(job, container, journal, decided)
        total, blocks, earlier = len(run.model.layers), run.model.layers_by_block, len(run.ledger.layers)
        with counted(job.options.progress, "quantizing", total, blocks=blocks, there=earlier) as run.count:
            yield run
