"""What a choice of number formats is made of: the job with its mix, and what was measured before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.windows import Windows
from nearplane.formats.table import FORMATS
from nearplane.models.model import Model
from nearplane.planning.plan_file import PlanFile
from nearplane.planning.run import Job
from nearplane.recipe.format_mix import FormatMix
from nearplane.recipe.recipe import Recipe
from nearplane.system.device import Device
from nearplane.system.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """All that a choice is made of.

    Args:
        folder: The model as the user named it.
        job: Model, recipe with its mix, windows and options.
        file: What was measured before, and is kept; None: nothing is kept.
        keep: Function that makes lists of hidden states.
    """

    folder: str
    job: Job
    file: PlanFile | None = None
    keep: Keep = list

    @property
    def model(self) -> Model:
        """The model."""
        return self.job.model

    @property
    def windows(self) -> Windows:
        """Calibration windows and extra windows."""
        return self.job.windows

    @property
    def device(self) -> Device:
        """Device of the computation."""
        return self.job.options.device

    @property
    def progress(self) -> Progress:
        """Display of the blocks that are passed."""
        return self.job.options.progress

    @property
    def recipe(self) -> Recipe:
        """The recipe, with its mix."""
        return self.job.plan.recipe

    @property
    def mix(self) -> FormatMix:
        """The mix."""
        return self.recipe.given_mix

    @property
    def storage(self) -> torch.dtype:
        """Dtype of steps in the file."""
        return FORMATS[str(self.recipe.format)].layers.scale_dtype(self.model.dtype)

    def passing(self) -> dict[str, Any]:
        """Return the arguments that all measurements have in common."""
        return {
            "device": self.device.place,
            "dtype": self.device.compute_dtype(self.model.dtype),
            "keep": self.keep,
            "progress": self.progress,
        }
