"""Schedules of tuning: the learning rate of every step, and the steps after which the network is measured on held-out windows.

Where the number of steps is given, rates rise during the first tenth of them and then fall along half a cosine. Where training
ends by itself, rates stay as they are, and fall to zero only before a measurement; training then goes on from where they began
to fall, until twice as many steps gain little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

WARMUP = 0.1  # fraction of the steps in which the learning rates rise
# where training ends by itself: steps before the first measurement, each later one of which comes after twice as many, and the
# last one of all after at least `LEAST_GROWTH` times as many; and steps in which rates fall, as a fraction of those before
FIRST_STEPS, LEAST_GROWTH, FALL_SHARE = 100, 1.25, 0.2
CONSTANT_RATE = 0.5  # of the largest learning rate, the mean of a cosine: all of it gained less (docs/log.md)
LEAST_GAIN = 0.02  # of held-out KL by twice as many steps, with its standard error; with less, training ends
SHORTEST_STEPS = FIRST_STEPS + round(FALL_SHARE * FIRST_STEPS)  # with fewer, training does not begin


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
class FixedSteps:
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


@dataclass(frozen=True)
class OpenEnded:
    """At most so many steps, at least `SHORTEST_STEPS`, of which those count in which rates fall, too."""

    most: int

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(steps after which rates begin to fall, steps after which the network is measured) of each measurement."""
        places, kept, used = list[tuple[int, int]](), 0, 0  # steps from which training goes on, and all steps
        while True:
            more = min(kept or FIRST_STEPS, math.floor((self.most - used - FALL_SHARE * kept) / (1 + FALL_SHARE)))
            if places and kept + more < LEAST_GROWTH * kept:
                return places
            falls = used + more
            kept, used = kept + more, falls + max(1, min(round(FALL_SHARE * (kept + more)), self.most - falls))
            places.append((falls, used))

    @property
    def steps(self) -> int:
        """Largest number of steps."""
        return self.places[-1][1]

    def rate(self, done: int) -> float:
        """Return the learning rate after so many steps."""
        for falls, measured in self.places:
            if done < falls:
                return CONSTANT_RATE * min(1.0, (done + 1) / (WARMUP * FIRST_STEPS + 1))
            if done < measured:
                return CONSTANT_RATE * (measured - done) / (measured - falls + 1)
        return 0.0

    def looks(self, done: int) -> bool:
        """Return whether the network is measured after so many steps."""
        return any(done == measured for _, measured in self.places)

    def falls(self, done: int) -> bool:
        """Return whether rates begin to fall after so many steps."""
        return any(done == falls for falls, _ in self.places)


def gains_little(before: Sequence[float], now: Sequence[float]) -> bool:
    """Return whether the KL of held-out batches fell by less than `LEAST_GAIN` with its standard error, or is no number.

    Args:
        before, now: KL of each batch at two measurements.
    """
    gains, count = [a - b for a, b in zip(before, now, strict=True)], len(now)
    mean = sum(gains) / count
    spread = sum((each - mean) ** 2 for each in gains) / max(1, count - 1)
    return not mean + math.sqrt(spread / count) >= LEAST_GAIN * sum(before) / count
