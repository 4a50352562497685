"""Start of a run: opening the model, preparing the checkpoint, and what the run is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nearplane.calibration.given import Given
from nearplane.calibration.windows import Windows
from nearplane.formats.container import Container, Place
from nearplane.formats.gguf.like import Like
from nearplane.formats.journal_pages import RunInputs, run_inputs
from nearplane.formats.table import open_container
from nearplane.models.converted_tokenizer import tokenizer_folder
from nearplane.models.model import Model
from nearplane.planning.request import check_request, open_original, quantization_config, resolved
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, versions
from nearplane.system.device import Device
from nearplane.system.progress import Progress
from nearplane.system.sizes import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run beside its recipe; see `quantize`.

    Args:
        name: Name of the model in the run record.
        given: Texts or tokens that were passed from Python.
        limits: Limits of memory.
        like: The compared GGUF whose header the new one takes.
    """

    name: str
    given: Given | None
    device: Device
    overwrite: bool
    trust_remote_code: bool
    progress: Progress
    limits: Limits = field(default_factory=Limits)
    like: Like | None = None


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
        """Return all that the output depends on, equal for runs with equal output; see `journal_pages.run_inputs`."""
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
            text=windows.digest(),
            stored=self.model.stored,
            skipped=(*self.model.skipped, *(self.options.like.reasons if self.options.like is not None else ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRun:
    """State of a stopped run that is resumed.

    Args:
        blocks: Number of finished blocks.
        record: The run record with their layers and with the entries from before the first block.
        plan: The plan with what was measured.
        seconds: Duration of the stopped run.
    """

    blocks: int
    record: RunRecord
    plan: Plan
    seconds: float


def open_resolved(source: str, recipe: Recipe, *, trust_remote_code: bool) -> tuple[Model, Plan]:
    """Open the model that a recipe quantizes; return it and what is decided of its layers.

    Raises:
        NearplaneError: The model cannot be quantized by this recipe.
    """
    model = open_original(source, recipe, trust_remote_code=trust_remote_code)
    settled = resolved(model, recipe)
    check_request(model, settled)
    return model, settled


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
