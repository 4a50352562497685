"""The best use of a budget of bits: spent along measured curves of what each layer costs the network, see `probe.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from nearplane.errors import RecipeError

LOW, HIGH = 0.5, 7.5  # rates that a layer may get
RESOLUTION = 32  # rates per bit between which `allocate` chooses
W = TypeVar("W", int, float)
UNITS = 1 << 26  # most steps of the exact search for widths


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What it costs the network to quantize one layer, or several that must have the same width, and nothing else.

    Args:
        layers: full names.
        weights: of them together.
        rates: bits per weight, ascending.
        losses: KL(original || perturbed) in nats per scored token at these rates, measured or derived, see `probe.py`.
    """

    layers: tuple[str, ...]
    weights: int
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def __call__(self, rate: float) -> float:
        """Return the loss at any rate: log2 of it is linear between the points.

        Beyond the highest it falls by the high-rate law, 2 bits for every bit. Below the lowest it rises as between the
        lowest two, but no slower than by that law: there the law fails, to the worse.
        """
        logs = [math.log2(max(loss, 1e-12)) for loss in self.losses]
        if rate >= self.rates[-1]:
            return float(2.0 ** (logs[-1] - 2 * (rate - self.rates[-1])))
        if rate < self.rates[0]:
            first = -2.0 if len(logs) == 1 else min(-2.0, (logs[1] - logs[0]) / (self.rates[1] - self.rates[0]))
            return float(2.0 ** (logs[0] + first * (rate - self.rates[0])))
        return float(2.0 ** np.interp(rate, self.rates, logs))


def sum_of(curves: Sequence[Curve]) -> Curve:
    """Return the curve of layers that get the same rate, from curves over the same rates: their losses add up."""
    return Curve(
        layers=tuple(name for curve in curves for name in curve.layers),
        weights=sum(curve.weights for curve in curves),
        rates=curves[0].rates,
        losses=tuple(map(sum, zip(*(curve.losses for curve in curves), strict=True))),
    )


def allocate(curves: Sequence[Curve], budget: float) -> dict[str, float]:
    """Give every layer the rate at which one more bit would help the network as much as anywhere else.

    The sum of the curves is least, over the lower convex hulls of the curves, with rates that average `budget` over the
    weights exactly.

    Args:
        curves: of all layers.
        budget: bits per weight.

    Returns:
        {layer: rate}.

    Raises:
        RecipeError: the budget is not from `LOW` to `HIGH`.
    """
    if not LOW <= budget <= HIGH:
        raise RecipeError(f"{budget:g} bits per weight asked for; layers can be given {LOW:g} to {HIGH:g}.")
    grid = np.linspace(LOW, HIGH, round((HIGH - LOW) * RESOLUTION) + 1)
    given = [LOW] * len(curves)
    left = (budget - LOW) * sum(curve.weights for curve in curves)
    for _, index, a, b in sorted(_segments(curves, grid), key=lambda segment: -segment[0]):
        weights = curves[index].weights
        taken = min((b - a) * weights, left)
        left -= taken
        given[index] = a + taken / weights
        if left <= 0:
            break
    return {layer: rate for curve, rate in zip(curves, given, strict=True) for layer in curve.layers}


def _segments(curves: Sequence[Curve], grid: np.ndarray) -> Iterator[tuple[float, int, float, float]]:
    """Yield (gain per bit, curve, from rate, to rate) of the lower convex hulls of curves: of each, gains descend."""
    for index, curve in enumerate(curves):
        hull: list[tuple[float, float]] = []
        for x, y in ((float(rate), curve(float(rate))) for rate in grid):
            while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
                hull.pop()
            hull.append((x, y))
        for (a, worse), (b, better) in pairwise(hull):
            yield (worse - better) / ((b - a) * curve.weights), index, a, b


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Return whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def allocate_widths(curves: Sequence[Curve], budget: float, widths: Sequence[int]) -> dict[str, int]:
    """Give every layer one of the widths so that the sum of the curves is least and the average at most the budget.

    The exact optimum, by dynamic programming over the bits spent.

    Args:
        curves: of all layers; layers of one curve get the same width.
        budget: bits of a code, averaged over the weights.
        widths: to choose from.

    Returns:
        {layer: width}.

    Raises:
        RecipeError: the budget is less than the least width.
    """
    given = allocate_choices(curves, budget, [widths] * len(curves))
    return {layer: int(width) for curve, width in zip(curves, given, strict=True) for layer in curve.layers}


def allocate_choices(curves: Sequence[Curve], budget: float, choices: Sequence[Sequence[float]]) -> list[float]:
    """Give every curve one of its rates so that the sum of the curves is least and the average at most the budget.

    The exact optimum, by dynamic programming over the bits spent; a curve's weights take a whole number of bits at each rate.

    Args:
        curves: of all layers.
        budget: bits per weight, averaged over the weights.
        choices: the rates of each curve to choose from.

    Raises:
        RecipeError: the budget is less than the least rates together.
    """
    total = sum(curve.weights for curve in curves)
    bits = math.floor(budget * total + 1e-6)
    least = [min(own) for own in choices]
    left = bits - sum(round(low * curve.weights) for low, curve in zip(least, curves, strict=True))
    if left < 0:
        mean = (bits - left) / total
        raise RecipeError(f"{budget:g} bits asked for; the least that this format has is {mean:g}.")
    costs = [
        [round((rate - low) * curve.weights) for rate in own]
        for own, low, curve in zip(choices, least, curves, strict=True)
    ]
    unit = max(math.gcd(*(cost for own in costs for cost in own)), 1, -(-bits * len(curves) // UNITS))
    room = left // unit  # to spend on top of the least rates
    best = np.zeros(room + 1)  # [units spent]: least loss so far
    picks = np.empty((len(curves), room + 1), dtype=np.int8)
    for index, curve in enumerate(curves):
        options = np.full((len(choices[index]), room + 1), np.inf)
        for option, (rate, cost) in enumerate(zip(choices[index], costs[index], strict=True)):
            if (units := -(-cost // unit)) <= room:
                options[option, units:] = best[: room + 1 - units] + curve(rate)
        picks[index] = options.argmin(0)
        best = options.min(0)
    given = [0.0] * len(curves)
    for index in range(len(curves) - 1, -1, -1):
        pick = picks[index, room]
        given[index] = choices[index][pick]
        room -= -(-costs[index][pick] // unit)
    return given


def probed_widths(budget: float, widths: Sequence[W]) -> tuple[W, ...]:
    """Return the widths, or rates, at which to measure for a budget: the nearest three, the budget between the first and the last.

    Wider ones follow by the high-rate law; a narrower one than any that was measured must not be given to any layer.
    """
    below = [width for width in sorted(widths) if width <= budget]
    above = [width for width in sorted(widths) if width > budget]
    return tuple(below[-2:] + above[: 3 - len(below[-2:])])


def probed_rates(budget: float) -> tuple[float, float, float]:
    """Return the rates of a curve for a budget: well below it, a bit below, and a little above.

    From 2 bits on the logarithm of the loss falls by 2 with every bit; below it is steeper and bent.
    """
    low = max(0.25, budget - 1.75)
    return low, low + 0.75, low + 2
