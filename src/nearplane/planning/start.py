"""What a run decides before its first layer is solved: libraries for products, how it spares memory, and what every layer may take.

Measured here; of a run that was stopped, what it had decided is taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nearplane.calibration.given import Given
from nearplane.calibration.one_forward import batch_of
from nearplane.calibration.windows import Windows
from nearplane.formats.container import Container
from nearplane.models.model import Model
from nearplane.planning.forecast import Forecast, forecast
from nearplane.planning.gguf_budget import free_layers
from nearplane.planning.plan import Plan, plan
from nearplane.planning.record_size import longest_record
from nearplane.planning.request import rehearse
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, versions
from nearplane.system.device import Device
from nearplane.system.matmul_library import fastest, repeated
from nearplane.system.progress import Progress
from nearplane.tuning.checks import check_tunable


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


@contextmanager
def beginning(
    model: Model,
    asked: Recipe,
    recipe: Recipe,
    windows: Windows,
    options: Options,
    container: Container,
    before: Before | None,
) -> Iterator[tuple[RunRecord, Plan, Forecast]]:
    """Decide how a run goes about it; its products are computed so within this context.

    Args:
        model: to be quantized.
        asked: the recipe as it was given, and `recipe` as it is settled for this model.
        windows: for calibration.
        options: of the run.
        container: that it writes; told how long its record may become.
        before: what a run that was stopped had done.

    Yields:
        The record as far as it is known, what every layer may take, and how much memory the run will take.

    Raises:
        NearplaneError: something that would be found out late, or more memory than the run may take.
    """
    if before is not None:
        record = replace(before.record, source=options.name, layers=())
        container.room = longest_record(model, record)
        with repeated(record.products, options.device):
            batch = record.batch or batch_of(windows.seqlen)  # sums depend on it
            yield record, before.plan, _forecast(model, recipe, windows, options, batch)
        return
    tokens = windows.count * windows.seqlen
    with fastest([layer.shape for layer in model.layers], tokens, options.device) as products:
        foreseen = _forecast(model, recipe, windows, options)
        batch = foreseen.setting.batch
        record = RunRecord(
            recipe=asked,
            source=options.name,
            versions=versions(),
            device=str(options.device),
            products=products,
            windows=windows.count,
            seqlen=windows.seqlen,
            tokens=tokens,
            extra_windows=windows.extra_count,
            text=windows.digest(),
            stored=model.stored,
            batch=None if batch == batch_of(windows.seqlen) else batch,
            skipped=tuple(model.skipped),
        )
        if recipe.tune != "none":
            check_tunable(model, recipe, options.given, record, options.device)
        container.room = longest_record(model, record)
        free = free_layers(model, asked, recipe, container, record)
        planned = plan(model, recipe, windows.fitted, options.device, options.progress, free=free)
        yield record, planned, foreseen


def _forecast(model: Model, recipe: Recipe, windows: Windows, options: Options, batch: int | None = None) -> Forecast:
    """Rehearse the run; say what it will take and choose how it keeps within its limit.

    Raises:
        NearplaneError: see `beginning`.
    """
    looks = rehearse(model, recipe, windows, options.device)
    return forecast(model, recipe, windows, looks, options.device, options.memory, batch)
