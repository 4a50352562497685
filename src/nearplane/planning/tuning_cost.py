"""Work of tuning as a multiple of that of the quantization before it, both in multiplications.

No clock decides how many steps are made, so that a run which is repeated or resumed makes the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from nearplane.models.model import Model
from nearplane.planning.estimate import estimated_shapes
from nearplane.planning.shapes import forward_work, multiplications
from nearplane.recipe.layer_plan import Plan
from nearplane.record.record import RunRecord
from nearplane.system.device import Device
from nearplane.tuning.schedule import SHORTEST_STEPS, OpenEnded
from nearplane.tuning.settings import held_windows, windows_per_step

# work beside matrix products, in multiplications for each weight: of solving a layer and of decoding and stepping codes, both by
# times on SmolLM2, and of measuring a solved layer, assumed to be a third of the first
SOLVE_WORK, MEASURE_WORK, STEP_WORK = 25e3, 8e3, 600
ALONG_LAYERS = 1.3  # time of a multiplication where layers are observed, over that in a step; on babyllama105
MEASUREMENTS = 4  # on held-out windows, as of 540 steps; of fewer one less, of twice as many one more


class TuningCost(NamedTuple):
    """Work of tuning, in multiplications.

    Args:
        quantization: Of the run before.
        around: Of tuning without its steps: the original's predictions, held-out windows, and losses that are measured again.
        step: Of a step.
    """

    quantization: float
    around: float
    step: float

    def schedule(self, budget: float) -> OpenEnded | None:
        """Return the steps that a multiple of the quantization's work allows; None: too few to begin."""
        steps = int((budget * self.quantization - self.around) / self.step)
        return OpenEnded(steps) if steps >= SHORTEST_STEPS else None

    @property
    def enough(self) -> float:
        """The smallest multiple with one decimal with which training begins."""
        return math.ceil(10 * (self.around + SHORTEST_STEPS * self.step) / self.quantization) / 10

    def least(self) -> str:
        """Return what tuning takes at least, as a sentence without a full stop."""
        return (
            f"what surrounds the steps takes about {self.around / self.quantization:.1f} times as long as the quantization, "
            f"with {SHORTEST_STEPS} steps about {self.enough:.1f} times, and fewer steps gain little"
        )


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
    shapes = estimated_shapes(
        model, plan, device, windows=record.windows, extra=record.extra_windows, seqlen=record.seqlen
    )
    weights = sum(kind.count * group.experts * group.weights for kind in shapes.blocks for group in kind.groups)
    forward = sum(kind.count * forward_work(shapes, kind) for kind in shapes.blocks)
    head = shapes.hidden * shapes.vocabulary
    measuring = multiplications(replace(shapes, choosing=None, backward=0, beam=0, descents=0, searched=0.0))
    again = ALONG_LAYERS * measuring + MEASURE_WORK * weights
    held = held_windows(samples, seqlen) * seqlen
    around = again + held * (forward + MEASUREMENTS * (forward + 2 * head))
    # a step runs blocks forward twice and once backward, and the original network once
    step = windows_per_step(seqlen) * seqlen * (5 * forward + 4 * head) + STEP_WORK * weights
    solved = ALONG_LAYERS * multiplications(shapes) + SOLVE_WORK * weights
    return TuningCost(solved if plan.recipe.scheme.calibrated else again, around, step)
