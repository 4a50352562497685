"""A choice of number formats as text and as a figure: by kind of layer and depth, and beside choices of other sizes. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from typing import Any

from nearplane.record.mix_record import MixRecord
from nearplane.record.record import RunRecord
from nearplane.system.sizes import counted, size_text

NUMBER = re.compile(r"\.(\d+)\.")  # of a block in the name of a layer
SHADES = ("#f7fbff", "#c6dbef", "#6baed6", "#2171b5", "#08306b", "#7a0177", "#dd3497", "#fcc5c0", "#fdae6b")
CELL, LABEL, LINE = 16, 220, 20  # pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The best choice for one size.

    Args:
        bits: Bits per weight of all layers that are chosen for.
        bytes: Bytes of their tensors.
        kl: Predicted KL, nats per token.
        formats: Number of layers by format.
    """

    bits: float
    bytes: int
    kl: float
    formats: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What `frontier` found: the choice that was asked for, and those for other sizes.

    Args:
        mix: How it was chosen.
        formats: Format of every layer by name, in the order of the network.
        sizes: The best choices, from the smallest to the largest.
        seconds: Seconds that a run takes at least, of multiplications; None: unknown, as on a GPU.
    """

    mix: MixRecord
    formats: dict[str, str]
    sizes: tuple[Size, ...]
    seconds: float | None

    def fields(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return asdict(self)


def by_kind(formats: Mapping[str, str]) -> dict[str, dict[int, str]]:
    """Return {kind of layer: {number of the block: format}}; experts of a block are one entry, other numbers stay."""
    kinds: dict[str, dict[int, str]] = {}
    stacks = {name[: match.start()] for name in formats if (match := NUMBER.search(name)) is not None}
    for name, format in formats.items():
        match = NUMBER.search(name)
        if match is None:
            kinds.setdefault(name, {})[0] = format
            continue
        inside = re.sub(r"(experts)\.\d+\.", r"\1.*.", name[match.end() :])
        inside = inside if len(stacks) == 1 else f"{name[: match.start()]}.*.{inside}"  # an encoder and a decoder
        kinds.setdefault(inside, {})[int(match[1])] = format
    return kinds


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as in "0-2, 5, 7-9"."""
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def kind_lines(formats: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each kind of layer with the blocks that have each format."""
    for kind, blocks in by_kind(formats).items():
        names = dict.fromkeys(blocks.values())
        if len(blocks) == 1:
            yield f"{kind}: {next(iter(names))}"
            continue
        yield f"{kind}: " + "; ".join(
            f"{name} in {ranges(n for n, each in blocks.items() if each == name)}" for name in names
        )


def formats_of(record: RunRecord) -> dict[str, str]:
    """Return the format of every layer of a checkpoint by name; {} where all are alike."""
    formats = {layer.name: layer.format for layer in record.layers}
    return formats if len(set(formats.values())) > 1 else {}


def choice_lines(record: RunRecord) -> Iterator[str]:
    """Yield how the formats of a checkpoint's layers were chosen, and which they are, where not all are alike."""
    if record.mix is not None:
        yield from mix_sentences(record.mix)
    yield from kind_lines(formats_of(record))
    if record.mix is not None and record.recipe.ignore:
        yield f"unquantized: {', '.join(record.recipe.ignore)}"


def mix_sentences(mix: MixRecord) -> Iterator[str]:
    """Yield what was asked, what the choice takes, and what it costs."""
    unit = "bits per weight" if mix.unit != "bytes" else "bytes"
    places = ".3f" if mix.unit != "bytes" else ",.0f"
    limit = f"{mix.limit:,g}" if mix.unit != "bytes" else f"{mix.limit:,.0f}"
    cache = f" and the cache of {mix.context:,} tokens" if mix.context else ""
    what = {"file": f"takes {mix.spent:{places}} {unit}{cache}"}.get(
        mix.cost, f"reads {mix.spent:,.0f} bytes a token{cache}"
    )
    yield f"--mix {','.join(mix.formats)} with --{mix.option} {limit}: {what}"
    yield f"{counted(mix.units, 'group')} of layers got a format each"
    yield (
        f"KL of the choice {mix.predicted:.3g} nats per token as predicted, {mix.measured:.3g} as measured, "
        f"before targets are corrected and codes refined"
    )
    if mix.unfit:
        yield f"{counted(len(mix.unfit), 'layer')} stay unquantized, as no format of the mix fits: {', '.join(mix.unfit[:3])}"


def mix_table(found: Frontier) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the choices for other sizes."""
    rows: list[tuple[str, ...]] = [
        (
            at_least(size.bits),
            size_text(size.bytes),
            f"{size.kl:.3g}",
            ", ".join(f"{name} in {count}" for name, count in size.formats.items()),
        )
        for size in found.sizes
    ]
    return ("bits per weight", "size of layers", "KL predicted", "layers by format"), rows


def at_least(bits: float) -> str:
    """Return bits per weight with three places, rounded up, so that they suffice as a limit."""
    return f"{math.ceil(1000 * bits - 1e-6) / 1000:.3f}"


def mix_lines(found: Frontier) -> Iterator[str]:
    """Yield the choice that was asked for, by kind of layer and depth."""
    yield ""
    if found.seconds is not None:
        yield f"a run of any of them takes at least {found.seconds:,.0f} s"
    yield from mix_sentences(found.mix)
    yield from kind_lines(found.formats)


def mix_figure(formats: Mapping[str, str]) -> str:
    """Return an SVG of a choice: a row for each kind of layer, a column for each block, a colour for each format."""
    kinds, names = by_kind(formats), _by_width(formats.values())
    columns = 1 + max((max(blocks) for blocks in kinds.values()), default=0)
    width, height = LABEL + CELL * columns + 20, LINE * (len(kinds) + len(names) + 2)
    colour = dict(zip(names, (SHADES * (1 + len(names) // len(SHADES)))[: len(names)], strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for row, (kind, blocks) in enumerate(kinds.items()):
        y = LINE * row + 8
        parts.append(f'<text x="8" y="{y + 12}">{escape(kind)}</text>')
        parts += [
            f'<rect x="{LABEL + CELL * block}" y="{y}" width="{CELL - 1}" height="{LINE - 3}" fill="{colour[name]}" stroke="#999"/>'
            for block, name in blocks.items()
        ]
    y = LINE * len(kinds) + 22
    parts.append(f'<text x="{LABEL}" y="{y}">blocks 0 to {columns - 1}</text>')
    for row, name in enumerate(names, 1):
        parts.append(
            f'<rect x="8" y="{y + LINE * row - 24}" width="14" height="14" fill="{colour[name]}" stroke="#999"/>'
        )
        parts.append(f'<text x="30" y="{y + LINE * row - 12}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _by_width(names: Iterable[str]) -> Sequence[str]:
    """Return names of formats, those of fewer bits first."""

    def bits(name: str) -> tuple[int, str]:
        found = re.search(r"\d+", name)
        return (int(found[0]) if found else 99, name)

    return sorted(set(names), key=bits)
