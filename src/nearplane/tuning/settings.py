"""Settings of tuning: the split of windows, the number of steps and the learning rates, as measured in docs/log.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearplane.errors import CalibrationError
from nearplane.record.record import RunRecord
from nearplane.system.sizes import counted
from nearplane.tuning.schedule import FixedSteps, Schedule

SAMPLES_FACTOR = 5  # windows for tuning by default, relative to the default of calibration; a fifth of them is held out
WINDOWS_PER_HELD_OUT = 5  # one window of so many is held out
MAX_HELD_OUT_TOKENS = 16384  # enough to measure the KL to a percent
BATCH = 256  # tokens per step, at least one window; many small steps gained more than few large ones on as many tokens
# learning rates in units of 2^-bits, see `parameters.py`
RATES = {"steps": 0.024, "norms": 0.012, "codes": 0.04, "base": 0.024}
CODE_BITS = 3  # maximum bits of codes on grids that are trained; finer codes gain nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Windows and steps of a tuning.

    Args:
        windows: (windows, seqlen) tokens: training windows, shuffled, then held-out windows; both are whole batches.
        training: Number of training windows.
        batch: Windows per batch.
        samples: Number of windows that was asked for.
        found: Number of windows that the text gave.
        schedule: Optimizer steps, of AdamW without weight decay, and measurements on held-out windows.
        rates: Largest learning rate of each kind of trained tensor, see `TunedLayer.trained`.
    """

    windows: Tensor
    training: int
    batch: int
    samples: int
    found: int
    schedule: Schedule
    rates: Mapping[str, float] = field(default_factory=lambda: RATES)

    @property
    def held(self) -> int:
        """Number of held-out windows."""
        return len(self.windows) - self.training

    def batches(self) -> tuple[range, range]:
        """Return the numbers of the training batches and of the held-out batches."""
        first, total = self.training // self.batch, len(self.windows) // self.batch
        return range(first), range(first, total)


def split(
    read: Callable[[int, int], Tensor],
    record: RunRecord,
    *,
    samples: int,
    seqlen: int | None = None,
    schedule: Schedule | None = None,
) -> Split:
    """Read the text and split its windows into training windows and held-out windows, the last fifth.

    The extra windows of the run, on which its losses are measured without fitting, are excluded here too.

    Args:
        read: Function (samples, seqlen) -> (windows, seqlen) tokens of the text; fewer windows if the text is shorter.
        record: The run record of the checkpoint.
        samples, seqlen: Arguments of `tune`.
        schedule: Steps; None: each training window is used once, or several times in a short text.

    Raises:
        CalibrationError: The text has fewer than two windows.
    """
    windows = read(samples, seqlen or record.seqlen)
    count, length = windows.shape
    begin, end = record.windows * record.seqlen, (record.windows + record.extra_windows) * record.seqlen
    starts = torch.arange(len(windows)) * length
    windows = windows[(starts + length <= begin) | (starts >= end)]
    if len(windows) < 2:
        raise CalibrationError(
            f"The text has {counted(len(windows), 'window')} of {length} tokens, without the extra windows of the run. Tuning "
            f"needs at least 2, one of them held out. Pass a longer text with --calibration, or use shorter windows with --seqlen."
        )
    held = held_windows(len(windows), length)
    batch = max(1, min(windows_per_step(length), held, len(windows) - held))
    held -= held % batch
    fitted = windows[: len(windows) - held]
    order = torch.randperm(len(fitted), generator=torch.Generator().manual_seed(record.recipe.calibration.seed))
    schedule = schedule or FixedSteps(max(1, (samples - held_windows(samples, length)) // batch))
    fitted = fitted[order[: min(len(fitted) // batch, schedule.steps) * batch]]  # without windows that no step reaches
    return Split(
        windows=torch.cat([fitted, windows[len(windows) - held :]]),
        training=len(fitted),
        batch=batch,
        samples=samples,
        found=count,
        schedule=schedule,
    )


def windows_per_step(seqlen: int) -> int:
    """Return the number of windows of a step, unless there are fewer."""
    return max(1, BATCH // seqlen)


def held_windows(windows: int, seqlen: int) -> int:
    """Return the number of windows to hold out of so many."""
    return max(1, min(windows // WINDOWS_PER_HELD_OUT, math.ceil(MAX_HELD_OUT_TOKENS / seqlen)))
