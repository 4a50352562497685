"""Training what is tuned, and the guard: windows held out decide which state is kept, and that may be the first."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nearplane.errors import CalibrationError
from nearplane.tuned import Point
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.parameters import Tuned
from nearplane.tuning.pressure import Pressure

logger = logging.getLogger("nearplane")

BETAS = (0.9, 0.95)  # of Adam
CODE_BETAS = (0.9, 0.999)  # codes that move at random cost, so what they are moved by is compared with more of what was


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How is trained: AdamW without decay, its rates rising first, and falling to nothing along half a cosine.

    Args:
        steps: of the optimizer.
        batches: of the network that make up one step.
        rates: first learning rate of each kind of what is trained, see `Tuned.trained`.
        warm: share of the steps over which the rates rise before.
        looks: how often held-out windows are measured on the way, evenly spaced, the last time at the end.
    """

    steps: int
    batches: int = 1
    rates: dict[str, float] = field(default_factory=dict)
    looks: int = 2
    warm: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What training came to.

    Args:
        curve: held-out KL and the mean training KL since the look before, the first before any step; looks that found NaN or Inf
            are left out.
        kept: the step whose state was kept; 0: that of the start.
        steps: that were done.
    """

    curve: tuple[Point, ...]
    kept: int
    steps: int


def train(
    network: TunedNetwork,
    tuned: Sequence[Tuned],
    schedule: Schedule,
    *,
    training: Sequence[int],
    held: Sequence[int],
    pressed: Callable[[float], Pressure | None] = lambda kl: None,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda items, total: items,
) -> Outcome:
    """Train; afterwards what is tuned is in the state that was best on the held-out batches, of those that are small enough.

    Where gradients are not finite any more training ends, with a warning.

    Args:
        network: a function of `tuned`, ready.
        tuned: matrices and norms.
        schedule: steps and rates.
        training: batches of the network to train on, taken in turn as often as it needs.
        held: batches to choose by.
        pressed: makes what keeps entropy-coded matrices small, from the KL at the start; None: all states are as large.
        progress: wraps the steps: (steps, total) -> steps.

    Raises:
        CalibrationError: predictions are not finite at the start, or gradients at the first step.
    """
    leaves: dict[str, list[torch.Tensor]] = {}
    for each in tuned:
        for kind, leaf in each.trained().items():
            leaves.setdefault(kind, []).append(leaf)
    groups = [
        {"params": found, "lr": schedule.rates[kind], "betas": CODE_BETAS if kind == "codes" else BETAS}
        for kind, found in leaves.items()
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    warm = schedule.warm * schedule.steps

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / (warm + 1)) * (0.5 + 0.5 * math.cos(math.pi * step / schedule.steps))

    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    best = mean_kl(network, held)
    if not math.isfinite(best):
        raise CalibrationError("The quantized network predicts NaN or Inf on the held-out windows: it cannot be tuned.")
    pressure = pressed(best)
    size = None if pressure is None else pressure.measure()
    curve, kept = [Point(step=0, training=None, held_out=best, bytes=size)], 0
    states = [each.state() for each in tuned]
    looks = {round(schedule.steps * (look + 1) / schedule.looks) for look in range(schedule.looks)}
    sums, tokens, done = 0.0, 0, 0
    for step in progress(range(1, schedule.steps + 1), schedule.steps):
        first = (step - 1) * schedule.batches
        try:
            found = network.backward([training[(first + i) % len(training)] for i in range(schedule.batches)])
        except CalibrationError as error:
            if not done:
                raise
            logger.warning("%s Tuning ends after %d of %d steps.", error, done, schedule.steps)
            break
        sums, tokens = sums + found.kl, tokens + found.tokens
        if pressure is not None:
            pressure.press()
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
        done = step
        if step not in looks:
            continue
        now, on_them = mean_kl(network, held), sums / tokens
        sums, tokens = 0.0, 0
        if not (math.isfinite(now) and math.isfinite(on_them)):
            continue
        size = None if pressure is None else pressure.measure()
        curve.append(Point(step=step, training=on_them, held_out=now, bytes=size))
        if now < best and (pressure is None or size is None or size <= pressure.most):
            best, kept, states = now, step, [each.state() for each in tuned]
    for each, state in zip(tuned, states, strict=True):
        each.restore(state)
    return Outcome(curve=tuple(curve), kept=kept, steps=done)


def mean_kl(network: TunedNetwork, batches: Sequence[int]) -> float:
    """Return the mean KL per token over batches."""
    found = network.divergence(batches)
    return found.kl / found.tokens
