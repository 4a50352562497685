"""State of a run of `quantize`: its plan, its written layers, and the journal from which a stopped run is resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nearplane.calibration.walk import Stage
from nearplane.errors import RecipeError
from nearplane.formats.container import Container
from nearplane.formats.table import FORMATS
from nearplane.lattice.factor import read
from nearplane.lattice.scale import StepStorage
from nearplane.lattice.shared_grid import LARGEST, SMALLEST
from nearplane.models.layers import Layer
from nearplane.planning.journal import Journal
from nearplane.planning.ledger import Ledger, Solved, check_limit
from nearplane.planning.request import quantization_config
from nearplane.planning.solve_stage import Order
from nearplane.planning.start import Decisions, Job, decide
from nearplane.record.record import RunRecord
from nearplane.system.progress import counted, peak_memory


class Run:
    """A run with a finished plan; `start_run` makes one.

    Attributes:
        model: Model that is quantized.
        plan: What is decided of its layers, including what was chosen by measuring.
        ledger: Records of the written layers, and the plan for the others.
        setting: Settings by which the walk saves memory.
        count: Callback for the number of newly written layers; set when the run begins.
    """

    def __init__(self, job: Job, container: Container, journal: Journal, decided: Decisions) -> None:
        self.model, self._container, self._journal = job.model, container, journal
        self._record, self.plan, self._forecast = decided
        self.setting = replace(self._forecast.setting, folder=container.folder)
        container.config = quantization_config(self.model, self.plan)
        self.ledger = Ledger(self.model, container, self._record, self.plan)
        self.count: Callable[[int], None] = lambda _: None
        self._began, self._measured = time.monotonic(), False
        self._storage = FORMATS[str(self.plan.recipe.format)].layers.scale_dtype(self.model.dtype)
        journal.begin(self.ledger, self.model, self._record)

    def settle(self, stage: Stage) -> None:
        """Distribute the remaining bits over the layers that are not solved yet."""
        if stage.first or self.ledger.solves_again(stage.layers):
            self.ledger.settle()

    def orders(self, stage: Stage) -> list[Order]:
        """Return how every layer of a stage is to be solved."""
        again, plans = self.ledger.solves_again(stage.layers), [self.ledger.of(layer) for layer in stage.layers]
        joined = [layer for layer, each in zip(stage.layers, plans, strict=True) if each.number_format.global_scale]
        peaks = peaks_of(joined)  # before the first of them is solved
        return [
            Order(number=number, again=again, plan=plan, storage=StepStorage(self._storage, peaks.get(layer.name)))
            for number, (layer, plan) in enumerate(zip(stage.layers, plans, strict=True))
        ]

    def pack(self, stage: Stage, solved: Sequence[Solved]) -> Sequence[Solved] | None:
        """Pass solved layers to the container, and return them with their sizes in bytes.

        Returns:
            The layers; None if they must be solved again at other rates, as the last layers under a --size may be.
        """
        packed = [self._packed(each, stage.input_scales.get(each.layer.name)) for each in solved]
        return self.ledger.accepted(packed, stage.rest) if packed else packed

    def _packed(self, solved: Solved, input_scale: float | None) -> Solved:
        name = solved.layer.written(self.model.weights)
        tensors = self._container.add(name, solved.matrix, input_scale=input_scale)
        record = replace(solved.record, stored=name, bytes=tensors.bytes, checksum=tensors.checksum)
        return solved._replace(record=record)

    def add(self, stage: Stage, packed: Sequence[Solved]) -> None:
        """Record the layers of a stage; at the end of a block, also write its part of the weights and the journal."""
        for each in packed:
            self.ledger.add(each.record)
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
        """Return the run record after all layers are solved; `Container.seal` completes it."""
        ranks = self.setting.device.ranks
        others = sum(ranks.ask(rank, _peak) for rank in ranks.others)
        record = replace(self._record, layers=tuple(self.ledger.layers))
        return check_limit(self._journal.seal(record, others))


def _peak(served: object) -> int:
    """Return the peak memory of this rank, whatever it serves."""
    del served
    return peak_memory()


def peaks_of(layers: Sequence[Layer]) -> dict[str, float]:
    """Return by name the largest magnitude of the weights of all layers, of those given, in the same module.

    Runtimes join layers that have the same input and belong to one module to one product, such as q, k and v, or gate and up.
    So they must have the same global scale.

    Args:
        layers: Layers that share an input.

    Raises:
        RecipeError: The weights of a layer are so small beside those of another that all its steps would be 0.
    """
    magnitudes = [layer.read().abs().max() for layer in layers]
    own = dict(zip((layer.name for layer in layers), read(*magnitudes) if magnitudes else (), strict=True))
    largest: dict[str, float] = {}
    for name, peak in own.items():
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), peak)
    peaks = {name: largest[name.rpartition(".")[0]] for name in own}
    for name, peak in own.items():
        if 0 < peak < SMALLEST / LARGEST * peaks[name]:
            raise RecipeError(
                f"{name} has no weight above {peak:.3g}, but a layer that shares its global scale has {peaks[name]:.3g}: steps in "
                f"8 bits do not span both. Leave it unquantized with --ignore, or use --grid mxfp4."
            )
    return peaks


@contextmanager
def start_run(job: Job, container: Container, journal: Journal) -> Iterator[Run]:
    """Plan a run, or restore the plan of a stopped one; see `decide`, also for the errors.

    Args:
        job: Model, recipe, windows and options of the run.
        container: Container that the run writes.
        journal: Journal of the run.
    """
    with decide(job, container, journal.before) as decided:
        run = Run(job, container, journal, decided)
        total, blocks, earlier = len(run.model.layers), run.model.layers_by_block, len(run.ledger.layers)
        with counted(job.options.progress, "quantizing", total, blocks=blocks, there=earlier) as run.count:
            yield run
