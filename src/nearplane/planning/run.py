"""A run of `quantize`: decides plan and memory or restores them, holds the written layers, and passes new ones on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from nearplane.calibration.cache_scales import cache_tensors
from nearplane.calibration.folding import fold
from nearplane.calibration.given import Given
from nearplane.calibration.one_forward import default_batch
from nearplane.calibration.rounded_stream import HEADROOM
from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.walk import Stage
from nearplane.calibration.windows import Windows
from nearplane.errors import RecipeError
from nearplane.formats.container import Container, Place
from nearplane.formats.gguf.like import Like
from nearplane.formats.journal_pages import RunInputs, run_inputs
from nearplane.formats.table import FORMATS, open_container
from nearplane.lattice.factor import read
from nearplane.lattice.scale import StepStorage
from nearplane.lattice.shared_grid import LARGEST, SMALLEST, UNIT_PEAK
from nearplane.models.converted_tokenizer import tokenizer_folder
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.folder_size import max_record_bytes, with_layers
from nearplane.planning.forecast import Forecast, forecast
from nearplane.planning.journal import Journal
from nearplane.planning.ledger import Ledger, missed_size
from nearplane.planning.plan import plan
from nearplane.planning.request import quantization_config
from nearplane.planning.size_budget import measured_choice
from nearplane.planning.solve_stage import Order, Solved
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.mix_record import MixRecord
from nearplane.record.record import LayerRecord, RunRecord, versions
from nearplane.system.device import Device
from nearplane.system.matmul_library import chosen_library, recorded_library
from nearplane.system.progress import Progress, Tracked, in_steps, peak_memory, phase, working_time
from nearplane.system.sizes import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run beside its recipe; see `quantize`.

    Args:
        name: Name of the model in the run record.
        given: Texts or tokens that were passed from Python.
        limits: Limits of memory.
        like: The compared GGUF whose header the new one takes.
        mix: How the formats of layers were chosen, if the recipe had a mix.
        plan_file: File that keeps what was measured for such a choice; None: nothing is kept.
        start: Resident bytes before such a choice was measured, from which limits count; None: those of the start of the run.
    """

    name: str
    given: Given | None
    device: Device
    overwrite: bool
    trust_remote_code: bool
    progress: Progress
    limits: Limits = field(default_factory=Limits)
    like: Like | None = None
    mix: MixRecord | None = None
    plan_file: Path | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Run inputs: model, recipe, windows and options.

    Args:
        model: The model to quantize.
        asked: The recipe as it was given.
        plan: What is decided of its layers before anything is measured.
        windows, options: Calibration windows, and options of the run.
    """

    model: Model
    asked: Recipe
    plan: Plan
    windows: Windows
    options: Options

    def run_inputs(self) -> RunInputs:
        """Return all that the output depends on, equal for runs with equal output; see `run_inputs`."""
        files, device = {"model": self.model.folder}, self.options.device
        if self.options.like is not None:
            files["file of --like"] = self.options.like.path
        return run_inputs(asdict(self.asked), files, self.windows.digest(), versions(), device)

    def record(self) -> RunRecord:
        """Return the run record with what is known before anything is measured."""
        windows = self.windows
        return RunRecord(
            recipe=replace(self.asked, calibration=self.plan.recipe.calibration),  # with the number of windows
            source=self.options.name,
            versions=versions(),
            device=self.options.device.model(),
            compute_dtype=self.options.device.recorded_dtype(self.model.dtype),
            windows=windows.count,
            seqlen=windows.seqlen,
            tokens=windows.count * windows.seqlen,
            extra_windows=windows.extra_count,
            sources=windows.sources,
            mix=self.options.mix,
            original_bytes=bytes_of_tensors(self.model),
            text=windows.digest(),
            stored=self.model.stored,
            headroom=HEADROOM if self.asked.scales_inputs else 1.0,
            folds=self.model.folds,
            skipped=(*self.model.skipped, *(self.options.like.reasons if self.options.like is not None else ())),
        )


def bytes_of_tensors(model: Model) -> int:
    """Return the bytes of all tensors of a model in its files."""
    return sum(map(model.reader.nbytes, model.reader.names()))


class Run:
    """A run with a finished plan; `start_run` makes one.

    Attributes:
        model: Model that is quantized.
        plan: What is decided of its layers, including what was chosen by measuring.
        layers: Records of the written layers.
        setting: Settings by which the walk saves memory.
        count: Callback for the number of newly written layers; set when the run begins.
    """

    def __init__(
        self, job: Job, container: Container, journal: Journal, record: RunRecord, plan: Plan, prediction: Forecast
    ) -> None:
        self.model, self._container, self._journal = job.model, container, journal
        self._record, self.plan, self._forecast = record, plan, prediction
        self.setting = replace(self._forecast.setting, folder=container.folder)
        container.config = quantization_config(self.model, self.plan)
        self.layers: list[LayerRecord] = []
        coded = self.plan.recipe.scheme.entropy_coded
        self._ledger = Ledger(self.model, container, self._record, self.plan) if coded else None
        self.count: Callable[[int], None] = lambda _: None
        self._began = working_time()
        layout = FORMATS[str(self.plan.recipe.format)].layers
        self._storage, self._scales = layout.scale_dtype(self.model.dtype), layout.GLOBAL_SCALES
        if journal.before is not None:
            self._note(journal.before.record.layers, [*chain(*map(self.model.unquantized, range(journal.blocks)))])
        journal.begin(self.plan, self._record)

    def settle(self, stage: Stage) -> None:
        """Distribute the remaining bits over the layers that are not solved yet."""
        if self._ledger is not None and (stage.first or self._solves_again(stage)):
            self._ledger.settle()

    def _solves_again(self, stage: Stage) -> bool:
        """Return whether the layers of a stage may be solved more than once."""
        return self._ledger is not None and self._ledger.solves_again(stage.layers)

    def orders(self, stage: Stage) -> list[Order]:
        """Return how every layer of a stage is to be solved."""
        again, plans = self._solves_again(stage), [self.plan.layers[layer.name] for layer in stage.layers]
        if self._ledger is not None:
            plans = [replace(plan, rate=self._ledger.rate(x)) for x, plan in zip(stage.layers, plans, strict=True)]
        scaled = [layer for layer, each in zip(stage.layers, plans, strict=True) if each.number_format.global_scale]
        # before the first of them is solved
        peaks = peaks_of(scaled) if self._scales else {layer.name: UNIT_PEAK for layer in scaled}
        return [
            Order(number=number, again=again, plan=plan, storage=StepStorage(self._storage, peaks.get(layer.name)))
            for number, (layer, plan) in enumerate(zip(stage.layers, plans, strict=True))
        ]

    def store(self, stage: Stage, solved: Sequence[Solved]) -> Sequence[Solved] | None:
        """Pass solved layers to the container, and return them with their sizes in bytes.

        Returns:
            The layers; None if they must be solved again at other rates, as the last layers under a --size may be.
        """
        stored = [self._stored(each, stage.input_scales.get(each.layer.name)) for each in solved]
        return self._ledger.accepted(stored, stage.rest) if stored and self._ledger is not None else stored

    def _stored(self, solved: Solved, input_scale: float | None) -> Solved:
        name = solved.layer.written(self.model.weights)
        tensors = self._container.add(name, solved.matrix, input_scale=input_scale)
        record = replace(solved.record, stored=name, bytes=tensors.bytes, checksum=tensors.checksum)
        return solved._replace(record=record)

    def add(self, stage: Stage, stored: Sequence[Solved]) -> None:
        """Record the layers of a stage; at the end of a block, also write its part of the weights and the journal."""
        self._note([each.record for each in stored], stage.rest if stage.ends_block else ())
        self.count(len(stored))
        if stage.ends_block:
            scales = cache_tensors(stage.cache_scales)
            self._record = replace(self._record, cache_scales={**self._record.cache_scales, **stage.cache_scales})
            self._container.close_block(self.model.reader.read(stage.rest) | scales)
            if stage.blocks:
                if stage.divergence is not None:
                    self._record = replace(self._record, extra_kl=stage.divergence)
                self._journal.passed(stage.blocks, stage.stream, replace(self._record, layers=tuple(self.layers)))
                if stage.blocks == self._journal.blocks + 1:  # the first one of this process
                    self._forecast.measured(working_time() - self._began, self._journal.blocks)

    def _note(self, layers: Sequence[LayerRecord], closed: Sequence[str]) -> None:
        self.layers += layers
        if self._ledger is not None:
            self._ledger.add(layers, closed)

    def finished(self) -> RunRecord:
        """Return the run record after all layers are solved; `Container.seal` completes it."""
        ranks = self.setting.device.ranks
        others = sum(ranks.ask(rank, _peak) for rank in ranks.others)
        record = replace(self._record, layers=tuple(self.layers))
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


def check_limit(record: RunRecord) -> RunRecord:
    """Return the record of a complete folder, unless it exceeds its limit.

    Raises:
        RecipeError: The folder is too large.
    """
    limit, mix = record.recipe.scheme.limit, record.mix
    if mix is not None and mix.option == "size" and mix.cost == "file" and record.folder > mix.limit:
        raise RecipeError(
            f"The folder has {record.folder:,} bytes in the end, more than --size {mix.limit:,.0f}: figures in its record are "
            f"longer than was foretold. Use --size {mix.limit - 2 * (record.folder - mix.limit):.0f}."
        )
    if limit is not None and record.folder > limit:
        raise RecipeError(missed_size(record.recipe, record.folder, "in the end"))
    return record


def container_for(
    model: Model,
    settled: Plan,
    out: Path,
    config: Mapping[str, Any] | None = None,
    *,
    overwrite: bool,
    trust_remote_code: bool,
    like: Like | None = None,
) -> Container:
    """Return the checkpoint to write into `out`, which also holds what a stopped run has written.

    Args:
        model: The original model.
        settled: What is decided of its layers.
        out, overwrite, trust_remote_code, like: Arguments of `Place`.
        config: The quantization_config; None: derived from the plan.
    """
    place = Place(
        out=out,
        source=model.folder,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        vocabulary=model.vocabulary,
        network=model.config.to_dict(),
        tokenizer=tokenizer_folder(model) if settled.recipe.files.one_file and like is None else None,
        reader=model.reader,
        resumes=True,
        like=like,
    )
    config = quantization_config(model, settled) if config is None else config
    return open_container(place, config, dtype=model.dtype, shards=len(model.blocks) + 1)


@contextmanager
def start_run(job: Job, container: Container, journal: Journal) -> Iterator[Run]:
    """Decide plan and memory settings of a run, or restore the plan of a stopped one.

    Within this context matrix products use the library that was chosen.

    Args:
        job: Model, recipe, windows and options of the run.
        container: Container that the run writes; its `room` is set to the maximum length of the record.
        journal: Journal of the run.

    Raises:
        NearplaneError: The run cannot succeed, or needs more memory than its limit.
    """
    model, windows, device, before = job.model, job.windows, job.options.device, journal.before
    device.say_dtype(model.dtype)
    usual, shapes = default_batch(windows.seqlen), [layer.shape for layer in model.layers]
    with (
        chosen_library(shapes, windows.count * windows.seqlen, device)
        if before is None
        else recorded_library(before.record.products, device)
    ) as products:
        batch = None if before is None else before.record.batch or usual  # affects the order of sums
        with phase(job.options.progress, "trying one window in a block of each kind"):
            prediction = forecast(model, job.plan, windows, device, job.options.limits, batch, job.options.start)
        if before is not None:
            model.fold(before.record.folds)
            kept = replace(before.record, source=job.options.name, mix=job.options.mix, layers=())
            record, planned = kept, before.plan
        else:
            batch = prediction.setting.batch
            fold(model, windows, device, job.plan.recipe.inputs_of, job.options.progress, batch)
            record, planned = replace(job.record(), products=products, batch=None if batch == usual else batch), None
        container.room = max_record_bytes(with_layers(model, replace(record, extra_kl=0.0)))
        if planned is None:
            planned = _planned(job, container, record, prediction.setting.keep)
        run = Run(job, container, journal, record, planned, prediction)
        tracked = Tracked(
            range(len(model.layers)),
            "quantizing",
            len(model.layers),
            blocks=model.layers_by_block,
            work=prediction.work,
            after=prediction.after,
            there=len(run.layers),
        )
        with in_steps(job.options.progress, tracked) as run.count:
            yield run


def _planned(job: Job, container: Container, record: RunRecord, keep: Keep) -> Plan:
    """Return the plan of a new run, with what is chosen by measuring."""
    model, recipe, choice = job.model, job.plan.recipe, None
    if recipe.files.block_types and recipe.scheme.measured:
        choice = measured_choice(model, job.plan, container, record)
    options = job.options
    return plan(model, job.plan, job.windows.fitted, options.device, options.progress, free=choice, keep=keep)
