"""What a run decides before its first layer is solved: libraries for products, how it spares memory, and what every layer may take.

Measured here; of a run that was stopped, what it had decided is taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from nearplane.calibration.given import Given
from nearplane.calibration.one_forward import batch_of
from nearplane.calibration.windows import Windows
from nearplane.formats.container import Container
from nearplane.formats.journal_pages import told
from nearplane.models.model import Model
from nearplane.planning.folder_size import free_layers, longest_record
from nearplane.planning.forecast import Forecast, forecast
from nearplane.planning.plan import Plan, plan
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
            yield Decided(record, before.plan, _forecast(job, batch))
        return
    with fastest([layer.shape for layer in model.layers], windows.count * windows.seqlen, device) as products:
        foreseen = _forecast(job)
        batch = foreseen.setting.batch
        record = replace(job.record(), products=products, batch=None if batch == batch_of(windows.seqlen) else batch)
        container.room = longest_record(model, record)
        free = free_layers(model, job.asked, job.recipe, container, record)
        planned = plan(model, job.recipe, windows.fitted, device, job.options.progress, free=free)
        yield Decided(record, planned, foreseen)


def _forecast(job: Job, batch: int | None = None) -> Forecast:
    """Rehearse the run; say what it will take and choose how it keeps within its limit.

    Raises:
        NearplaneError: see `decide`.
    """
    options = job.options
    return forecast(job.model, job.recipe, job.windows, options.device, options.memory, batch)
