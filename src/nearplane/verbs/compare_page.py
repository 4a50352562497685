"""Page of `compare`: its rows, KL against bits as a figure, and what every checkpoint writes behind the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from nearplane.record.report.drawing import (
    NO_VALUE,
    along,
    curve,
    glyph,
    glyphs,
    key,
    named,
    plot,
    positive,
    short,
    spanning,
)
from nearplane.record.report.page import framed
from nearplane.system.files import write_whole
from nearplane.system.sizes import counted, size_text, three_places
from nearplane.verbs.compare import Row
from nearplane.verbs.compare_request import WAYS
from nearplane.verbs.figure_file import check_page
from nearplane.verbs.generate import UNFINISHED
from nearplane.verbs.next_choices import NextChoice

HEADS = ("model", "method", "asked", "bits/weight", "weight files", "perplexity", "KL to original", "time")
END = "(end)"  # stands for the token that ends the text


def write_page(rows: Sequence[Row], out: str | Path, *, prompt: str | None = None) -> None:
    """Write a page about the rows of a comparison, and what was written behind its prompt, that needs no other file.

    Raises:
        RecipeError: `out` is no page that can be written or replaced.
    """
    check_page(out)
    models = list(dict.fromkeys(row.model for row in rows))
    names = ", ".join(Path(model).name for model in models)
    parts = [
        f"<header><h1>Comparison of {escape(names)}</h1>"
        f'<p class="soft">{counted(len(rows), "row")}, by nearplane compare</p></header>',
        _table(rows),
        *(_figure([row for row in rows if row.model == model]) for model in models),
        *(_texts([row for row in rows if row.model == model], prompt) for model in models if prompt is not None),
    ]
    write_whole(Path(out), framed(f"Comparison of {names}", glyphs(1) + "\n".join(parts), command="compare").encode())


def cells(row: Row, kl: str, none: str = NO_VALUE) -> tuple[str, ...]:
    """Return the cells of a row below `HEADS`; `kl` is the printed KL, and `none` stands for other figures without a value."""
    return (
        Path(row.model).name,
        row.method,
        none if row.asked is None else f"{row.asked:g}",
        three_places(row.rate),
        none if row.bytes is None else size_text(row.bytes),
        none if row.perplexity is None else f"{row.perplexity:#.4g}",
        kl,
        f"{row.seconds:.1f} s",
    )


def _table(rows: Sequence[Row]) -> str:
    """Return all rows as a table, with their notes below."""
    lines = (cells(row, NO_VALUE if row.kl is None else short(row.kl)) for row in rows)
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    notes = "".join(f"<li>{escape(f'{row.title}: {row.note}')}</li>" for row in rows if row.note)
    return (
        '<h2 id="table">Rows</h2><div class="box" tabindex="0" role="region" aria-labelledby="table">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
        + (f'<div class="fine"><ul>{notes}</ul></div>' if notes else "")
    )


def _figure(rows: Sequence[Row]) -> str:
    """Return KL against bits per weight for one model, one curve for each method; empty if nothing was measured."""
    points = {
        way: sorted(
            (row.rate, row.kl, row.title) for row in rows if row.method == way and row.rate and positive(row.kl)
        )
        for way in WAYS
    }
    points = {way: each for way, each in points.items() if each}
    if not points:
        return ""
    x = spanning(rate for each in points.values() for rate, _, _ in each)
    y = spanning((kl for each in points.values() for _, kl, _ in each), log=True)
    marks = []
    for kind, each in enumerate(points.values()):
        line = curve(x, y, [(rate, kl) for rate, kl, _ in each], "trend")
        marks.append(f'<g class="k{kind}">{line}</g>')
        for rate, kl, name in each:
            title = f"{name}: {rate:.3f} bits per weight, KL {short(kl)}"
            marks.append(named(len(marks), title, [glyph(kind, x.across(rate), y.down(kl))]))
    legend = "".join(f"<span>{key(kind)} {escape(way)}</span>" for kind, way in enumerate(points))
    model = Path(rows[0].model).name
    drawing = plot(f"KL against bits per weight of {model}", y, along(x), marks)
    return (
        f"<h2>{escape(model)}</h2><figure><figcaption><h3>KL against bits per weight</h3></figcaption>"
        f'<div class="legend">{legend}</div><p class="axis">KL to the original, nats per token</p>{drawing}'
        '<p class="axis below">bits per quantized weight, every byte of the layers counted</p></figure>'
    )


def _texts(rows: Sequence[Row], prompt: str) -> str:
    """Return what the original writes with what each checkpoint would write otherwise, and what each writes by itself."""
    panels = "".join(
        f"<figure><figcaption><h3>{escape(row.title)}</h3>{_differing(row)}</figcaption>{_panel(row)}</figure>"
        for row in rows
        if row.written is not None
    )
    return (
        f"<h2>What {escape(Path(rows[0].model).name)} writes</h2>"
        f'<p class="soft">Behind the prompt below, always the most likely token. Each checkpoint reads the text of the original '
        f"up to every place. Marked are the places where it would write another token next; point at one to see which. By "
        f"itself it leaves the original's text for good at the first such place, also where two tokens are nearly as likely."
        f'</p><pre>{escape(prompt)}</pre><div class="panels">{panels}</div>'
    )


def _differing(row: Row) -> str:
    """Return how many tokens differ, as HTML; empty for the original."""
    if not row.choices:
        return ""
    return f"<p>{sum(choice.other is not None for choice in row.choices)} of {len(row.choices)} next tokens differ</p>"


def _panel(row: Row) -> str:
    """Return the text of a row as HTML; of a checkpoint, the original's with marks, and its own to be unfolded."""
    own = f"<pre>{escape(row.written or '')}</pre>"
    if not row.choices:
        return own
    return f"<pre>{marked(row.choices)}</pre><details><summary>By itself it writes</summary>{own}</details>"


def marked(choices: Sequence[NextChoice]) -> str:
    """Return the original's text as HTML in which the tokens are marked instead of which a model would write others."""
    pieces = []
    for number, (piece, other) in enumerate(choices, 1):
        shown = escape(piece)
        if other is not None:
            words = f"writes {other!r}" if other else "ends here"
            title = escape("writes a part of another letter" if other == UNFINISHED else words, quote=True)
            shown = f'<mark title="{title}">{shown or (END if number == len(choices) else UNFINISHED)}</mark>'
        pieces.append(shown)
    return "".join(pieces)
