"""Allocation of a bit budget to layers, along curves of what errors of each layer cost, see `measured_bits.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from nearplane.errors import RecipeError

MIN_RATE, MAX_RATE = 0.5, 7.5  # bits per weight of a layer
RATES_PER_BIT = 32  # resolution of the rates that `allocate` chooses from
W = TypeVar("W", int, float)
MAX_BUDGET_UNITS = 1 << 26  # resolution of the exact search for widths, limited for its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Loss of the network as a function of the rate of one layer, or of several with the same width, all others unquantized.

    Args:
        layers: Full names of the layers.
        weights: Number of weights of these layers.
        rates: Bits per weight, ascending.
        losses: KL from the original at these rates, nats per token, as `estimates.py` estimates it.
    """

    layers: tuple[str, ...]
    weights: int
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def __call__(self, rate: float) -> float:
        """Return the loss at any rate, with log2 of the loss linear between the points.

        Above the highest rate it falls by 2 octaves per bit (high-rate law). Below the lowest it rises as between the lowest two,
        but at least by that law, which underestimates losses there.
        """
        logs = [math.log2(max(loss, 1e-12)) for loss in self.losses]
        if rate >= self.rates[-1]:
            return float(2.0 ** (logs[-1] - 2 * (rate - self.rates[-1])))
        if rate < self.rates[0]:
            first = -2.0 if len(logs) == 1 else min(-2.0, (logs[1] - logs[0]) / (self.rates[1] - self.rates[0]))
            return float(2.0 ** (logs[0] + first * (rate - self.rates[0])))
        return float(2.0 ** np.interp(rate, self.rates, logs))


def allocate(curves: Sequence[Curve], budget: float, highest: float = MAX_RATE) -> dict[str, float]:
    """Choose the rates that minimize the sum of the curves, so that one more bit would help equally in every layer.

    Minimizes over the lower convex hulls of the curves, with rates that average `budget` over the weights exactly.

    Args:
        curves: Curves of all layers.
        budget: Average bits per weight.
        highest: Bits per weight that no layer exceeds, not less than the budget.

    Returns:
        {layer: rate}.

    Raises:
        RecipeError: The budget is not from `MIN_RATE` to `MAX_RATE`.
    """
    if not MIN_RATE <= budget <= MAX_RATE:
        raise RecipeError(f"Found a budget of {budget:g} bits per weight; expected {MIN_RATE:g} to {MAX_RATE:g}.")
    grid = np.linspace(MIN_RATE, highest, round((highest - MIN_RATE) * RATES_PER_BIT) + 1)
    rates = [MIN_RATE] * len(curves)
    left = (budget - MIN_RATE) * sum(curve.weights for curve in curves)
    for _, index, a, b in sorted(_segments(curves, grid), key=lambda segment: -segment[0]):
        weights = curves[index].weights
        added = min((b - a) * weights, left)
        left -= added
        rates[index] = a + added / weights
        if left <= 0:
            break
    return {layer: rate for curve, rate in zip(curves, rates, strict=True) for layer in curve.layers}


def _segments(curves: Sequence[Curve], grid: np.ndarray) -> Iterator[tuple[float, int, float, float]]:
    """Yield (gain per bit, curve, from rate, to rate) of the curves' lower convex hulls, gains of each curve descending."""
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
    """Choose the widths that minimize the sum of the curves, with an average of at most the budget.

    Exact, by dynamic programming over the bits spent.

    Args:
        curves: Curves of all layers; layers of one curve get the same width.
        budget: Bits per code, averaged over the weights.
        widths: Widths to choose from, in bits per code.

    Returns:
        {layer: width}.

    Raises:
        RecipeError: The budget is smaller than the smallest width.
    """
    chosen = allocate_choices(curves, budget, [widths] * len(curves))
    return {layer: int(width) for curve, width in zip(curves, chosen, strict=True) for layer in curve.layers}


def allocate_choices(curves: Sequence[Curve], budget: float, choices: Sequence[Sequence[float]]) -> list[float]:
    """Choose a rate for every curve so that the sum of the curves is least, with an average of at most the budget.

    Exact, by dynamic programming over the bits spent; the weights of a curve take a whole number of bits at each rate.

    Args:
        curves: Curves of all layers.
        budget: Bits per weight, averaged over the weights.
        choices: Rates to choose from, for each curve.

    Raises:
        RecipeError: The budget is smaller than the smallest rates together.
    """
    total = sum(curve.weights for curve in curves)
    bits = math.floor(budget * total + 1e-6)
    costs = [[round(rate * curve.weights) for rate in rates] for rates, curve in zip(choices, curves, strict=True)]
    if (missing := sum(map(min, costs)) - bits) > 0:
        raise RecipeError(
            f"Found a budget of {budget:g} bits per weight; expected at least {(bits + missing) / total:g}, the smallest of this "
            f"format."
        )
    losses = [[curve(rate) for rate in rates] for rates, curve in zip(choices, curves, strict=True)]
    return [rates[pick] for rates, pick in zip(choices, choose(costs, losses, bits), strict=True)]


def choose(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Choose an option of every unit so that the sum of the losses is least and that of the costs at most the budget.

    Exact, by dynamic programming over what is spent above the least costs, in up to `MAX_BUDGET_UNITS` steps for all of them.

    Args:
        costs, losses: Costs, as whole numbers, and losses of each option of each unit.
        budget: Sum of the costs, not smaller than that of the least ones.

    Returns:
        The number of the option of each unit.
    """
    above = [[cost - min(row) for cost in row] for row in costs]
    left = budget - sum(map(min, costs))
    unit = max(math.gcd(*(cost for row in above for cost in row)), 1, -(-budget * len(costs) // MAX_BUDGET_UNITS))
    room = left // unit  # units to spend above the least costs
    best = np.zeros(room + 1)  # [units spent]: least loss of the units so far
    picks = np.empty((len(costs), room + 1), dtype=np.int8)
    for index, (row, row_losses) in enumerate(zip(above, losses, strict=True)):
        options = np.full((len(row), room + 1), np.inf)
        for option, (cost, loss) in enumerate(zip(row, row_losses, strict=True)):
            if (spent := -(-cost // unit)) <= room:
                options[option, spent:] = best[: room + 1 - spent] + loss
        picks[index] = options.argmin(0)
        best = options.min(0)
    chosen = [0] * len(costs)
    for index in range(len(costs) - 1, -1, -1):
        chosen[index] = int(picks[index, room])
        room -= -(-above[index][chosen[index]] // unit)
    return chosen


def tried_widths(budget: float, widths: Sequence[W]) -> tuple[W, ...]:
    """Return the three widths, or rates, nearest to the budget, which lies between the first and the last.

    Layers get one of these: with losses of larger widths by the high-rate law the choice was worse on Gemma 3 270M.
    """
    below = [width for width in sorted(widths) if width <= budget]
    above = [width for width in sorted(widths) if width > budget]
    return tuple(below[-2:] + above[: 3 - len(below[-2:])])


def tried_rates(budget: float) -> tuple[float, float, float]:
    """Return the rates of a curve for a budget: far below it, slightly below it and slightly above it.

    From 2 bits on log2 of the loss falls by 2 with every bit; below 2 bits it falls faster and is curved.
    """
    low = max(0.25, budget - 1.75)
    return low, low + 0.75, low + 2
