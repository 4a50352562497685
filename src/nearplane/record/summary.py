"""Summaries of a run for the command line, in sentences and tables, from its record alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from nearplane.record.mix_summary import choice_lines
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.remarks import remarks
from nearplane.record.uses import Named, typed, uses
from nearplane.record.words import (
    NOT_FITTED,
    as_computed,
    by_source,
    calibrated,
    degenerate,
    divergence,
    exceeding,
    left,
    losses,
)
from nearplane.system.sizes import counted, size_text, three_places

LEGEND = {  # of the columns of `layer_table`
    "bits/weight": "size of the layer in the file, per weight",
    "on extra": f"lost share of the original model's outputs on windows {NOT_FITTED}; it includes the losses of earlier layers",
    "alone": "lost share of the outputs on the same windows, by this layer alone",
    "relative loss": "lost share of the layer's outputs on the calibration tokens, by this layer alone",
    "nearest/this": "loss of rounding to nearest on the same grid / loss of these codes",
    "nearest/extra": "the same on the extra windows",
    "bound/this": "worst-case (Babai) bound of the loss / loss of these codes; - where there is none, as after tuning, "
    "and where it holds for less than half of the rows, as others clip",
    "clipped %": "codes that the solver would have put outside the grid",
    "above limit": "bits per weight above the limit for Gaussian weights at this loss",
    "correction": "part of the full correction for errors of earlier layers, 0 to 1",
    "asked": "requested bits per weight",
    "of it codes": "bits per weight of the codes alone, without steps and tables",
    "limit": "least bits per weight for this loss on Gaussian weights; a reference, not a bound for real weights",
}


def summary(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the lines that `nearplane quantize` prints."""
    bits = f"{record.rate:.3f} bits per weight{_of_codes(record)}"
    yield f"{len(record.layers)} layers quantized to {bits} in {record.seconds:.1f} s: {out}"
    memory = f"; peak memory {size_text(record.peak_memory)}" if record.peak_memory else ""
    original, size = record.original_bytes, size_text(record.bytes)
    if original and record.bytes:
        size += f" (original {size_text(original)}, {original / record.bytes:.2f} times as much)"
    sizes = f"weight files {size}, whole folder {size_text(record.folder)}"
    yield f"{sizes}; {calibrated(record)}{memory}"
    if record.tuning is not None:
        yield record.tuning.sentence()
    yield from divergence(record)
    yield from losses(record)
    yield from remarks(record)
    yield from next_commands(record, out)


def _of_codes(record: RunRecord) -> str:
    """Return how the bits divide into codes and steps with zero points, where all layers have codes of one width."""
    formats = [layer.number_format for layer in record.layers]
    widths = {format.bits for format in formats}
    bits = widths.pop() if len(widths) == 1 else 0
    if not bits or record.rate - bits < 0.01:
        return ""
    offsets = "" if formats[0].symmetric else " and minima" if formats[0].minimum else " and zero points"
    return f" (codes {bits}, steps{offsets} {record.rate - bits:.3f})"


def next_commands(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the commands that measure the loss of the whole model, show every layer, and use the checkpoint."""
    folder = typed(out)
    rounded = as_computed(record)
    command = f"nearplane evaluate {folder} --against {typed(record.source)}{rounded} --text TEXT"
    if record.tokens:
        yield f"predictions on another text: {command}"
    else:  # it may be a network of images
        yield f"predictions were not compared with the original's; for a language model this does it: {command}"
    yield f"figures of every layer: nearplane inspect {folder}"
    yield f"use it: {', or '.join(each.phrase for each in uses(record, Named.of(out)))}"


def tuned(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the lines that `nearplane tune` prints."""
    assert record.tuning is not None, "expected the record of a tuned checkpoint"
    yield f"{record.tuning.sentence()}: {out}"
    yield record.tuning.windows_sentence()
    yield "the losses below were measured again after tuning; the record also keeps those from before"
    yield from divergence(record)
    yield from losses(record)
    yield from degenerate(record)
    yield from exceeding(record)
    yield from next_commands(record, out)


def layer_table(
    record: RunRecord, worst: int | None = None
) -> tuple[list[str], tuple[str, ...], Iterator[tuple[str, ...]], list[str]]:
    """Return what `nearplane inspect` prints: lines before the table, its columns and rows, and lines after it.

    Args:
        record: The run record.
        worst: Number of rows, of the layers that lose most by themselves; None: all in their order.
    """
    scheme, coded = record.recipe.scheme, record.entropy is not None
    before = [
        f"{record.source} quantized by {scheme.solver}, {record.recipe.format}, {record.device}"
        + (f", {record.seconds:.1f} s" if record.seconds else ""),  # a record inside a file tells no times
        f"{record.windows} windows of {record.seqlen} tokens, {record.extra_windows} extra; "
        + ", ".join(f"{name} {number}" for name, number in record.versions.items()),
    ]
    before += by_source(record)
    if record.tuning is not None:
        before += [record.tuning.sentence(), record.tuning.windows_sentence()]
    before += [*divergence(record), *losses(record), *choice_lines(record)]
    layers = record.layers
    if worst is not None:
        layers = tuple(sorted(record.layers, key=lambda layer: -layer.own_loss)[:worst])
        before.append(
            f"below: {len(layers)} of {counted(len(record.layers), 'layer')}, those that lose most by themselves first"
        )
    columns = CODED_COLUMNS if coded else GRID_COLUMNS
    after = [f"{name}: {LEGEND[name]}" for name in columns if name in LEGEND]
    after += [*_without_bound(record), *degenerate(record), *left(record)]
    after.append(f"total: {record.rate:.3f} bits per quantized weight, weight files {size_text(record.bytes)}")
    if coded:
        after.append(
            f"of {record.rate:.3f} bits: codes {three_places(record.entropy)}, above the limit {three_places(record.above_limit)}; "
            f"headers and all that is not quantized {size_text(record.overhead)}"
        )
    rows = (tuple(text(layer) for text in columns.values()) for layer in layers)
    return before, tuple(columns), rows, after


def _without_bound(record: RunRecord) -> Iterator[str]:
    """Yield a line on the rows that clip, for which the bound does not hold."""
    bounded = [layer for layer in record.layers if layer.worst_case and not layer.degenerate]
    if clipping := [layer for layer in bounded if layer.clipped_rows]:
        rows = sum(round(layer.clipped_rows * layer.out_features) for layer in clipping)
        every = sum(layer.out_features for layer in bounded)
        yield (
            f"the bound does not hold for rows that clip: {rows:,} of {every:,}, in {len(clipping)} of {len(bounded)} layers"
        )


def _power(layer: LayerRecord, value: float | None) -> str:
    return "-" if value is None or layer.degenerate else f"{value:.3e}"


def _ratio(layer: LayerRecord, value: float | None, of: float | None) -> str:
    if not value or not of or layer.degenerate:
        return "-"
    return f"{value / of:.2f}" if value < 1e6 * of else f"{value / of:.1e}"


GRID_COLUMNS: dict[str, Callable[[LayerRecord], str]] = {
    "layer": lambda x: x.name,
    "bits/weight": lambda x: f"{x.rate:.3f}",
    "on extra": lambda x: _power(x, x.extra_relative_loss),
    "alone": lambda x: _power(x, x.extra_own_loss),
    "relative loss": lambda x: _power(x, x.relative_loss),
    "nearest/this": lambda x: _ratio(x, x.nearest_loss, x.loss),
    "nearest/extra": lambda x: _ratio(x, x.extra_nearest_loss, x.extra_loss),
    "bound/this": lambda x: "-" if x.clipped_rows > 0.5 else _ratio(x, x.worst_case, x.damped_loss),
    "clipped %": lambda x: f"{100 * x.clipped:.2f}",
    "above limit": lambda x: three_places(x.above_limit),
    "correction": lambda x: f"{x.correction:.2f}",
    "grid": lambda x: x.format,
    "shape": lambda x: f"{x.out_features} x {x.in_features}",
}
CODED_COLUMNS: dict[str, Callable[[LayerRecord], str]] = {
    "layer": GRID_COLUMNS["layer"],
    "shape": GRID_COLUMNS["shape"],
    "asked": lambda x: three_places(x.asked),
    "bits/weight": GRID_COLUMNS["bits/weight"],
    "of it codes": lambda x: three_places(x.entropy),
    "limit": lambda x: three_places(x.limit),
    **{
        head: GRID_COLUMNS[head]
        for head in ("above limit", "relative loss", "on extra", "alone", "bound/this", "correction")
    },
}
