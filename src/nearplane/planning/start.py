"""The start of a run: its model opened, its checkpoint to be, and what is decided before the first layer, or taken up again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nearplane.calibration.given import Given
from nearplane.calibration.one_forward import batch_of
from nearplane.calibration.windows import Windows
from nearplane.formats.container import Container, Place
from nearplane.formats.journal_pages import told
from nearplane.formats.table import open_container
from nearplane.models.model import Model
from nearplane.planning.folder_size import free_layers, longest_record
from nearplane.planning.forecast import Forecast, forecast
from nearplane.planning.plan import Plan, plan
from nearplane.planning.request import check_request, open_original, quantization_config, settled
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, versions
from nearplane.system.device import Device
from nearplane.system.matmul_library import fastest, repeated
from nearplane.system.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is told beside its recipe; see `quantize`.

    Args:
        name: what the record calls the model.
        given: texts or tokens that came from Python.
        memory: bytes that the run may take; None: any.
    """

    name: str
    given: Given | None
    device: Device
    overwrite: bool
    trust_remote_code: bool
    progress: Progress
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is quantized, and how: all that the result depends on.

    Args:
        model: to be quantized.
        asked: the recipe as it was given, and `recipe` as it is settled for this model.
        windows: for calibration.
        options: of the run.
    """

    model: Model
    asked: Recipe
    recipe: Recipe
    windows: Windows
    options: Options

    def told(self) -> dict[str, Any]:
        """Return what two runs are told that write the same; see `journal_pages.told`."""
        files, device = {"model": self.model.folder}, self.options.device
        return told(asdict(self.asked), files, self.windows.digest(), versions(), device)

    def record(self) -> RunRecord:
        """Return the record of a run as far as it is known before anything is measured."""
        windows = self.windows
        return RunRecord(
            recipe=self.asked,
            source=self.options.name,
            versions=versions(),
            device=str(self.options.device),
            windows=windows.count,
            seqlen=windows.seqlen,
            tokens=windows.count * windows.seqlen,
            extra_windows=windows.extra_count,
            text=windows.digest(),
            stored=self.model.stored,
            skipped=tuple(self.model.skipped),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What a run that was stopped had done.

    Args:
        blocks: that are behind it.
        record: with their layers, and what was there before the first.
        plan: as it was then.
        seconds: that it took.
    """

    blocks: int
    record: RunRecord
    plan: Plan
    seconds: float


class Decided(NamedTuple):
    """The record as far as it is known, what every layer may take, and how the run spares memory and how much it takes."""

    record: RunRecord
    plan: Plan
    forecast: Forecast


def open_settled(source: str, recipe: Recipe, *, trust_remote_code: bool) -> tuple[Model, Recipe]:
    """Open the model that a recipe quantizes; return it, and the recipe as it is settled for it.

    Raises:
        NearplaneError: it cannot be quantized so.
    """
    model = open_original(source, recipe, trust_remote_code=trust_remote_code)
    recipe = settled(model, recipe)
    check_request(model, recipe)
    return model, recipe


def container_for(
    model: Model,
    recipe: Recipe,
    out: Path,
    config: Mapping[str, Any] | None = None,
    *,
    overwrite: bool,
    trust_remote_code: bool,
) -> Container:
    """Return the checkpoint of a model that is to be written into `out`; it knows what a stopped run had written.

    Args:
        model: the original.
        recipe: that made its layers.
        out, overwrite, trust_remote_code: see `Place`.
        config: the quantization_config; None: that of the recipe.
    """
    place = Place(
        out=out,
        source=model.folder,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        network=model.config.to_dict(),
        tokenizer=model.tokenizer_folder() if recipe.files.for_llama_cpp else None,
        resumes=True,
    )
    config = quantization_config(model, recipe) if config is None else config
    return open_container(place, config, dtype=model.dtype, shards=len(model.blocks) + 1)


@contextmanager
def decide(job: Job, container: Container, before: Before | None) -> Iterator[Decided]:
    """Decide how a run goes about its job; its products are computed so within this context.

    Args:
        job: what is to be done.
        container: that it writes; told how long its record may become.
        before: what a run that was stopped had done.

    Raises:
        NearplaneError: something that would be found out late, or more memory than the run may take.
    """
    model, windows, device = job.model, job.windows, job.options.device
    if before is not None:
        record = replace(before.record, source=job.options.name, layers=())
        container.room = longest_record(model, record)
        with repeated(record.products, device):
            batch = record.batch or batch_of(windows.seqlen)  # sums depend on it
            foreseen = forecast(model, job.recipe, windows, device, job.options.memory, batch)
            yield Decided(record, before.plan, foreseen)
        return
    with fastest([layer.shape for layer in model.layers], windows.count * windows.seqlen, device) as products:
        foreseen = forecast(model, job.recipe, windows, device, job.options.memory)
        batch = foreseen.setting.batch
        record = replace(job.record(), products=products, batch=None if batch == batch_of(windows.seqlen) else batch)
        container.room = longest_record(model, record)
        free = free_layers(model, job.asked, job.recipe, container, record)
        planned = plan(model, job.recipe, windows.fitted, device, job.options.progress, free=free)
        yield Decided(record, planned, foreseen)
