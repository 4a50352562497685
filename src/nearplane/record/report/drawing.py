"""Inline SVG plots that stretch with the page: horizontal positions are percentages, so text and marks keep their size.

This file draws scales, ticks, marks and curves of any data. Needs no package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

TICK_ROW_HEIGHT = 15  # between rows of tick labels, in CSS pixels
PLOT_HEIGHT = 300  # of every plot, in CSS pixels; the width follows the page
COLOUR_COUNT = 7  # colours k0, k1, ... of the style sheet: Okabe and Ito's, safe for colour-blind readers
MINUS, TIMES, NO_VALUE = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
MARKS = (  # circle, square, triangle, diamond, triangle upside down, plus, bar across, bar upright
    '<circle r="3.3"/>',
    '<path d="M-2.9-2.9h5.8v5.8h-5.8z"/>',
    '<path d="M0-3.9 3.6 2.6h-7.2z"/>',
    '<path d="M0-4 4 0 0 4-4 0z"/>',
    '<path d="M0 3.9 3.6-2.6h-7.2z"/>',
    '<path d="M-1.2-3.8h2.4v2.6h2.6v2.4h-2.6v2.6h-2.4v-2.6h-2.6v-2.4h2.6z"/>',
    '<path d="M-3.8-1.2h7.6v2.4h-7.6z"/>',
    '<path d="M-1.2-3.8h2.4v7.6h-2.4z"/>',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Position of values between the two ends of an axis.

    Args:
        low, high: Values at the ends, low < high; positive on a logarithmic scale.
        log: Whether the scale is logarithmic.
    """

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def across(self, value: float) -> str:
        """Return the position of a value from the left, as a percentage."""
        return f"{_coordinate(100 * self(value))}%"

    def down(self, value: float) -> str:
        """Return the position of a value from the top, in pixels."""
        return _coordinate(PLOT_HEIGHT * (1 - self(value)))

    def holds(self, value: float) -> bool:
        """Return whether a value lies between the ends."""
        return self.low <= value <= self.high

    def ticks(self, most: int = 7) -> list[float]:
        """Return up to `most` round values between the ends."""
        if not self.log:
            step = _round_up((self.high - self.low) / most)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [count * step for count in range(first, last + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for parts, every in (((1, 2, 3, 5), 1), ((1, 3), 1), *(((1,), every) for every in range(1, last - first + 2))):
            powers = (power for power in range(first, last + 1) if power % every == 0)
            values = [value for power in powers for part in parts if self.holds(value := float(f"{part}e{power}"))]
            if len(values) <= most:
                break
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One tick of the horizontal axis.

    Args:
        place: Position from the left, as a percentage.
        text: Label of the tick.
        row: Row of the label, 0 at the top; several rows keep neighbours apart.
        wide: Whether only wide screens show it.
    """

    place: str
    text: str
    row: int = 0
    wide: bool = False


def positive(value: float | None) -> TypeGuard[float]:
    """Return whether a value is positive and finite, so that a logarithmic axis can show it."""
    return value is not None and 0 < value < math.inf


def spanning(values: Iterable[float], *, log: bool = False, least: float | None = None) -> Scale:
    """Return a scale that contains all values with room at both ends; it begins at `least` if given."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    low, high = min(known), max(known)
    if log:
        room = max(0.06 * (math.log(high) - math.log(low)), 0.2)
        ends = (min(max(math.log(end) + by, -700), 700) for end, by in ((low, -room), (high, room)))
        return Scale(low=math.exp(next(ends)), high=math.exp(next(ends)), log=True)
    room = max(0.06 * (high - (low if least is None else least)), 0.01 * abs(high), 1e-12)
    return Scale(low=low - room if least is None else least, high=high + room)


def glyph(kind: int, x: str, y: str, *, hollow: bool = False) -> str:
    """Return a mark of a kind; the first 56 kinds differ in colour or shape."""
    look = f"k{kind % COLOUR_COUNT}{' open' if hollow else ''}"
    return f'<use href="#g{kind % len(MARKS)}" class="{look}" x="{x}" y="{y}"/>'


def key(kind: int, *, hollow: bool = False) -> str:
    """Return a mark of a kind for a legend."""
    mark = glyph(kind, "50%", "50%", hollow=hollow).replace("#g", "#h")
    return f'<svg class="key" aria-hidden="true">{mark}</svg>'


def glyphs(size: float) -> str:
    """Return the shapes of marks and legends, once per page; marks of size 1 are about 7 pixels wide."""
    shapes = "".join(
        f'<g id="h{index}">{shape}</g><g id="g{index}" transform="scale({_coordinate(size)})">{shape}</g>'
        for index, shape in enumerate(MARKS)
    )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{shapes}</defs></svg>'


def line(x1: str, y1: str, x2: str, y2: str, look: str) -> str:
    """Return a straight line with the CSS class `look`."""
    return f'<line class="{look}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def level(y: Scale, value: float, label: str) -> str:
    """Return a dashed line across the plot at a value, labelled at its right end; empty outside the scale."""
    if not y.holds(value):
        return ""
    place = y.down(value)
    return f"{line('0', place, '100%', place, 'level')}{note('100%', _coordinate(float(place) - 5), label, at='end')}"


def note(x: str, y: str, text: str, *, at: str = "start") -> str:
    """Return a text in the plot whose `at`, "start" or "end", lies at x."""
    return f'<text class="note" x="{x}" y="{y}" text-anchor="{at}">{escape(text)}</text>'


def curve(x: Scale, y: Scale, points: Sequence[tuple[float, float]], look: str) -> str:
    """Return a curve through points, with a constant line width."""
    places = " ".join(f"{_coordinate(1000 * x(a))},{y.down(b)}" for a, b in points)
    return (
        f'<svg viewBox="0 0 1000 {PLOT_HEIGHT}" preserveAspectRatio="none" width="100%" height="100%">'
        f'<polyline class="{look}" vector-effect="non-scaling-stroke" points="{places}"/></svg>'
    )


def named(index: int, title: str, parts: Iterable[str]) -> str:
    """Return the marks of layer number `index` with a title, which browsers show."""
    return f'<g data-l="{index}"><title>{escape(title)}</title>{"".join(parts)}</g>'


def plot(label: str, y: Scale, across: Sequence[Tick], parts: Iterable[str]) -> str:
    """Return a plot with its axes.

    Args:
        label: Description of the plot for screen readers.
        y: Scale of the vertical axis.
        across: Ticks of the horizontal axis.
        parts: SVG elements of the marks.
    """
    grid, values = [], y.ticks()
    for value, text in zip(values, numbers(values, y), strict=True):
        place = y.down(value)
        grid.append(line("0", place, "100%", place, "grid"))
        grid.append(f'<text x="-8" y="{place}" dy="4" text-anchor="end">{text}</text>')
    for tick in across:
        css_class, below = ' class="wide"' if tick.wide else "", PLOT_HEIGHT + TICK_ROW_HEIGHT * tick.row
        grid.append(
            f"<g{css_class}>{line(tick.place, str(PLOT_HEIGHT), tick.place, str(below + 5), 'axis')}"
            f'<text x="{tick.place}" y="{below + 18}" text-anchor="middle">{escape(tick.text)}</text></g>'
        )
    edge = line("0", str(PLOT_HEIGHT), "100%", str(PLOT_HEIGHT), "axis")
    margin = 26 + TICK_ROW_HEIGHT * max((tick.row for tick in across), default=0)
    return (
        f'<div class="plot" style="margin-bottom:{margin}px"><svg role="img" tabindex="0" aria-label="{escape(label)}" '
        f'height="{PLOT_HEIGHT}"><g class="frame">{"".join(grid)}{edge}</g>'
        f'<g class="marks">{"".join(parts)}</g></svg></div>'
    )


def along(x: Scale, most: int = 8) -> list[Tick]:
    """Return ticks of a horizontal axis for `plot`; narrow screens show every second one."""
    values = x.ticks(most)
    texts = numbers(values, x)
    return [
        Tick(place=x.across(value), text=text, wide=index % 2 == 1)
        for index, (value, text) in enumerate(zip(values, texts, strict=True))
    ]


def numbers(values: Sequence[float], scale: Scale) -> list[str]:
    """Return the labels of the ticks of a scale."""
    if not scale.log:
        digits = next(
            n for n in range(13) if all(abs(round(value, n) - value) < 1e-9 * scale.high for value in values) or n == 12
        )
        return [f"{value:.{digits}f}".replace("-", MINUS) for value in values]
    return [_power(value) for value in values]


def _power(value: float) -> str:
    """Return the label of a number with one significant digit, with powers of ten outside 0.01 to 10,000."""
    if 0.01 <= value < 10000:
        return f"{value:g}"
    mantissa, power = f"{value:.0e}".split("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


def short(value: float) -> str:
    """Return a number with three digits."""
    if not math.isfinite(value):
        return NO_VALUE if math.isnan(value) else f"{MINUS if value < 0 else ''}∞"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:#.3g}".rstrip(".").replace("-", MINUS) if value else "0"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}".replace("-", MINUS)
    mantissa, power = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(power)}".replace("-", MINUS)


def percent(share: float) -> str:
    """Return a share in percent with three digits."""
    return f"{short(100 * share)} %"


def _coordinate(value: float) -> str:
    """Return a coordinate with two decimals, without trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _round_up(step: float) -> float:
    """Return the least of 1, 2, 2.5, 5, 10, ... times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= step * (1 - 1e-9))
