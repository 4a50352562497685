"""The figures of a report: which numbers of a record they show, and the words beside them.

How scales, marks and curves are drawn is in `drawing.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from html import escape

from nearplane.recipe.sizes import counted
from nearplane.record.record import MAX_CERTIFIED_INPUTS, LayerRecord, RunRecord
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

MAX_MARKED_KINDS = 11  # of layers with a mark of their own; what is rarer shares one
# bits that rounding to evenly spaced values costs at high rates, 0.2546
UNIFORM_ROUNDING_BITS = 0.5 * math.log2(math.pi * math.e / 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of marks, a group for every layer.

    Args:
        heading, words: What it shows and how it is read.
        axis, below: What the vertical axis is, and the horizontal one.
        drawing: The plot; empty if the record has no numbers for it, as the words then say.
        keys: What marks stand for, unless it is the kind of the layer.
    """

    heading: str
    words: str
    axis: str = ""
    below: str = ""
    drawing: str = ""
    keys: Sequence[str] = ()

    def html(self, *, broad: bool) -> str:
        """Return it with a line for the numbers of the mark that is pointed at."""
        legend = "".join(f"<span>{one}</span>" for one in self.keys)
        legend = f'<div class="legend">{legend}</div>' if legend else ""
        return (
            f'<figure class="points{" broad" if broad else ""}"><figcaption><h3>{escape(self.heading)}</h3>'
            f"<p>{escape(self.words)}</p></figcaption>{legend}"
            f'<p class="axis">{escape(self.axis)}</p>{self.drawing}<p class="axis below">{escape(self.below)}</p>'
            f'<output aria-live="polite"></output></figure>'
        )


def figures(record: RunRecord) -> str:
    """Return all figures of layers; the first, and the next where that leaves an odd number, as wide as the page."""
    if not record.layers:
        return ""
    found = [figure(record) for figure in (losses, shares, plane, above_limit, rates)]
    drawn = [figure for figure in found if figure.drawing]
    odd = len(drawn) % 2 == 0
    html = "".join(figure.html(broad=index == 0 or (index == 1 and odd)) for index, figure in enumerate(drawn))
    absent = "".join(
        f'<p class="soft"><b>{escape(figure.heading)}</b>: {escape(figure.words)}</p>'
        for figure in found
        if not figure.drawing
    )
    return f'<div class="figures">{html}</div>{absent}'


def legend(record: RunRecord) -> str:
    """Return the bar that says what marks stand for and filters layers, and the shapes of the marks."""
    many = len(record.layers)
    buttons = "".join(
        f'<button type="button" data-k="{number}" aria-pressed="false">{key(number)} {escape(name)}</button>'
        for number, (name, _) in enumerate(kinds(record))
    )
    return (
        f"{glyphs(1 if many <= 120 else 0.8 if many <= 300 else 0.65)}"
        '<h2>Figures</h2><p class="soft hint">Point at a mark, or tap it, to read its numbers; every figure then rings '
        "that layer. A kind of layer, or part of a name, picks layers in figures and table.</p>"
        '<div class="bar"><label>Filter '
        '<input id="filter" type="search" placeholder="part of a name" autocomplete="off"></label>'
        f'<span class="count soft">{many} of {counted(many, "layer")}</span>{buttons}</div>'
    )


def kinds(record: RunRecord) -> list[tuple[str, list[int]]]:
    """Return (name, numbers of its layers) of every kind of layer, whose name is the shortest that tells it apart."""
    members: dict[str, list[int]] = {}
    for index, layer in enumerate(record.layers):
        members.setdefault(".".join(part for part in layer.name.split(".") if not part.isdigit()), []).append(index)
    own = list(members)
    if len(own) > MAX_MARKED_KINDS + 1:
        own = sorted(members, key=lambda kind: -len(members[kind]))[:MAX_MARKED_KINDS]
    names = [kind for kind in members if kind in own]
    rest = sorted(index for kind, layers in members.items() if kind not in own for index in layers)
    return [*((_ending(kind, names), members[kind]) for kind in names), *([("other", rest)] if rest else [])]


def _ending(name: str, names: Sequence[str]) -> str:
    """Return the last parts of a dotted name that no other of the names ends in."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        ending = ".".join(parts[-length:])
        if not any(other != name and f".{other}".endswith(f".{ending}") for other in names):
            return ending
    return name


def block_of(name: str) -> int | None:
    """Return the first number in a layer's name: that of its block."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


class Row:
    """Layers side by side: where each stands, and its kind.

    Args:
        record: Whose layers.
        by_kind: Whether layers of a kind stand together, or all in the order they were quantized.
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
        """Return where a layer stands."""
        return self.x.across(self.at[layer])

    @property
    def below(self) -> str:
        """Return what the horizontal axis is."""
        if self.by_kind:
            return "kind of layer; within each, in the order of the blocks"
        numbered = any(block is not None for block in self.blocks)
        return "block" if numbered else "layers, in the order they were quantized"

    def ticks(self) -> list[Tick]:
        """Return the names of the kinds, or the numbers of blocks, each in the middle of its layers."""
        if self.by_kind:
            rows = math.ceil(len(self.kinds) / 4)  # four names fit side by side on a telephone
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
        """Return lines between kinds, where they stand together."""
        ends = (max(self.at[layer] for layer in members) + 0.5 for _, members in self.kinds[:-1])
        return [line(self.x.across(end), "0", self.x.across(end), "100%", "grid") for end in ends]

    def trends(self, y: Scale, value: Callable[[LayerRecord], float | None]) -> list[str]:
        """Return a line through each kind of layer that every block has at most one of."""
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
        said: Callable[[LayerRecord, float], str],
        hollow: Set[int] = frozenset(),
    ) -> list[str]:
        """Return a mark for every layer with a value, hollow where told, and what it says when it is pointed at."""
        drawn = []
        for index, value in values.items():
            layer = self.layers[index]
            mark = glyph(self.kind[index], self.place(index), y.down(value), hollow=index in hollow)
            drawn.append(named(index, f"{layer.name}: {said(layer, value)}", [mark]))
        return drawn

    def figure(self, heading: str, words: str, axis: str, y: Scale, parts: Sequence[str]) -> Figure:
        """Return a figure with these layers side by side."""
        drawing = plot(heading, y, self.ticks(), parts)
        return Figure(heading=heading, words=words, axis=axis, below=self.below, drawing=drawing)


def _every(many: int, most: int) -> int:
    """Return the least of 1, 2, 5, 10, ... so that every such one of `many` is at most `most`."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 10**9) if math.ceil(many / step) <= most)


def _finite(values: Iterable[float | None]) -> Iterator[float]:
    """Yield the values that are known and finite."""
    return (value for value in values if value is not None and math.isfinite(value))


def losses(record: RunRecord) -> Figure:
    """Draw the loss of every layer against the bounds and rounding to nearest."""
    row, layers = Row(record, by_kind=True), record.layers
    words = (
        "How much error the rounding of each layer adds to its outputs, on an axis of powers of ten; lower is better."
    )
    keys = [f"{key(0)} loss"]
    if bounded := any(positive(layer.worst_case) for layer in layers):
        keys.append(f"{key(6)} loss under the damped Hessian, for which the bounds hold")
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
        return Figure(heading="Loss", words="not drawn, as no layer lost anything.")
    y, parts = spanning(values, log=True), row.borders()
    for index, layer in enumerate(layers):
        x, marks, said = row.place(index), [], [f"loss {short(layer.loss)}"]
        if positive(layer.loss):
            marks.append(glyph(0, x, y.down(layer.loss)))
        if positive(layer.worst_case) and positive(layer.expected) and positive(layer.damped_loss):
            marks.insert(0, line(x, y.down(layer.worst_case), x, y.down(layer.expected), "range"))
            marks.insert(1, glyph(6, x, y.down(layer.damped_loss)))
            said.append(f"damped {short(layer.damped_loss)}")
            said.append(f"expected {short(layer.expected)}, worst case {short(layer.worst_case)}")
        if positive(layer.nearest_loss):
            marks.append(glyph(3, x, y.down(layer.nearest_loss), hollow=True))
            said.append(f"rounded to nearest {short(layer.nearest_loss)}")
        parts.append(named(index, f"{layer.name}: {', '.join(said)}", marks))
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
    heading, row = "Share of the worst case", Row(record)
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

    def said(layer: LayerRecord, value: float) -> str:
        clip = f", {percent(layer.clipped_rows)} of the rows clip" if layer.clipped_rows else ""
        return f"{percent(value)} of the worst case{clip}"

    parts = [*row.marks(y, share, said, clipping), level(y, 1, "worst case"), level(y, 1 / 3, "expected")]
    words = "How much of what Babai's theorem allows was lost. Errors that are spread evenly come to a third."
    if any(layer.clipped_rows for layer in record.layers):
        words += " Hollow: some rows clip, and for those it is no bound."
    return row.figure(heading, words, "damped loss / worst case", y, parts)


def above_limit(record: RunRecord) -> Figure:
    """Draw how far every layer is above the rate-distortion limit."""
    heading, row, why = "Bits above the limit", Row(record), _no_limit(record)
    above = {
        index: value
        for index, layer in enumerate(record.layers)
        if (value := layer.above_limit) is not None and math.isfinite(value)
    }
    if not above:
        return Figure(heading=heading, words=f"not drawn: {why}")
    y = spanning([*above.values(), 0, UNIFORM_ROUNDING_BITS])
    most = "tables and steps" if record.entropy is not None else "codes of equal length and steps"
    parts = [
        *row.trends(y, lambda layer: layer.above_limit),
        *row.marks(y, above, lambda x, value: f"{value:.3f} bits above the limit, {x.rate:.3f} in the file"),
        level(y, 0, "limit"),
        level(y, UNIFORM_ROUNDING_BITS, f"evenly spaced values: {UNIFORM_ROUNDING_BITS:.4f}"),
    ]
    words = (
        "Bits in the file less the fewest that could reach the same loss on Gaussian weights. Rounding to evenly "
        f"spaced values costs {UNIFORM_ROUNDING_BITS:.4f} of them at high rates; {most} cost most of the rest."
        f"{f' Without a mark: {why}' if why else ''}"
    )
    return row.figure(heading, words, "bits per weight", y, parts)


def _no_limit(record: RunRecord) -> str:
    """Say which layers have no limit, and why; nothing if all have one."""
    without = [layer for layer in record.layers if layer.limit is None]
    if not without:
        return ""
    wide = sum(layer.in_features > MAX_CERTIFIED_INPUTS for layer in without)
    some = counted(wide, "layer") + f" of more than {MAX_CERTIFIED_INPUTS} inputs, for which the limit is not computed"
    rest = counted(len(without) - wide, "layer") + " without a limit in the record"
    return " and ".join(text for text, many in ((some, wide), (rest, len(without) - wide)) if many) + "."


def rates(record: RunRecord) -> Figure:
    """Draw the bits of every layer."""
    heading, row = "Bits per weight", Row(record)
    y = spanning([*(layer.rate for layer in record.layers), *_finite(x.asked for x in record.layers)], least=0)

    def said(layer: LayerRecord, value: float) -> str:
        asked = "" if layer.asked is None else f", asked for {layer.asked:.3f}"
        codes = "" if layer.entropy is None else f", of them codes {layer.entropy:.3f}"
        return f"{value:.3f} bits per weight{asked}{codes}"

    parts = [
        *row.trends(y, lambda layer: layer.rate),
        *row.marks(y, {index: layer.rate for index, layer in enumerate(record.layers)}, said),
        level(y, record.rate, f"mean {record.rate:.3f}"),
    ]
    spent = "Every layer was to have the same."
    if record.recipe.allocate == "slope":
        spent = "They go where the network minds errors most, as measured before."
    words = f"Every byte of a layer's tensors in the file, per weight. {spent}"
    return row.figure(heading, words, "bits per weight", y, parts)


def plane(record: RunRecord) -> Figure:
    """Draw every layer in the rate-distortion plane, joined to its limit."""
    heading, row = "Rate and distortion", Row(record)
    layers = [(index, layer) for index, layer in enumerate(record.layers) if positive(layer.relative_loss)]
    if not layers:
        return Figure(heading=heading, words="not drawn, as no layer lost anything.")
    spent = [layer.rate for _, layer in layers]
    limits = list(_finite(layer.limit for _, layer in layers))
    x = spanning([*spent, *limits, min(spent) - 0.4, max(spent) + 0.4])
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
        "What each layer costs and what it loses. Along a slanted line a bit more means a quarter of the loss, "
        f"6.02 dB; the lines lie a bit apart. The dashed one, 4 to the power of {MINUS}bits, is the limit of Gaussian "
        "weights with independent inputs: layers below it have inputs that depend on each other."
    )
    reach = " The thin line leads left to the fewest bits that could reach the layer's loss." if limits else ""
    return Figure(
        heading=heading,
        words=words + reach,
        axis="relative loss",
        below="bits per weight",
        drawing=plot(heading, y, along(x), parts),
    )


def _guides(x: Scale, y: Scale) -> list[str]:
    """Draw lines on which a bit more means a quarter of the loss, a bit apart; the main one is 4^-bits."""
    drawn: list[str] = []
    first, last = (-math.log(value, 4) for value in (y.high, y.low))  # rates at which 4^-rate enters and leaves
    if last - first + x.high - x.low > 100:
        return drawn
    for shift in range(math.floor(first - x.high), math.ceil(last - x.low) + 1):
        start, end = max(x.low, first - shift), min(x.high, last - shift)
        if start < end:
            a, b = (y.down(min(y.high, max(y.low, 4.0 ** -(rate + shift)))) for rate in (start, end))
            drawn.append(line(x.across(start), a, x.across(end), b, "guide" if shift else "guide main"))
            if not shift:
                if float(b) + 24 < PLOT_HEIGHT:  # below its end, else above its start: where the line does not cross it
                    place, side = (x.across(end), float(b) + 16), "end"
                else:
                    place, side = (x.across(start + 0.02 * (x.high - x.low)), max(12.0, float(a) - 8)), "start"
                drawn.append(note(place[0], f"{place[1]:g}", "6.02 dB per bit", at=side))
    return drawn
