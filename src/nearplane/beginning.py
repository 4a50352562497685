"""What a run decides before its first layer is solved: libraries for products, its pace, and what every layer may take.

Measured here; of a run that was stopped, what it had decided is taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from nearplane.budget.blocks import free_layers
from nearplane.budget.plan import Plan, plan
from nearplane.budget.records import longest_record
from nearplane.formats.container import Container
from nearplane.journal import Before
from nearplane.models.given import Given
from nearplane.models.model import Model
from nearplane.pace import Pace
from nearplane.pacing import paced
from nearplane.products import fastest, repeated
from nearplane.progress import Progress
from nearplane.recipe import Recipe
from nearplane.record import RunRecord, versions
from nearplane.request import rehearse
from nearplane.tokens import Windows
from nearplane.tunable import check_tunable
from nearplane.walk import batch_of


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
    device: torch.device
    overwrite: bool
    trust_remote_code: bool
    progress: Progress
    memory: int | None = None


@contextmanager
def beginning(
    model: Model,
    asked: Recipe,
    recipe: Recipe,
    windows: Windows,
    options: Options,
    container: Container,
    before: Before | None,
) -> Iterator[tuple[RunRecord, Plan]]:
    """Decide how a run goes about it; its products are computed so within this context.

    Args:
        model: to be quantized.
        asked: the recipe as it was given, and `recipe` as it is settled for this model.
        windows: for calibration.
        options: of the run.
        container: that it writes; told how long its record may become.
        before: what a run that was stopped had done.

    Yields:
        The record as far as it is known, and what every layer may take.

    Raises:
        NearplaneError: something that would be found out late, or more memory than the run may take.
    """
    if before is not None:
        record = replace(before.record, source=options.name, layers=(), profiles=(), repeated=())
        if options.memory is not None:  # sums depend on how many windows pass at a time
            batch = record.pace.batch if record.pace else batch_of(windows.seqlen)
            record = replace(record, pace=_pace(model, recipe, windows, options, batch))
        container.room = longest_record(model, record)
        with repeated(record.products, options.device):
            yield record, before.plan
        return
    tokens = windows.count * windows.seqlen
    with fastest([layer.shape for layer in model.layers], tokens, options.device) as products:
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
            pace=_pace(model, recipe, windows, options),
            skipped=tuple(model.skipped),
        )
        if recipe.tune != "none":
            check_tunable(model, recipe, options.given, record, options.device)
        container.room = longest_record(model, record)
        free = free_layers(model, asked, recipe, container, record)
        yield record, plan(model, recipe, windows.fitted, options.device, options.progress, free=free)


def _pace(model: Model, recipe: Recipe, windows: Windows, options: Options, batch: int | None = None) -> Pace | None:
    """Rehearse, foresee and say what the run takes; return how it keeps within its limit, None without one.

    Raises:
        NearplaneError: see `beginning`.
    """
    looks = rehearse(model, recipe, windows, options.device)
    return paced(model, recipe, windows, looks, options.device, options.memory, batch)
