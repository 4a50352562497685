"""Time of tuning beside that of the quantization before it. Both are counted in multiplications: no clock decides how many steps
are made, so that a run that is repeated or resumed makes the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from nearplane.models.model import Model
from nearplane.planning.estimate import shapes_about
from nearplane.planning.shapes import forward_work, multiplications
from nearplane.recipe.layer_plan import Plan
from nearplane.record.record import RunRecord
from nearplane.system.device import Device
from nearplane.tuning.schedule import SHORTEST
from nearplane.tuning.settings import held_windows, windows_per_step

# work beside matrix products, in multiplications for each weight, measured on SmolLM2: of a solve, of measuring a solved layer
# again, and of decoding and stepping codes
SOLVED, MEASURED, STEPPED = 25e3, 8e3, 600
LOOKS = 4  # measurements on held-out windows, the first before any step


class TuningCost(NamedTuple):
    """Work of tuning, in multiplications.

    Args:
        solve: Of the quantization.
        around: Of tuning without its steps: the original's predictions, held-out windows, and losses that are measured again.
        step: Of a step.
    """

    solve: float
    around: float
    step: float

    def steps(self, budget: float) -> int:
        """Return how many steps a multiple of the quantization's work allows."""
        return max(0, int((budget * self.solve - self.around) / self.step))

    @property
    def enough(self) -> float:
        """A multiple with which training begins, at most a tenth more than the smallest."""
        return math.ceil(10 * (self.around + SHORTEST * self.step) / self.solve) / 10


def too_short(cost: TuningCost) -> str:
    """Return what tuning takes at least, as a sentence without a full stop."""
    around = f"what surrounds the steps takes about {cost.around / cost.solve:.1f} times as long as the quantization"
    return f"{around}, and with {SHORTEST} steps, with fewer of which little is gained, it is {cost.enough:.1f} times"


def tuning_cost(
    model: Model, plan: Plan, record: RunRecord, device: Device, *, samples: int, seqlen: int
) -> TuningCost:
    """Return the work of tuning a checkpoint.

    Args:
        model: The original model.
        plan: What is decided of its layers.
        record: The run record, with the windows of the run.
        device: Device of the computation.
        samples, seqlen: Windows to tune on, and their tokens.
    """
    shapes = shapes_about(model, plan, device, windows=record.windows, extra=record.extra_windows, seqlen=record.seqlen)
    weights = sum(kind.count * kind.weights for kind in shapes.blocks)
    forward = sum(kind.count * forward_work(shapes, kind) for kind in shapes.blocks)
    head = shapes.hidden * shapes.vocabulary
    again = multiplications(replace(shapes, choosing=None, backward=0, beam=0, descents=0, searched=0.0))
    held = held_windows(samples, seqlen) * seqlen
    around = again + MEASURED * weights + held * (forward + LOOKS * (forward + 2 * head))
    # a step runs blocks forward twice and once backward, and the original network once
    step = windows_per_step(seqlen) * seqlen * (5 * forward + 4 * head) + STEPPED * weights
    return TuningCost(multiplications(shapes) + SOLVED * weights, around, step)
