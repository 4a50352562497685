"""Training what is tuned, and the guard: windows held out decide which state is kept, and that may be the first."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from nearplane.errors import CalibrationError
from nearplane.record.tuning_record import Point
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.parameters import Tuned
from nearplane.tuning.pressure import Pressure

logger = logging.getLogger("nearplane")

BETAS = (0.9, 0.95)  # of Adam
CODE_BETAS = (0.9, 0.999)  # codes that move at random cost, so what they are moved by is compared with more of what was
WARM = 0.1  # share of the steps over which the rates rise


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How is trained: AdamW without decay, its rates rising first, and falling to nothing along half a cosine.

    Args:
        steps: of the optimizer.
        rates: first learning rate of each kind of what is trained, see `Tuned.trained`.
        looks: how often held-out windows are measured on the way, evenly spaced, the last time at the end.
    """

    steps: int
    rates: dict[str, float] = field(default_factory=dict)
    looks: int = 2


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


class Kept(Protocol):
    """What remembers where training stands, so that the same training goes on from there."""

    def before(self) -> dict[str, Any] | None:
        """Return where training that was stopped stood; None: it begins."""

    def passed(self, standing: Callable[[], dict[str, Any]], *, done: bool) -> None:
        """Note a step; `standing` copies where training stands, `done` says that no step follows."""


class _Nothing:
    """Remembers nothing."""

    def before(self) -> None:
        return None

    def passed(self, standing: Callable[[], dict[str, Any]], *, done: bool) -> None:
        return


def train(
    network: TunedNetwork,
    tuned: Sequence[Tuned],
    schedule: Schedule,
    *,
    training: Sequence[int],
    held: Sequence[int],
    pressed: Callable[[float], Pressure | None] = lambda kl: None,
    kept: Kept | None = None,
    progress: Callable[[Iterable[Any], int, int], Iterable[Any]] = lambda items, total, there: items,
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
        kept: is told of every step, and where it knows of some, training goes on behind them, to the last bit.
        progress: wraps the steps: (steps, total, how many of them were done before) -> steps.

    Raises:
        CalibrationError: predictions are not finite at the start, or gradients at the first step.
    """
    run, kept = _Run(network, tuned, schedule, held, pressed), kept or _Nothing()
    if (before := kept.before()) is None:
        run.begin()
    else:
        run.restore(before)
    looks = {round(schedule.steps * (look + 1) / schedule.looks) for look in range(schedule.looks)}
    for step in progress(range(1, schedule.steps + 1), schedule.steps, run.done):
        if step <= run.done:
            continue
        try:
            run.step(training[(step - 1) % len(training)])
        except CalibrationError as error:
            if not run.done:
                raise
            logger.warning("%s Tuning ends after %d of %d steps.", error, run.done, schedule.steps)
            break
        if step in looks:
            run.look()
        kept.passed(run.standing, done=step == schedule.steps)
    for each, state in zip(tuned, run.states, strict=True):
        each.restore(state)
    return Outcome(curve=tuple(run.curve), kept=run.best, steps=run.done)


class _Run:
    """Where training stands: what is trained, the optimizer, and the best state so far.

    Attributes:
        done: steps so far.
        curve: of the looks so far.
        best: the step whose state is the best.
        states: that state, of each of what is tuned.
    """

    def __init__(
        self,
        network: TunedNetwork,
        tuned: Sequence[Tuned],
        schedule: Schedule,
        held: Sequence[int],
        pressed: Callable[[float], Pressure | None],
    ) -> None:
        self._network, self._tuned, self._held, self._pressed = network, tuned, held, pressed
        leaves: dict[str, list[torch.Tensor]] = {}
        for each in tuned:
            for kind, leaf in each.trained().items():
                leaves.setdefault(kind, []).append(leaf)
        groups = [
            {"params": found, "lr": schedule.rates[kind], "betas": CODE_BETAS if kind == "codes" else BETAS}
            for kind, found in leaves.items()
        ]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        warm, steps = WARM * schedule.steps, schedule.steps

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / (warm + 1)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))

        self._falling = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)
        self._pressure: Pressure | None = None
        self._sum, self._tokens = 0.0, 0  # of KL since the last look
        self.done, self.best = 0, 0
        self.curve: list[Point] = []
        self.states: list[dict[str, torch.Tensor]] = []

    def begin(self) -> None:
        """Measure the start."""
        start = mean_kl(self._network, self._held)
        if not math.isfinite(start):
            raise CalibrationError(
                "The quantized network predicts NaN or Inf on the held-out windows: it cannot be tuned."
            )
        self._pressure = self._pressed(start)
        self.curve = [Point(step=0, training=None, held_out=start, bytes=self._size())]
        self.states = [each.state() for each in self._tuned]

    def step(self, batch: int) -> None:
        """Take a step on a batch."""
        found = self._network.backward([batch])
        self._sum, self._tokens = self._sum + found.kl, self._tokens + found.tokens
        if self._pressure is not None:
            self._pressure.press()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._falling.step()
        self.done += 1

    def look(self) -> None:
        """Measure on the held-out windows, and keep the state if it is the best that is small enough."""
        now, on_them = mean_kl(self._network, self._held), self._sum / self._tokens
        self._sum, self._tokens = 0.0, 0
        if not (math.isfinite(now) and math.isfinite(on_them)):
            return
        size, best = self._size(), next(point.held_out for point in self.curve if point.step == self.best)
        self.curve.append(Point(step=self.done, training=on_them, held_out=now, bytes=size))
        if now < best and (self._pressure is None or size is None or size <= self._pressure.most):
            self.best, self.states = self.done, [each.state() for each in self._tuned]

    def standing(self) -> dict[str, Any]:
        """Return all that decides how training goes on: numbers, and tensors in dicts and lists."""
        return {
            "done": self.done,
            "best": self.best,
            "sum": self._sum,
            "tokens": self._tokens,
            "curve": [asdict(point) for point in self.curve],
            "states": self.states,
            "leaves": [dict(each.trained()) for each in self._tuned],
            "optimizer": self._optimizer.state_dict(),
            "falling": self._falling.state_dict(),
            "pressure": None if self._pressure is None else self._pressure.standing(),
        }

    @torch.no_grad()
    def restore(self, standing: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.done, self.best = standing["done"], standing["best"]
        self._sum, self._tokens = standing["sum"], standing["tokens"]
        self.curve, self.states = [Point(**point) for point in standing["curve"]], standing["states"]
        for each, leaves in zip(self._tuned, standing["leaves"], strict=True):
            for kind, leaf in each.trained().items():
                leaf.copy_(leaves[kind])
        self._optimizer.load_state_dict(standing["optimizer"])
        self._falling.load_state_dict(standing["falling"])
        self._pressure = self._pressed(self.curve[0].held_out)
        if self._pressure is not None:
            self._pressure.restore(standing["pressure"])

    def _size(self) -> int | None:
        return None if self._pressure is None else self._pressure.measure()


def mean_kl(network: TunedNetwork, batches: Sequence[int]) -> float:
    """Return the mean KL per token over batches."""
    found = network.divergence(batches)
    return found.kl / found.tokens
