"""Training loop of tuning, with held-out windows that decide which state is kept, possibly the first, and perhaps when it ends.

The state of training is kept on disk, so that the same command resumes after a crash:

    OUT.unfinished/journal/
      state.json            run inputs of the tuning, and the number of steps done
      standing-000120.pt    trained tensors, optimizer and best state so far, after step 120

The blocks of the new checkpoint are written after the last step; a run that is stopped then writes them again, until all are
measured. Pages are written by `journal_pages.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nearplane.errors import CalibrationError
from nearplane.formats.container import Container
from nearplane.formats.journal_pages import JournalPages, RunInputs
from nearplane.models.divergence import Divergence
from nearplane.record.record import RunRecord
from nearplane.record.tuning_record import Point
from nearplane.system.progress import Progress, Tracked, duration, silent
from nearplane.tuning.code_steps import CodeSteps
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.parameters import Pressure, Tuned, TunedLadders
from nearplane.tuning.schedule import gains_little
from nearplane.tuning.settings import Split

logger = logging.getLogger("nearplane")

BETAS = (0.9, 0.95)  # of Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of training.

    Args:
        curve: Held-out KL, and mean training KL since the last measurement, starting before the first step; measurements of NaN or
            Inf are left out.
        kept: Step whose state was kept; 0: the start.
        steps: Number of steps that were done.
    """

    curve: tuple[Point, ...]
    kept: int
    steps: int


class TrainingJournal:
    """State of training on disk, for resuming it.

    Args:
        container: Container of the tuned checkpoint, just entered.
        inputs: Run inputs of the tuning.
        began: Time of the start by `time.perf_counter`.

    Raises:
        RecipeError: The folder is from a run with other run inputs, and may not be replaced; names the difference.
        FormatError: The folder cannot be read, and may not be replaced.
    """

    def __init__(self, container: Container, inputs: RunInputs, began: float) -> None:
        self._pages = JournalPages(container, inputs, began)
        self._standing: dict[str, Any] | None = self._pages.progress(
            lambda state: self._pages.load(_page(int(state["done"])))
        )
        if self._standing is not None:
            logger.info(
                "resuming after step %d a tuning run that was stopped after %s: %s",
                self._standing["done"],
                duration(self._pages.seconds),
                container.folder,
            )

    def completed(self) -> RunRecord | None:
        """Return the record of a stopped run that had written all layers, after completing its files; None for others."""
        return self._pages.completed(self._timed)

    def seal(self, record: RunRecord) -> RunRecord:
        """Complete the checkpoint after its last layer; see `JournalPages.seal`."""
        return self._pages.seal(record, self._timed)

    def _timed(self, record: RunRecord) -> RunRecord:
        """Return the record with the seconds of tuning, also before it was stopped, which add to those of the solve."""
        assert record.tuning is not None, "records of tuned checkpoints say how they were tuned"
        seconds = self._pages.seconds
        return replace(record, tuning=replace(record.tuning, seconds=seconds), seconds=record.seconds + seconds)

    def before(self) -> dict[str, Any] | None:
        """Return the state of the stopped training, if any; only once, to free its memory."""
        standing, self._standing = self._standing, None
        return standing

    def passed(self, standing: Callable[[], dict[str, Any]], *, done: bool) -> None:
        """Write the state of training, unless that would take too much time or disk space.

        Raises:
            ModelError: A file that the run reads was changed.
        """
        self._pages.check_sources()
        if self._pages.due(1.0 if done else None):  # a loss at the end would cost most
            page = standing()
            self._pages.write({"done": page["done"]}, {_page(page["done"]): page}, replaced=_page("*"))


def _page(done: int | str) -> str:
    return f"standing-{done:06d}.pt" if isinstance(done, int) else f"standing-{done}.pt"


def train(
    network: TunedNetwork,
    tuned: Sequence[Tuned],
    cut: Split,
    *,
    pressed: Callable[[float], Pressure | None] = lambda kl: None,
    kept: TrainingJournal | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Train; leave the tensors in the state that was best on the held-out batches among states that are small enough.

    If gradients become NaN or Inf, training ends with a warning.

    Args:
        network: Network as a function of `tuned`, ready.
        tuned: Matrices and norms to train.
        cut: Steps, learning rates, training batches, which are repeated as often as needed, and held-out batches.
        pressed: Function from the KL at the start to the price on the size of entropy-coded matrices; None: no such matrices.
        kept: State on disk, from which training resumes exactly, and which is updated after every step.
        progress: Function that wraps the iterator over steps.

    Raises:
        CalibrationError: Predictions are not finite at the start, or gradients at the first step.
    """
    run, (training, _) = _Run(network, tuned, cut, pressed), cut.batches()
    if kept is None or (before := kept.before()) is None:
        run.begin()
    else:
        run.restore(before)
        del before  # as large as all that is trained
    with closing(run):
        _steps(run, cut, training, kept, progress)
    for each, state in zip(tuned, run.states, strict=True):
        each.restore(state)
    return Outcome(curve=tuple(run.curve), kept=run.best, steps=run.done)


def _steps(run: _Run, cut: Split, training: Sequence[int], kept: TrainingJournal | None, progress: Progress) -> None:
    """Take all steps that are left, and measure on the way."""
    schedule, total = cut.schedule, cut.schedule.steps
    for step in progress(Tracked(range(1, total + 1), "tuning", total, there=run.done), "tuning", total):
        if run.ends:
            break
        if step <= run.done:
            continue
        try:
            run.step(training[(step - 1) % len(training)])
        except CalibrationError as error:
            if not run.done:
                raise
            logger.warning("%s Tuning stops after %d of %d steps.", error, run.done, total)
            break
        if schedule.looks(step):
            run.look()
        if schedule.falls(step):
            run.fall()
        if kept is not None:
            kept.passed(run.standing, done=run.ends or step == total)


class _Run:
    """State of training: trained tensors, optimizer, and the best state so far.

    Attributes:
        done: Number of steps so far.
        curve: Measurements so far.
        best: Step of the best state.
        states: The best state of each tuned tensor.
        ends: Whether twice as many steps gained little, so that training ends.
    """

    def __init__(
        self,
        network: TunedNetwork,
        tuned: Sequence[Tuned],
        cut: Split,
        pressed: Callable[[float], Pressure | None],
    ) -> None:
        self._network, self._tuned, self._held, self._pressed = network, tuned, cut.batches()[1], pressed
        self._schedule, self._rates = cut.schedule, cut.rates
        leaves: dict[str, list[torch.Tensor]] = {}
        for each in tuned:
            for kind, leaf in each.trained().items():
                leaves.setdefault(kind, []).append(leaf)
        with_codes = [each for each in tuned if "codes" in each.trained()]

        def press(number: int) -> None:
            if self._price is not None and isinstance(each := with_codes[number], TunedLadders):
                each.press(self._price)

        self._codes = CodeSteps(leaves.pop("codes", []), lambda: self._rate("codes"), press)
        groups = [{"params": params, "kind": kind} for kind, params in leaves.items()]
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)
        self._pressure: Pressure | None = None
        self._price: float | None = None  # of a bit in this step
        self._since = Divergence()  # since the last measurement
        self._before: dict[str, Any] | None = None  # the state from which rates fall, to which training returns
        self._compared: list[float] = []  # KL of each held-out batch when rates had fallen the last time
        self._rose = False  # whether it has risen once
        self.done, self.best, self.ends = 0, 0, False
        self.curve: list[Point] = []
        self.states: list[dict[str, Any]] = []

    def close(self) -> None:
        """Step no more."""
        self._codes.close()

    def begin(self) -> None:
        """Measure the start."""
        start = mean_kl(self._network.divergences(self._held))
        if not math.isfinite(start):
            raise CalibrationError(
                "The quantized network predicts NaN or Inf on the held-out windows, so it cannot be tuned."
            )
        self._pressure = self._pressed(start)
        self.curve = [Point(step=0, training=None, held_out=start, bytes=self._size())]
        self.states = [each.state() for each in self._tuned]

    def step(self, batch: int) -> None:
        """Take one optimizer step on a batch: of codes within the backward pass, of all else after it."""
        self._price = None if self._pressure is None else self._pressure.next_price()
        self._since += self._network.backward(batch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(group["kind"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1

    def _rate(self, kind: str) -> float:
        return self._rates[kind] * self._schedule.rate(self.done)

    def fall(self) -> None:
        """Keep the state to which training returns after the next measurement."""
        self._before = _copied(self._moving())

    def look(self) -> None:
        """Measure on the held-out windows; keep the state if it is the best one that is small enough.

        Where rates had fallen, return to the state before, and compare with the last such measurement.
        """
        compared = self._network.divergences(self._held)
        self._keep(mean_kl(compared), self._since.kl / self._since.tokens)
        self._since = Divergence()
        if self._before is not None:
            measured = None if self._pressure is None else self._pressure.standing()
            self._move(self._before)
            self._before = None
            if self._pressure is not None and measured is not None:
                self._pressure.restore(self._pressure.standing() | {"allowed": measured["allowed"]})
            self._compare([mean_kl([parts]) for parts in compared])

    def _compare(self, now: list[float]) -> None:
        """End training where twice as many steps gained little, but not where the KL rose for the first time."""
        if self._compared and gains_little(self._compared, now):
            rises = sum(now) > sum(self._compared)
            self.ends = self._rose or not rises
            self._rose = True
            if self.ends:
                logger.info("training ends after %d steps, as the last half of them gained little", self.done)
        self._compared = now

    def _keep(self, held_out: float, training: float) -> None:
        """Add a measurement to the curve, and keep the state if it is the best one that is small enough."""
        if not (math.isfinite(held_out) and math.isfinite(training)):
            return
        size, best = self._size(), next(point.held_out for point in self.curve if point.step == self.best)
        self.curve.append(Point(step=self.done, training=training, held_out=held_out, bytes=size))
        if held_out < best and (self._pressure is None or size is None or size <= self._pressure.most):
            self.best = self.done
            for number, each in enumerate(self._tuned):  # one after the other, as each replaces one that is as large
                self.states[number] = each.state()

    def standing(self) -> dict[str, Any]:
        """Return the complete state of training: numbers, and tensors in dicts and lists."""
        return {
            "done": self.done,
            "best": self.best,
            "sum": self._since.kl,
            "tokens": self._since.tokens,
            "curve": [asdict(point) for point in self.curve],
            "states": self.states,
            "before": self._before,
            "compared": self._compared,
            "rose": self._rose,
            "ends": self.ends,
            **self._moving(),
        }

    def _moving(self) -> dict[str, Any]:
        """Return the part of the state that steps change."""
        return {
            "leaves": [dict(each.trained()) for each in self._tuned],
            "optimizer": self._optimizer.state_dict(),
            "codes": self._codes.state(),
            "pressure": None if self._pressure is None else self._pressure.standing(),
        }

    def restore(self, standing: Mapping[str, Any]) -> None:
        """Restore the state that `standing` returned."""
        self.done, self.best = standing["done"], standing["best"]
        self._since = Divergence(kl=standing["sum"], tokens=standing["tokens"])
        self.curve = [Point(**point) for point in standing["curve"]]
        self.states = [_beside(each, state) for each, state in zip(self._tuned, standing["states"], strict=True)]
        self._before, self._compared = standing["before"], standing["compared"]
        self._rose, self.ends = standing["rose"], standing["ends"]
        self._pressure = self._pressed(self.curve[0].held_out)
        self._move(standing)

    @torch.no_grad()
    def _move(self, state: Mapping[str, Any]) -> None:
        """Restore what `_moving` returned."""
        for each, leaves in zip(self._tuned, state["leaves"], strict=True):
            for kind, leaf in each.trained().items():
                leaf.copy_(leaves[kind])
        self._optimizer.load_state_dict(state["optimizer"])
        self._codes.restore(state["codes"])
        if self._pressure is not None:
            self._pressure.restore(state["pressure"])

    def _size(self) -> int | None:
        return None if self._pressure is None else self._pressure.measure()


def _beside(tuned: Tuned, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as read from disk on the device of the tensors it is of."""
    return {name: part.to(tuned.device) if isinstance(part, torch.Tensor) else part for name, part in state.items()}


def _copied(state: Any) -> Any:
    """Return a state in memory of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {name: _copied(part) for name, part in state.items()}
    return [_copied(part) for part in state] if isinstance(state, list | tuple) else state


def mean_kl(batches: Iterable[Iterable[Divergence]]) -> float:
    """Return the mean KL per token over the parts of batches."""
    total = sum((part for parts in batches for part in parts), Divergence())
    return total.kl / total.tokens
