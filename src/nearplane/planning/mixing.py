"""What a choice of number formats is made of: the job with its mix, and the windows that each figure is measured on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.windows import Windows
from nearplane.formats.table import FORMATS
from nearplane.models.model import Model
from nearplane.planning.mix_units import NO_MIX
from nearplane.planning.plan_file import PlanFile
from nearplane.planning.run import Job
from nearplane.recipe.format_mix import FormatMix
from nearplane.recipe.recipe import Recipe
from nearplane.system.device import Device
from nearplane.system.progress import Progress

log = logging.getLogger("nearplane")
PART_TOKENS = 2048  # on which errors are estimated, on which a first choice is measured, and on which the last one is
TOKENS_PER_INPUT, MIN_TOKENS = 3, 2048  # tokens for second moments of a layer, for each of its inputs and in all
IMAGES = 64  # windows of networks that see no text


class Parts(NamedTuple):
    """Windows by what is measured on them.

    Args:
        gradients: Of which some pass backwards.
        moments: For second moments of inputs.
        errors: On which errors of layers are estimated, and the first choice is measured.
        last: On which the last choice is measured.
    """

    gradients: Tensor
    moments: Tensor
    errors: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """All that a choice is made of.

    Args:
        folder: The model as the user named it.
        job: Model, recipe with its mix, windows and options.
        file: What was measured before, and is kept; None: nothing is kept.
    """

    folder: str
    job: Job
    file: PlanFile | None = None

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
        assert self.recipe.mix is not None, NO_MIX
        return self.recipe.mix

    def passing(self) -> dict[str, Any]:
        """Return the arguments that all measurements have in common."""
        return {
            "storage": FORMATS[str(self.recipe.format)].layers.scale_dtype(self.model.dtype),
            "device": self.device.place,
            "dtype": self.device.compute_dtype(self.model.dtype),
            "progress": self.progress,
        }

    def parts(self) -> Parts:
        """Return the windows that each figure is measured on: few, as they are enough, and not the same if there are enough."""
        fitted, extra = self.windows.fitted, self.windows.extra
        assert fitted is not None, "a mix is measured on text"
        tokens = fitted.shape[1] if fitted.dim() == 2 else 1
        widest = max(layer.shape[1] for block in self.model.blocks for layer in block.layers)
        enough = -(-max(TOKENS_PER_INPUT * widest, MIN_TOKENS) // tokens) if fitted.dim() == 2 else IMAGES
        few = -(-PART_TOKENS // tokens) if fitted.dim() == 2 else IMAGES
        each = min(few, len(fitted) // 8)  # two parts that take at most a quarter of the windows, in turn
        if not each:
            log.warning(
                "The calibration text is short: a mix is measured on windows that it is chosen by. Use more --samples."
            )
            return Parts(fitted, fitted[:enough], fitted[:few], fitted[-few:] if extra is None else extra[:few])
        places = torch.linspace(0, len(fitted) - 1, 2 * each).long()
        rest = torch.ones(len(fitted), dtype=torch.bool)
        rest[places] = False
        left = fitted[rest]
        moments = left[torch.linspace(0, len(left) - 1, min(enough, len(left))).long()]
        return Parts(left, moments, fitted[places[::2]], fitted[places[1::2]])
