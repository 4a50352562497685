"""What the command line says of a run, in words and tables: from its record alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nearplane.enough import shortage
from nearplane.recipe import FITTING
from nearplane.record import LayerRecord, RunRecord
from nearplane.sizes import size_text


def summary(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the lines that `nearplane quantize` prints."""
    losses = [layer.relative_loss for layer in record.layers]
    worst = max(record.layers, key=lambda layer: layer.relative_loss)
    better = [layer.nearest_loss / layer.loss for layer in record.layers if layer.nearest_loss and layer.loss > 0]
    yield f"{len(record.layers)} layers quantized to {record.rate:.3f} bits per weight in {record.seconds:.1f} s: {out}"
    if (missed := record.missed) is not None:
        yield missed
    memory = f", peak memory {size_text(record.peak_memory)}" if record.peak_memory else ""
    yield (
        f"weight files {size_text(record.bytes)}, the whole folder {size_text(record.folder)}, "
        f"calibrated on {record.tokens:,} tokens{memory}"
    )
    yield from _smaller_groups(record)
    yield from _few_tokens(record)
    if record.tokens and record.windows < record.recipe.calibration.samples:
        yield f"the text holds {record.windows} windows of {record.seqlen}, {record.recipe.calibration.samples} were asked for"
    yield f"relative loss: mean {sum(losses) / len(losses):.2e}, worst {worst.relative_loss:.2e} ({worst.name})"
    if better and record.tokens:
        yield f"rounding the same targets to nearest would lose {sorted(better)[len(better) // 2]:.1f} times as much (median layer)"
    if unsound := [layer for layer in record.layers if layer.dead]:
        yield f"{sum(layer.dead for layer in unsound)} inputs were 0 for every calibration token; their weights are 0 now:"
        yield "  " + ", ".join(f"{layer.name} ({layer.dead} of {layer.in_features})" for layer in unsound[:8])
    for name, reason in record.skipped:
        yield f"left as it is: {name} ({reason})"
    if record.exceeding:
        yield f"{len(record.exceeding)} layers lose more than --max-loss {record.recipe.max_loss:g}:"
        for layer in record.exceeding:
            yield f"  {layer.name}: {layer.relative_loss:.3e} at {layer.rate:.3f} bits per weight"
    if record.recipe.format == "nearplane":
        yield (
            f'load it with nearplane.load("{out}"), or in transformers after nearplane.register(): without that call transformers '
            f"stops with an error. For other programs: nearplane export"
        )


def _few_tokens(record: RunRecord) -> Iterator[str]:
    """Yield a line if there were fewer calibration tokens than advised."""
    if not record.tokens or record.recipe.rule.solver == "round-to-nearest":
        return
    widest = max(record.layers, key=lambda layer: layer.in_features)
    said = shortage(record.windows, record.seqlen, record.recipe.calibration.samples, widest.name, widest.in_features)
    if said is not None:
        yield f"too few tokens to trust the losses: {said}"


def _smaller_groups(record: RunRecord) -> Iterator[str]:
    """Yield a line if no one gave a group size and the default does not divide the inputs."""
    size = record.layers[0].group_size
    if record.recipe.rule.group_size != "auto" or size is None or size == FITTING[0]:
        return
    for layer in record.layers:
        if layer.in_features % (2 * size):  # which is why they are not larger
            yield f"groups of {size}: the default, {FITTING[0]}, does not divide the {layer.in_features} inputs of {layer.name}"
            return


def layer_table(record: RunRecord) -> tuple[list[str], tuple[str, ...], Iterator[tuple[str, ...]], list[str]]:
    """Return what `nearplane inspect` prints: lines before the table, its columns and rows, and lines after it."""
    rule, coded = record.recipe.rule, record.recipe.rate.wanted
    before = [
        f"{record.source} quantized by {rule.solver}, {record.recipe.format}, {record.device}, {record.seconds:.1f} s",
        f"{record.windows} windows of {record.seqlen} tokens; versions {record.versions}",
    ]
    after = [f"left as it is: {name} ({reason})" for name, reason in record.skipped]
    after.append(f"total: {record.rate:.3f} bits per quantized weight, weight files {size_text(record.bytes)}")
    if any(layer.worst_case and layer.clipped_rows for layer in record.layers):
        after.insert(0, "* some rows clip: for them the worst case does not hold")
    if not coded:
        columns = (
            "layer", "shape", "grid", "bits/weight", "relative loss", "nearest/this", "bound/this", "clipped %", "above limit",
            "correction",
        )  # fmt: skip
        return before, columns, _grid_rows(record), after
    columns = (
        "layer", "shape", "asked", "bits/weight", "of it codes", "limit", "above it", "relative loss", "bound/this", "correction",
    )  # fmt: skip
    after.insert(
        0, "limit: least bits per weight for this loss on Gaussian weights; a reference, not a bound for real ones"
    )
    after.append(
        f"of {record.rate:.3f} bits: codes {_number(record.entropy)}, above the limit {_number(record.above_limit)}; "
        f"headers and all that is not quantized {size_text(record.overhead)}"
    )
    return before, columns, _coded_rows(record), after


def _grid_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    for layer in record.layers:
        yield (
            layer.name, f"{layer.out_features} x {layer.in_features}",
            f"{layer.bits}-bit {'sym' if layer.symmetric else 'asym'} g{layer.group_size or '-'}", f"{layer.rate:.3f}",
            f"{layer.relative_loss:.3e}", _ratio(layer.nearest_loss, layer.loss), _bound(layer),
            f"{100 * layer.clipped:.2f}", _number(layer.above_limit), f"{layer.correction:.2f}",
        )  # fmt: skip


def _coded_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    for layer in record.layers:
        yield (
            layer.name, f"{layer.out_features} x {layer.in_features}", _number(layer.asked), f"{layer.rate:.3f}",
            _number(layer.entropy), _number(layer.limit), _number(layer.above_limit), f"{layer.relative_loss:.3e}",
            _bound(layer), f"{layer.correction:.2f}",
        )  # fmt: skip


def _bound(layer: LayerRecord) -> str:
    """Return how many times the loss the worst case is, with a star where rows clip."""
    return _ratio(layer.worst_case, layer.damped_loss) + ("*" if layer.worst_case and layer.clipped_rows else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(value: float | None, of: float) -> str:
    return f"{value / of:.2f}" if value and of else "-"
