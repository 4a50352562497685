"""Schedules of tuning: the learning rate of every step, and the steps after which the network is measured on held-out windows.

Where the number of steps is given, rates rise during the first tenth of them and then fall along half a cosine. Where training
ends by itself, rates stay as they are, and fall to zero only before a measurement; training then goes on from where they began
to fall, until twice as many steps gain little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WARMUP = 0.1  # fraction of the steps in which the learning rates rise
FIRST = (
    100  # steps before the first measurement where training ends by itself; each later one comes after twice as many
)
FALL = 0.2  # steps in which rates fall, as a fraction of those before them
LAST = 1.25  # least multiple of the steps before that a last measurement is made for
LEAST_GAIN = 0.02  # of held-out KL by twice as many steps, with its standard error; with less, training ends
SHORTEST = FIRST + round(FALL * FIRST)  # steps up to the first measurement, with which training begins


class Schedule(Protocol):
    """Steps of a training, and their learning rates."""

    @property
    def steps(self) -> int:
        """Largest number of steps."""

    def rate(self, done: int) -> float:
        """Return the learning rate after so many steps, as a fraction of the largest."""

    def looks(self, done: int) -> bool:
        """Return whether the network is measured after so many steps."""

    def falls(self, done: int) -> bool:
        """Return whether rates begin to fall after so many steps, to which training returns."""


@dataclass(frozen=True, slots=True)
class Known:
    """A number of steps, and of evenly spaced measurements, the last one at the end."""

    steps: int
    measured: int = 2

    def rate(self, done: int) -> float:
        """Return the learning rate after so many steps: warmup, times half a cosine down to 0."""
        rising = min(1.0, (done + 1) / (WARMUP * self.steps + 1))
        return rising * (0.5 + 0.5 * math.cos(math.pi * done / self.steps))

    def looks(self, done: int) -> bool:
        """Return whether the network is measured after so many steps."""
        return any(done == round(self.steps * (look + 1) / self.measured) for look in range(self.measured))

    def falls(self, done: int) -> bool:
        """Return False: training goes on from every measurement."""
        return False


@dataclass(frozen=True, slots=True)
class Open:
    """At most so many steps, at least `SHORTEST`, of which those count in which rates fall, too."""

    most: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(steps with constant rates, steps in which they fall) up to each measurement."""
        parts, kept, used = list[tuple[int, int]](), 0, 0
        while True:
            more = min(kept or FIRST, math.floor((self.most - used - FALL * kept) / (1 + FALL)))
            if parts and kept + more < LAST * kept:
                return parts
            fall = max(1, min(round(FALL * (kept + more)), self.most - used - more))
            parts.append((more, fall))
            kept, used = kept + more, used + more + fall

    @property
    def steps(self) -> int:
        """Largest number of steps."""
        return sum(map(sum, self.parts))

    def rate(self, done: int) -> float:
        """Return the learning rate after so many steps."""
        before = 0
        for constant, fall in self.parts:
            if done < before + constant:
                return min(1.0, (done + 1) / (WARMUP * FIRST + 1))
            if done < before + constant + fall:
                return 1 - (done - before - constant + 1) / (fall + 1)
            before += constant + fall
        return 0.0

    def looks(self, done: int) -> bool:
        """Return whether the network is measured after so many steps."""
        return done in self._places(1)

    def falls(self, done: int) -> bool:
        """Return whether rates begin to fall after so many steps."""
        return done in self._places(0)

    def _places(self, end: int) -> list[int]:
        """Return the steps after which rates begin to fall (0), or the network is measured (1)."""
        places, before = list[int](), 0
        for constant, fall in self.parts:
            places.append(before + constant + end * fall)
            before += constant + fall
        return places


def gains_little(before: Sequence[float], now: Sequence[float]) -> bool:
    """Return whether the KL of held-out batches fell by less than `LEAST_GAIN`, at most by that with its standard error.

    Args:
        before, now: KL of each batch at two measurements.
    """
    gains, count = [a - b for a, b in zip(before, now, strict=True)], len(now)
    mean = sum(gains) / count
    spread = sum((each - mean) ** 2 for each in gains) / max(1, count - 1)
    return mean + math.sqrt(spread / count) < LEAST_GAIN * sum(before) / count
