"""The report of a run: one HTML page, made from the run record alone. Needs no torch and no network connection.

This file holds the texts and tables; the figures are in `figures.py` and `drawing.py`, the layout in `page.html` and
the interaction in `page.js`.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable
from html import escape
from importlib.resources import files
from statistics import median
from typing import NamedTuple

from nearplane.errors import first_few, printable
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.remarks import unusual, usual
from nearplane.record.report.drawing import NO_VALUE, TIMES, Scale, Tick, curve, percent, plot, short, spanning
from nearplane.record.report.figures import figures, kinds, legend
from nearplane.record.words import NOT_FITTED, SCALE, calibrated, divergence, in_words
from nearplane.system.sizes import counted, size_text


def render(record: RunRecord) -> str:
    """Return the page; equal records give equal pages."""
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    sections = (_headline, _heed, _terms, legend, figures, _tuning, _table, _making)
    body = "\n".join(part for section in sections if (part := section(record)))
    broad = min(9.0, max(1.0, 800 / max(1, len(record.layers))))
    return framed(
        f"{_model(record)} at {record.rate:.3f} bits per weight", body, command="report", script=script, broad=broad
    )


def framed(title: str, body: str, *, command: str, script: str = "", broad: float = 1.0) -> str:
    """Return a whole page that needs no other file.

    Args:
        title: Title of the page.
        body: Its contents as HTML.
        command: Command of nearplane that makes it.
        script: Its script.
        broad: Width of the lines of ranges, in CSS pixels.
    """
    holes = {
        "title": escape(printable(title)),
        "command": command,
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "broad": f"{broad:.1f}",
        "body": "\n".join(map(printable, body.split("\n"))),
        "script": script,
    }
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], page)


def _model(record: RunRecord) -> str:
    """Return the model's name on the hub, or the name of its folder."""
    local = record.source.startswith((".", "/", "~")) or record.source.count("/") > 1 or "\\" in record.source
    return re.split(r"[/\\]", record.source.rstrip("/\\"))[-1] if local else record.source


def _time(record: RunRecord) -> str:
    """Return the time of the run; empty for a record inside a weight file, which has no times."""
    return f"{record.seconds:,.1f} s " if record.seconds else ""


def _headline(record: RunRecord) -> str:
    """Return the heading of the page, with the most important numbers."""
    scheme = record.recipe.scheme
    how = scheme.title if record.entropy is not None else f"{scheme.title} ({record.recipe.format})"
    cards = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}</dd><dd>{breakable(details)}</dd></div>"
        for title, value, details in _cards(record)
    )
    summary = f"Weights {how} by {scheme.solver}, {calibrated(record)}; {_time(record)}on {record.device}."
    return (
        f"<header><h1>{escape(_model(record))} at {record.rate:.3f} bits per weight</h1>"
        f'<p class="soft">{escape(summary)}</p><dl class="cards">{cards}</dl></header>'
    )


def breakable(text: str) -> str:
    """Return a text as HTML in which names may break after their dots."""
    return re.sub(r"\.(?=\w)(?!\d+ )", ".<wbr>", escape(text))


def _cards(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return (title, value, details) of the most important numbers."""
    layers, (asked, unit) = record.layers, record.recipe.scheme.asked or (None, "")
    weights = sum(layer.out_features * layer.in_features for layer in layers)
    requested = f"requested: {asked:g}; " if unit == "bits per weight" else ""
    sizes = f"weight files {size_text(record.bytes)}, including {size_text(record.overhead)} that is not quantized"
    if unit == "bytes":
        sizes = f"at most: {size_text(int(asked or 0))}; {sizes}"
    cards = [
        ("bits per weight", f"{record.rate:.3f}", f"{requested}includes all bytes of the quantized layers"),
        ("checkpoint folder", size_text(record.folder), sizes),
        ("quantized layers", f"{len(layers):,}", f"{weights:,} weights"),
    ]
    if record.extra_kl is not None:
        head = "; with the original's head" if any(record.recipe.scheme.ends) else ""
        cards.insert(0, ("KL to the original", f"{record.extra_kl:.3g}", f"nats per token: {in_words(record)}{head}"))
    if layers := record.measured:
        worst = max(layers, key=lambda layer: layer.relative_loss)
        cards.append(("worst relative loss", percent(worst.relative_loss), worst.name))
    if own := [(layer.extra_own_loss, layer.name) for layer in layers if layer.extra_own_loss is not None]:
        loss, name = max(own)
        cards.append(("worst alone on extra windows", percent(loss), name))
    if extra := [(layer.extra_relative_loss, layer.name) for layer in layers if layer.extra_relative_loss is not None]:
        worst_extra, name = max(extra)
        windows = f"{counted(record.extra_windows, 'window')} {NOT_FITTED}"
        cards.append(("worst on extra windows", percent(worst_extra), f"{name}, {windows}"))
    if known := [layer for layer in layers if layer.above_limit is not None and math.isfinite(layer.above_limit)]:
        counts = [layer.out_features * layer.in_features for layer in known]
        above = sum((layer.above_limit or 0.0) * n for layer, n in zip(known, counts, strict=True)) / sum(counts)
        of = "" if len(known) == len(layers) else f" of {counted(len(known), 'layer')}"
        cards.append(("bits above the limit", f"{above:.3f}", f"mean over the weights{of}; for Gaussian weights"))
    if gains := [layer.nearest_loss / layer.loss for layer in layers if layer.nearest_loss and layer.loss > 0]:
        extra_gains = [x.extra_nearest_loss / x.extra_loss for x in layers if x.extra_nearest_loss and x.extra_loss]
        other = f"; {median(extra_gains):.2f} {TIMES} on extra windows" if extra_gains else ""
        times = f"{median(gains):.2f} {TIMES}"
        cards.append(("rounding to nearest", times, f"this loss, with the same steps (median layer){other}"))
    return cards


def _heed(record: RunRecord) -> str:
    """Return the list of findings, and below it, to be unfolded, what is as it must be for such a model and format."""
    found, known = findings(record), facts(record)
    lists = ["".join(f"<li>{_code(sentence)}</li>" for sentence in sentences) for sentences in (found, known)]
    heed = '<p class="fine">No findings: nothing is unusual for such a model and format.</p>'
    if found:
        heed = f'<section class="heed"><h3>Findings to check</h3><ul>{lists[0]}</ul></section>'
    more = f"<details><summary>Good to know</summary><ul>{lists[1]}</ul></details>" if known else ""
    return heed + more


def _code(text: str) -> str:
    """Return a text as HTML, with texts between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def findings(record: RunRecord) -> list[str]:
    """Return a sentence for everything that is unusual: large losses, too little text, faults, void bounds."""
    layers, sentences = record.layers, list[str]()
    if record.extra_kl is not None and record.extra_kl > SCALE[-1][0]:
        sentences += map(_sentence, divergence(record))
    sentences += [_sentence(remark) for remark in unusual(record)]
    if exceeding := [x.name for x in layers if x.worst_case is not None and x.damped_loss > x.worst_case * (1 + 1e-9)]:
        sentences.append(
            f"The worst case of unclipped rows is exceeded in {counted(len(exceeding), 'layer')}: "
            f"{first_few(exceeding)}."
        )
    if worse := [layer.name for layer in layers if layer.nearest_loss is not None and layer.nearest_loss < layer.loss]:
        sentences.append(
            f"Rounding to nearest would have had a lower loss on the calibration text in "
            f"{counted(len(worse), 'layer')}: {first_few(worse)}."
        )
    return sentences


def facts(record: RunRecord) -> list[str]:
    """Return a sentence for everything that is as it must be, but not as everybody expects."""
    sentences = [_sentence(remark) for remark in usual(record)]
    if clipped := [layer for layer in record.layers if layer.clipped_rows]:
        worst = max(clipped, key=lambda layer: layer.clipped_rows)
        sentences.append(
            f"Rows clip in {len(clipped)} of {counted(len(record.layers), 'layer')}, as is usual on grids of few values: some of "
            f"their targets were outside the grid. For these rows, worst case, expected loss and gamma do not hold; the losses "
            f"are exact. Share of rows that clip: {percent(median(layer.clipped_rows for layer in clipped))} in the median "
            f"layer, at most {percent(worst.clipped_rows)} ({worst.name})."
        )
    return sentences


def _sentence(text: str) -> str:
    """Return a text with a capital first letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


TERMS = {
    "KL to the original": f"How far the predictions are from the original's, on windows of the text {NOT_FITTED}: up to 0.01 is "
    "close, above 0.1 is large. The one figure that says what the whole network lost.",
    "bits per weight": f"Size of a layer's tensors in the file, including steps and tables: 8 {TIMES} bytes / weights.",
    "relative loss": "Squared error of a layer's outputs on the calibration text, divided by the squared outputs: 0.01 "
    "is 1 %, or 20 dB below the outputs. Use it to compare layers.",
    "loss": "Mean squared error of an output, divided by the number of inputs. Its unit is that of an output, squared.",
    "on extra windows": "Squared difference to the outputs of the original model, divided by those outputs squared, on "
    f"windows of the text {NOT_FITTED}. It includes the losses of earlier layers.",
    "alone on extra windows": "The relative loss on windows to which nothing was fitted. Use it to compare runs; a value far "
    "above the relative loss indicates too few tokens.",
    "nearest / this": "The loss of rounding every weight to nearest with the same steps, divided by this loss.",
    "worst case, expected": "The largest loss that Babai's theorem allows, and a third of it, the probable loss. They "
    "refer to the loss under the damped Hessian, and hold for each row that does not clip.",
    "gamma": "In rows that do not clip, no codes with the same steps have a root-mean-square error below 1 / gamma of "
    "this one.",
    "clipped": "Codes whose target was outside the grid, and rows with such a code.",
    "bits above the limit": "Bits per weight in the file minus the fewest with which any code reaches this loss on "
    "Gaussian weights under the same Hessian. The limit is a reference, not a strict bound for real weights.",
    "correction": "How far targets moved from the original weights to compensate the losses of earlier layers: from 0, "
    "no correction, to 1, full correction.",
    "dead": "Inputs that were 0 for every calibration token.",
}


def _terms(record: RunRecord) -> str:
    """Return explanations of the terms that the page uses for this record."""
    known = {
        "KL to the original": "extra_kl",
        "on extra windows": "extra_loss",
        "alone on extra windows": "extra_own_loss",
        "nearest / this": "nearest_loss",
        "worst case, expected": "worst_case",
        "gamma": "gamma",
        "bits above the limit": "limit",
    }  # the field of the record, or of all its layers, that each term needs
    absent = {
        word
        for word, name in known.items()
        if all(getattr(each, name, None) is None for each in (record, *record.layers))
    }
    if record.entropy is not None:
        absent.add("clipped")
    terms = "".join(
        f"<div><dt>{escape(word)}</dt><dd>{escape(meaning)}</dd></div>"
        for word, meaning in TERMS.items()
        if word not in absent
    )
    return f'<details open><summary>How to read this</summary><dl class="terms two">{terms}</dl></details>'


def _tuning(record: RunRecord) -> str:
    """Return the curves of held-out and training KL and the result of tuning; empty without tuning."""
    tuned = record.tuning
    if tuned is None:
        return ""
    held = [(float(point.step), point.held_out) for point in tuned.curve]
    training = [(float(point.step), point.training) for point in tuned.curve if point.training is not None]
    last = max(1, tuned.curve[-1].step)
    x, y = Scale(low=0, high=last), spanning((value for _, value in (*held, *training)), least=0.0)
    parts, keys = [], []
    for look, name, points in (("o0", "held-out windows", held), ("o1", "training windows", training)):
        values = ", ".join(f"step {step:.0f}: {short(value)}" for step, value in points)
        parts.append(f"<g><title>{escape(f'{name}: {values}')}</title>{curve(x, y, points, look)}</g>")
        keys.append(
            f'<tr><td><svg class="key long" aria-hidden="true"><line class="{look}" x1="0" y1="50%" x2="100%" y2="50%"/></svg> '
            f"{escape(name)}</td><td>{short(points[-1][1]) if points else ''}</td></tr>"
        )
    ticks = [Tick(place=f"{100 * share}%", text=f"{share * last:.0f}") for share in (0, 0.5, 1)]
    note = "Losses on this page are those of the tuned network; the record holds those before tuning."
    return (
        f"<h2>Tuning</h2><p>{escape(_sentence(tuned.sentence()))} {escape(_sentence(tuned.windows_sentence()))} "
        f"{escape(note)}</p>"
        '<div class="panels"><figure class="panel"><figcaption><h3>KL to the original, nats per token</h3></figcaption>'
        f"{plot('KL to the original while tuning', y, ticks, parts)}"
        '<p class="axis below">step of the optimizer</p>'
        '<table class="small"><thead><tr><th scope="col">windows</th><th scope="col">KL at the end</th></tr></thead>'
        f"<tbody>{''.join(keys)}</tbody></table></figure></div>"
    )


class Column(NamedTuple):
    """One column of the table.

    Args:
        head: Heading of the column.
        value: Function that returns the number to sort by; None if a layer has no value.
        text: Function that returns the text of a cell; None: the number with three digits.
    """

    head: str
    value: Callable[[LayerRecord], float | None]
    text: Callable[[LayerRecord], str] | None = None


def _ratio(part: float | None, of: float | None) -> float | None:
    """Return part / of, or None if it is unknown or undefined."""
    return part / of if part is not None and of is not None and of > 0 else None


def _grid_bits(layer: LayerRecord) -> float | None:
    """Return the bits of a code plus its share of a 16-bit step."""
    format = layer.number_format
    return None if not format.bits else format.bits + 16 / (format.group or layer.in_features)


def _columns(record: RunRecord) -> list[Column]:
    """Return all columns of the table except the first, which holds names."""
    coded = record.entropy is not None
    clipping = [
        Column("clipped codes %", lambda x: None if coded else 100 * x.clipped, lambda x: f"{100 * x.clipped:.2f}"),
        Column(
            "clipped rows %", lambda x: None if coded else 100 * x.clipped_rows, lambda x: f"{100 * x.clipped_rows:.2f}"
        ),
    ]
    budget = Column("bit budget", lambda x: x.asked, lambda x: f"{x.asked:.3f}")
    return [
        Column(
            "shape", lambda x: x.out_features * x.in_features, lambda x: f"{x.out_features} {TIMES} {x.in_features}"
        ),
        budget if coded else Column("grid", _grid_bits, lambda x: x.format),
        Column("bits / weight", lambda x: x.rate, lambda x: f"{x.rate:.3f}"),
        Column("relative loss", lambda x: None if x.degenerate else x.relative_loss),
        Column("alone on extra windows", lambda x: None if x.degenerate else x.extra_own_loss),
        Column("relative loss on extra windows", lambda x: None if x.degenerate else x.extra_relative_loss),
        Column("loss", lambda x: x.loss),
        Column("nearest / this", lambda x: _ratio(x.nearest_loss, x.loss)),
        Column("nearest / this on extra windows", lambda x: _ratio(x.extra_nearest_loss, x.extra_loss)),
        Column("worst case / this", lambda x: _ratio(x.worst_case, x.damped_loss)),
        Column("gamma", lambda x: x.gamma),
        *clipping,
        Column("bits above limit", lambda x: x.above_limit, lambda x: f"{x.above_limit:.3f}"),
        Column("correction", lambda x: x.correction, lambda x: f"{x.correction:.2f}"),
        Column("dead", lambda x: x.dead, lambda x: str(x.dead)),
        Column("bytes", lambda x: x.bytes, lambda x: f"{x.bytes:,}"),
    ]


def _table(record: RunRecord) -> str:
    """Return the table of all layers, which can be sorted by every column."""
    every = _columns(record)
    columns = [column for column in every if any(column.value(layer) is not None for layer in record.layers)]
    empty = [column for column in every if column not in columns]
    without_values = f" No layer has a value for: {', '.join(column.head for column in empty)}." if empty else ""
    heads = '<th scope="col" data-type="text" aria-sort="none"><button type="button">layer</button></th>' + "".join(
        f'<th scope="col" data-type="number" aria-sort="none"><button type="button">{escape(column.head)}</button></th>'
        for column in columns
    )
    kind = {layer: number for number, (_, members) in enumerate(kinds(record)) for layer in members}
    rows = "\n".join(
        f'<tr data-l="{index}" data-k="{kind[index]}"><td>{escape(layer.name)}</td>'
        f"{''.join(_cell(column, layer) for column in columns)}</tr>"
        for index, layer in enumerate(record.layers)
    )
    return (
        '<h2 id="table">All layers</h2><p class="soft hint">Click a heading to sort, and again to reverse the order. '
        f"The filter above selects layers by name.{escape(without_values)}</p>"
        '<div class="box" tabindex="0" role="region" aria-labelledby="table">'
        f'<table id="layers"><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    )


def _cell(column: Column, layer: LayerRecord) -> str:
    """Return a cell with its text and its sort value."""
    value = column.value(layer)
    if value is None or math.isnan(value):
        return f'<td data-v="">{NO_VALUE}</td>'
    text = column.text(layer) if column.text and math.isfinite(value) else short(value)
    return f'<td data-v="{f"{value:.9g}".replace("inf", "Infinity")}">{escape(text)}</td>'


def _making(record: RunRecord) -> str:
    """Return the inputs of the run, and the device and versions that computed it."""
    facts = {
        "source": record.source,
        "device": record.device,
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "calibration tokens, SHA-256": record.text or "none",
        "run record, SHA-256": record.digest or "none",
    }
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return (
        f'<details><summary>How it was made</summary><dl class="terms">{rows}</dl>'
        f"<pre>{escape(record.recipe.to_json())}</pre></details>"
        '<p class="soft">This page was made from the run record <code>nearplane.json</code> alone, without the '
        "weights. <code>nearplane verify</code> measures all values again.</p>"
    )
