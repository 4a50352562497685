"""Figures of the report: the numbers of a record that they show, and their captions.

`drawing.py` draws scales, marks and curves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from html import escape

from nearplane.recipe.thresholds import MAX_CERTIFIED_INPUTS
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.report.drawing import (
    COLOUR_COUNT,
    MINUS,
    PLOT_HEIGHT,
    Scale,
    Tick,
    along,
    curve,
    glyph,
    glyphs,
    key,
    level,
    line,
    named,
    note,
    percent,
    plot,
    positive,
    short,
    spanning,
)
from nearplane.system.sizes import counted

MAX_MARKED_KINDS = 11  # of layers with a separate mark; all rarer kinds share one
# bits per weight that rounding to evenly spaced values costs at high rates, 0.2546
UNIFORM_ROUNDING_BITS = 0.5 * math.log2(math.pi * math.e / 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure with a group of marks for every layer.

    Args:
        heading, words: Title and caption.
        axis, below: Labels of the vertical and the horizontal axis.
        drawing: The plot; empty if the record has no numbers for it, for the reason in `words`.
        keys: Entries of the legend; empty if marks stand for kinds of layers.
    """

    heading: str
    words: str
    axis: str = ""
    below: str = ""
    drawing: str = ""
    keys: Sequence[str] = ()

    def html(self, *, broad: bool) -> str:
        """Return the figure as HTML, with a line for the numbers of the selected mark."""
        legend = "".join(f"<span>{one}</span>" for one in self.keys)
        legend = f'<div class="legend">{legend}</div>' if legend else ""
        return (
            f'<figure class="points{" broad" if broad else ""}"><figcaption><h3>{escape(self.heading)}</h3>'
            f"<p>{escape(self.words)}</p></figcaption>{legend}"
            f'<p class="axis">{escape(self.axis)}</p>{self.drawing}<p class="axis below">{escape(self.below)}</p>'
            f'<output aria-live="polite"></output></figure>'
        )


def figures(record: RunRecord) -> str:
    """Return all figures; the first is as wide as the page, and the second too if the number is even."""
    if not record.layers:
        return ""
    candidates = [figure(record) for figure in (losses, shares, plane, above_limit, rates)]
    drawn = [figure for figure in candidates if figure.drawing]
    second_broad = len(drawn) % 2 == 0
    html = "".join(figure.html(broad=index == 0 or (index == 1 and second_broad)) for index, figure in enumerate(drawn))
    absent = "".join(
        f'<p class="soft"><b>{escape(figure.heading)}</b>: {escape(figure.words)}</p>'
        for figure in candidates
        if not figure.drawing
    )
    return f'<div class="figures">{html}</div>{absent}'


def legend(record: RunRecord) -> str:
    """Return the bar that explains the marks and filters layers, and the shapes of the marks."""
    count = len(record.layers)
    buttons = "".join(
        f'<button type="button" data-k="{number}" aria-pressed="false">{key(number)} {escape(name)}</button>'
        for number, (name, _) in enumerate(kinds(record))
    )
    return (
        f"{glyphs(1 if count <= 120 else 0.8 if count <= 300 else 0.65)}"
        '<h2>Figures</h2><p class="soft hint">Point at a mark, or tap it, to read its numbers; all figures then circle '
        "that layer. Choose a kind of layer, or type a part of a name, to filter figures and table.</p>"
        '<div class="bar"><label>Filter '
        '<input id="filter" type="search" placeholder="part of a name" autocomplete="off"></label>'
        f'<span class="count soft">{count} of {counted(count, "layer")}</span>{buttons}</div>'
    )


def kinds(record: RunRecord) -> list[tuple[str, list[int]]]:
    """Return (shortest unambiguous name, layer numbers) of every kind of layer."""
    members: dict[str, list[int]] = {}
    for index, layer in enumerate(record.layers):
        members.setdefault(".".join(part for part in layer.name.split(".") if not part.isdigit()), []).append(index)
    marked = list(members)
    if len(marked) > MAX_MARKED_KINDS + 1:
        marked = sorted(members, key=lambda kind: -len(members[kind]))[:MAX_MARKED_KINDS]
    names = [kind for kind in members if kind in marked]
    others = sorted(index for kind, layers in members.items() if kind not in marked for index in layers)
    return [*((_ending(kind, names), members[kind]) for kind in names), *([("other", others)] if others else [])]


def _ending(name: str, names: Sequence[str]) -> str:
    """Return the shortest ending of a dotted name that no other name has."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        ending = ".".join(parts[-length:])
        if not any(other != name and f".{other}".endswith(f".{ending}") for other in names):
            return ending
    return name


def block_of(name: str) -> int | None:
    """Return the number of a layer's block, the first number in its name."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


class LayerAxis:
    """Horizontal axis of layers side by side: the position and the kind of each layer.

    Args:
        record: The record of the layers.
        by_kind: Whether layers are grouped by kind, or in the order of the solve.
    """

    def __init__(self, record: RunRecord, *, by_kind: bool = False) -> None:
        self.layers = record.layers
        self.by_kind = by_kind
        self.kinds = kinds(record)
        self.kind = {layer: number for number, (_, members) in enumerate(self.kinds) for layer in members}
        together = [layer for _, members in self.kinds for layer in members]
        self.at = {layer: place + 0.5 for place, layer in enumerate(together if by_kind else sorted(together))}
        self.x = Scale(low=0, high=len(record.layers))
        self.blocks = [block_of(layer.name) for layer in record.layers]

    def place(self, layer: int) -> str:
        """Return the position of a layer."""
        return self.x.across(self.at[layer])

    @property
    def below(self) -> str:
        """Return the label of the horizontal axis."""
        if self.by_kind:
            return "kind of layer; within each, in the order of the blocks"
        numbered = any(block is not None for block in self.blocks)
        return "block" if numbered else "layers, in the order they were quantized"

    def ticks(self) -> list[Tick]:
        """Return ticks with the names of kinds or the numbers of blocks, each in the middle of its layers."""
        if self.by_kind:
            rows = math.ceil(len(self.kinds) / 4)  # a telephone shows four names side by side
            return [
                Tick(place=self._middle(members), text=name, row=number % rows)
                for number, (name, members) in enumerate(self.kinds)
            ]
        runs: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            if block is not None:
                runs.setdefault(block, []).append(index)
        shown = list(runs)[:: _every(len(runs), 16)]
        seldom = _every(len(shown), 6)
        return [
            Tick(place=self._middle(runs[block]), text=str(block), wide=number % seldom > 0)
            for number, block in enumerate(shown)
        ]

    def _middle(self, layers: Sequence[int]) -> str:
        places = [self.at[layer] for layer in layers]
        return self.x.across((min(places) + max(places)) / 2)

    def borders(self) -> list[str]:
        """Return lines between kinds, for layers that are grouped by kind."""
        ends = (max(self.at[layer] for layer in members) + 0.5 for _, members in self.kinds[:-1])
        return [line(self.x.across(end), "0", self.x.across(end), "100%", "grid") for end in ends]

    def trends(self, y: Scale, value: Callable[[LayerRecord], float | None]) -> list[str]:
        """Return a line through the layers of each kind that occurs at most once per block."""
        drawn = []
        for number, (_, members) in enumerate(self.kinds):
            known = [
                (self.at[layer], v) for layer in members if (v := value(self.layers[layer])) is not None and y.holds(v)
            ]
            if len(known) > 1 and len({self.blocks[layer] for layer in members}) == len(members):
                drawn.append(curve(self.x, y, known, f"trend k{number % COLOUR_COUNT}"))
        return drawn

    def marks(
        self,
        y: Scale,
        values: Mapping[int, float],
        title_of: Callable[[LayerRecord, float], str],
        hollow: Set[int] = frozenset(),
    ) -> list[str]:
        """Return a mark with a title for every layer with a value; layers in `hollow` get hollow marks."""
        drawn = []
        for index, value in values.items():
            layer = self.layers[index]
            mark = glyph(self.kind[index], self.place(index), y.down(value), hollow=index in hollow)
            drawn.append(named(index, f"{layer.name}: {title_of(layer, value)}", [mark]))
        return drawn

    def figure(self, heading: str, words: str, axis: str, y: Scale, parts: Sequence[str]) -> Figure:
        """Return a figure of these layers side by side."""
        drawing = plot(heading, y, self.ticks(), parts)
        return Figure(heading=heading, words=words, axis=axis, below=self.below, drawing=drawing)


def _every(count: int, limit: int) -> int:
    """Return the least of 1, 2, 5, 10, ... so that every n-th of `count` items are at most `limit`."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 10**9) if math.ceil(count / step) <= limit)


def _finite(values: Iterable[float | None]) -> Iterator[float]:
    """Return an iterator of the values that are known and finite."""
    return (value for value in values if value is not None and math.isfinite(value))


def losses(record: RunRecord) -> Figure:
    """Draw the loss of every layer with its bounds and the loss of rounding to nearest."""
    row, layers = LayerAxis(record, by_kind=True), record.layers
    words = "The squared error that rounding adds to the outputs of each layer, on a logarithmic axis; lower is better."
    keys = [f"{key(0)} loss"]
    if bounded := any(positive(layer.worst_case) for layer in layers):
        keys.append(f"{key(6)} loss under the damped Hessian, to which the bounds refer")
        swatch = '<line class="range" x1="50%" y1="0" x2="50%" y2="100%"/>'
        keys.append(f'<svg class="key" aria-hidden="true">{swatch}</svg> from the expected loss up to the worst case')
    else:
        words += " The record holds no worst case."
    if any(positive(layer.nearest_loss) for layer in layers):
        keys.append(f"{key(3, hollow=True)} loss of rounding to nearest")
    else:
        words += " The record holds no loss of rounding to nearest."
    shown = ("loss", "damped_loss", "nearest_loss", "worst_case", "expected") if bounded else ("loss", "nearest_loss")
    values = [value for layer in layers for name in shown if positive(value := getattr(layer, name))]
    if not values:
        return Figure(heading="Loss", words="not drawn, as every loss is 0.")
    y, parts = spanning(values, log=True), row.borders()
    for index, layer in enumerate(layers):
        x, marks, texts = row.place(index), [], [f"loss {short(layer.loss)}"]
        if positive(layer.loss):
            marks.append(glyph(0, x, y.down(layer.loss)))
        if positive(layer.worst_case) and positive(layer.expected) and positive(layer.damped_loss):
            marks.insert(0, line(x, y.down(layer.worst_case), x, y.down(layer.expected), "range"))
            marks.insert(1, glyph(6, x, y.down(layer.damped_loss)))
            texts.append(f"damped {short(layer.damped_loss)}")
            texts.append(f"expected {short(layer.expected)}, worst case {short(layer.worst_case)}")
        if positive(layer.nearest_loss):
            marks.append(glyph(3, x, y.down(layer.nearest_loss), hollow=True))
            texts.append(f"rounded to nearest {short(layer.nearest_loss)}")
        parts.append(named(index, f"{layer.name}: {', '.join(texts)}", marks))
    return Figure(
        heading="Loss",
        words=words,
        axis="squared error of an output, divided by the number of inputs",
        below=row.below,
        drawing=plot("Loss of every layer", y, row.ticks(), parts),
        keys=keys,
    )


def shares(record: RunRecord) -> Figure:
    """Draw the loss of every layer as a share of its worst case."""
    heading, row = "Share of the worst case", LayerAxis(record)
    share = {
        index: layer.damped_loss / layer.worst_case
        for index, layer in enumerate(record.layers)
        if positive(layer.worst_case) and positive(layer.damped_loss)
    }
    if not share:
        return Figure(heading=heading, words="not drawn, as the record holds no worst case.")
    log = max(share.values()) > 2
    y = spanning([*share.values(), 1.0, 0.3], log=log, least=None if log else 0)
    clipping = {index for index in share if record.layers[index].clipped_rows > 0}

    def title_of(layer: LayerRecord, value: float) -> str:
        clip = f", {percent(layer.clipped_rows)} of the rows clip" if layer.clipped_rows else ""
        return f"{percent(value)} of the worst case{clip}"

    parts = [*row.marks(y, share, title_of, clipping), level(y, 1, "worst case"), level(y, 1 / 3, "expected")]
    words = "The damped loss as a share of the worst case of Babai's theorem. Evenly distributed errors give a third."
    if any(layer.clipped_rows for layer in record.layers):
        words += " Hollow marks: some rows clip, for which the worst case is no bound."
    return row.figure(heading, words, "damped loss / worst case", y, parts)


def above_limit(record: RunRecord) -> Figure:
    """Draw the distance of every layer from the rate-distortion limit."""
    heading, row, why = "Bits above the limit", LayerAxis(record), _no_limit(record)
    above = {
        index: value
        for index, layer in enumerate(record.layers)
        if (value := layer.above_limit) is not None and math.isfinite(value)
    }
    if not above:
        return Figure(heading=heading, words=f"not drawn: {why}")
    y = spanning([*above.values(), 0, UNIFORM_ROUNDING_BITS])
    overhead = "tables and steps" if record.entropy is not None else "codes of equal length and steps"
    parts = [
        *row.trends(y, lambda layer: layer.above_limit),
        *row.marks(y, above, lambda x, value: f"{value:.3f} bits above the limit, {x.rate:.3f} in the file"),
        level(y, 0, "limit"),
        level(y, UNIFORM_ROUNDING_BITS, f"evenly spaced values: {UNIFORM_ROUNDING_BITS:.4f}"),
    ]
    words = (
        "Bits per weight in the file minus the fewest with which any code reaches the same loss on Gaussian weights. "
        f"Evenly spaced values cost {UNIFORM_ROUNDING_BITS:.4f} bits at high rates; {overhead} cost most of the rest."
        f"{f' Without a mark: {why}' if why else ''}"
    )
    return row.figure(heading, words, "bits per weight", y, parts)


def _no_limit(record: RunRecord) -> str:
    """Return which layers have no limit, and why; empty if all have one."""
    without = [layer for layer in record.layers if layer.limit is None]
    if not without:
        return ""
    wide = sum(layer.in_features > MAX_CERTIFIED_INPUTS for layer in without)
    too_wide = counted(wide, "layer") + f" of more than {MAX_CERTIFIED_INPUTS} inputs, for which no limit is computed"
    others = counted(len(without) - wide, "layer") + " without a limit in the record"
    return " and ".join(text for text, many in ((too_wide, wide), (others, len(without) - wide)) if many) + "."


def rates(record: RunRecord) -> Figure:
    """Draw the bits per weight of every layer."""
    heading, row = "Bits per weight", LayerAxis(record)
    y = spanning([*(layer.rate for layer in record.layers), *_finite(x.asked for x in record.layers)], least=0)

    def title_of(layer: LayerRecord, value: float) -> str:
        asked = "" if layer.asked is None else f", bit budget {layer.asked:.3f}"
        codes = "" if layer.entropy is None else f", codes alone {layer.entropy:.3f}"
        return f"{value:.3f} bits per weight{asked}{codes}"

    parts = [
        *row.trends(y, lambda layer: layer.rate),
        *row.marks(y, {index: layer.rate for index, layer in enumerate(record.layers)}, title_of),
        level(y, record.rate, f"mean {record.rate:.3f}"),
    ]
    allocation = "Every layer has the same bit budget."
    if record.recipe.allocate == "slope":
        allocation = "Layers whose errors change the predictions most, as measured before the solve, get the most."
    words = f"Size of a layer's tensors in the file, in bits per weight. {allocation}"
    return row.figure(heading, words, "bits per weight", y, parts)


def plane(record: RunRecord) -> Figure:
    """Draw every layer in the rate-distortion plane, connected to its limit."""
    heading, row = "Rate and distortion", LayerAxis(record)
    layers = [(i, x) for i, x in enumerate(record.layers) if positive(x.relative_loss) and not x.degenerate]
    if not layers:
        return Figure(heading=heading, words="not drawn, as every loss is 0.")
    layer_rates = [layer.rate for _, layer in layers]
    limits = list(_finite(layer.limit for _, layer in layers))
    x = spanning([*layer_rates, *limits, min(layer_rates) - 0.4, max(layer_rates) + 0.4])
    y = spanning([*(layer.relative_loss for _, layer in layers), 4.0**-record.rate], log=True)
    parts = _guides(x, y)
    for index, layer in layers:
        place, title = y.down(layer.relative_loss), f"{layer.name}: relative loss {percent(layer.relative_loss)}"
        marks = [glyph(row.kind[index], x.across(layer.rate), place)]
        title += f" at {layer.rate:.3f} bits per weight"
        if layer.limit is not None and math.isfinite(layer.limit):
            end = x.across(layer.limit)
            ticks = (f"{float(place) + by:g}" for by in (-3, 3))
            marks = [
                line(end, place, x.across(layer.rate), place, "join"),
                line(end, next(ticks), end, next(ticks), "join"),
                *marks,
            ]
            title += f", limit {layer.limit:.3f}"
        parts.append(named(index, title, marks))
    words = (
        f"Bits and relative loss of each layer. Along a slanted line, one more bit per weight means a quarter of the "
        f"loss (6.02 dB); the lines are one bit apart. The dashed line, 4 to the power of {MINUS}bits, is the limit "
        f"for Gaussian weights with independent inputs; the inputs of layers below this line depend on each other."
    )
    hint = " The thin line ends at the fewest bits with which any code reaches the layer's loss." if limits else ""
    return Figure(
        heading=heading,
        words=words + hint,
        axis="relative loss",
        below="bits per weight",
        drawing=plot(heading, y, along(x), parts),
    )


def _guides(x: Scale, y: Scale) -> list[str]:
    """Draw lines on which one more bit means a quarter of the loss, one bit apart; the main line is 4^-bits."""
    drawn: list[str] = []
    first, last = (-math.log(value, 4) for value in (y.high, y.low))  # rates where 4^-rate enters and leaves
    if last - first + x.high - x.low > 100:
        return drawn
    for shift in range(math.floor(first - x.high), math.ceil(last - x.low) + 1):
        start, end = max(x.low, first - shift), min(x.high, last - shift)
        if start < end:
            a, b = (y.down(min(y.high, max(y.low, 4.0 ** -(rate + shift)))) for rate in (start, end))
            drawn.append(line(x.across(start), a, x.across(end), b, "guide" if shift else "guide main"))
            if not shift:
                if float(b) + 24 < PLOT_HEIGHT:  # below the end or above the start, clear of the line
                    place, side = (x.across(end), float(b) + 16), "end"
                else:
                    place, side = (x.across(start + 0.02 * (x.high - x.low)), max(12.0, float(a) - 8)), "start"
                drawn.append(note(place[0], f"{place[1]:g}", "6.02 dB per bit", at=side))
    return drawn
