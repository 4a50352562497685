"""What the command line says of a run, in words and tables: from its record alone. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nearplane.block_types import TYPES
from nearplane.dead import dead_inputs
from nearplane.enough import ADVISED, LEAST, shortage
from nearplane.record import LayerRecord, RunRecord
from nearplane.schemes import FITTING, BlockScheme
from nearplane.sizes import bytes_in, counted, size_text


def summary(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the lines that `nearplane quantize` prints."""
    yield (
        f"{len(record.layers)} layers quantized to {record.rate:.3f} bits per weight{_of_codes(record)} in "
        f"{record.seconds:.1f} s: {out}"
    )
    if (missed := record.missed) is not None:
        yield missed
    memory = f", peak memory {size_text(record.peak_memory)}" if record.peak_memory else ""
    yield (
        f"weight files {size_text(record.bytes)}, the whole folder {size_text(record.folder)}, "
        f"calibrated on {record.tokens:,} tokens{memory}"
    )
    if record.tuning is not None:
        yield record.tuning.sentence()
    yield from _types(record)
    yield from _smaller_groups(record)
    yield from _wide_steps(record)
    yield from _few_tokens(record)
    yield from _experts(record)
    if record.tokens and record.windows < record.recipe.calibration.samples:
        yield f"the text holds {record.windows} windows of {record.seqlen}, {record.recipe.calibration.samples} were asked for"
    yield from _losses(record)
    for sentence, layers in dead_inputs(record):
        yield f"{sentence}:"
        yield "  " + ", ".join(layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    if record.stored:
        yield f"the model's makers store its weights in {record.stored}: losses are against what these mean, in bfloat16"
    yield from _left(record)
    if record.recipe.ignore:
        how = ", those in F32 as F16, as llama.cpp has them" if record.recipe.format == "gguf" else ""
        yield f"left as they are{how}: all layers that --ignore {' '.join(record.recipe.ignore)} names"
    yield from _exceeding(record)
    if record.recipe.format == "nearplane":
        yield (
            f'load it with nearplane.load("{out}"), or in transformers after nearplane.register(): without that call transformers '
            f"stops with an error. For other programs: nearplane export"
        )


def _left(record: RunRecord) -> Iterator[str]:
    """Yield what was left as it is, in one line what differs by numbers alone."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in record.skipped:
        alike.setdefault((re.sub(r"\d+", "*", name), reason), []).append(name)
    for (pattern, reason), names in alike.items():
        if len(names) == 1:
            yield f"left as it is: {names[0]} ({reason})"
        else:
            yield f"left as they are: {pattern}, {len(names):,} of them ({reason})"


def _of_codes(record: RunRecord) -> str:
    """Return how many of the bits are codes, where all layers have the same; the rest are steps and zero-points."""
    widths = {layer.bits for layer in record.layers}
    bits = widths.pop() if len(widths) == 1 else None
    if bits is None or record.rate - bits < 0.01:
        return ""
    return f" (codes {bits}, steps{'' if record.layers[0].symmetric else ' and zero-points'} {record.rate - bits:.3f})"


def tuned(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the lines that `nearplane tune` prints."""
    assert record.tuning is not None, "of a tuned checkpoint"
    yield f"{record.tuning.sentence()}: {out}"
    yield record.tuning.looked_at()
    yield "losses are measured again, those before tuning stand in the record"
    yield from _losses(record)
    yield from _exceeding(record)


def _exceeding(record: RunRecord) -> Iterator[str]:
    """Yield the layers that lose more than was asked for."""
    if record.exceeding:
        yield f"{len(record.exceeding)} layers lose more than --max-loss {record.recipe.max_loss:g}:"
        for layer in record.exceeding:
            yield f"  {layer.name}: {layer.relative_loss:.3e} at {layer.rate:.3f} bits per weight"


def _losses(record: RunRecord) -> Iterator[str]:
    """Yield what was lost: on the extra windows where there are some, as losses on what was fitted look better than they are.

    Those are of outputs against the original network's: what the layers before lost is in them.
    """
    where, there = "", ""
    found = [
        (layer.extra_relative_loss, layer.extra_nearest_loss, layer.extra_loss, layer.name)
        for layer in record.layers
        if layer.extra_relative_loss is not None
    ]
    if found:
        where, there = f" on {counted(record.extra_windows, 'extra window')}, to which nothing was fitted", " there"
    else:
        found = [(layer.relative_loss, layer.nearest_loss, layer.loss, layer.name) for layer in record.layers]
        if record.tokens and not record.extra_windows:
            where = " on the tokens that were fitted, as the text has no windows besides"
    worst, _, _, name = max(found, key=lambda losses: losses[0])
    yield f"relative loss{where}: mean {sum(losses[0] for losses in found) / len(found):.2e}, worst {worst:.2e} ({name})"
    better = sorted(nearest / loss for _, nearest, loss, _ in found if nearest and loss)
    if record.tokens and better:
        times = better[len(better) // 2]
        yield f"rounding the same targets to nearest would lose {times:.1f} times as much{there} (median layer)"


def _few_tokens(record: RunRecord) -> Iterator[str]:
    """Yield a line if there were fewer calibration tokens than advised."""
    if not record.tokens or not record.recipe.scheme.calibrated:
        return
    widest = max(record.layers, key=lambda layer: layer.in_features)
    said = shortage(record.windows, record.seqlen, record.recipe.calibration.samples, widest.name, widest.in_features)
    if said is not None:
        yield f"too few tokens to trust the losses: {said}"


def _experts(record: RunRecord) -> Iterator[str]:
    """Yield how many tokens reached experts, and what became of those that few reached."""
    matrices = [layer for layer in record.layers if layer.blended is not None]
    if not matrices:
        return
    experts = {layer.name.rpartition(".")[0]: layer for layer in matrices}  # one matrix of each
    counts = sorted(layer.tokens for layer in experts.values())
    said = (
        f"{counted(len(counts), 'expert')}: {counts[0]:,} to {counts[-1]:,} of the {record.tokens:,} calibration tokens"
    )
    said = f"{said} reached one, {counts[len(counts) // 2]:,} in the median"
    compared = [(layer.alike, layer.tokens) for layer in matrices if layer.alike is not None]
    if total := sum(tokens for _, tokens in compared):
        share = sum(alike * tokens for alike, tokens in compared) / total
        said = f"{said}; {100 * share:.1f} % of these pairs are those of the original network, and corrected"
    yield said
    few = [layer for layer in matrices if layer.tokens < ADVISED * layer.in_features]
    rare = {layer.name.rpartition(".")[0] for layer in few}
    filled = {layer.name.rpartition(".")[0] for layer in few if layer.blended}
    if not rare:
        return
    times = max((ADVISED * layer.in_features / layer.tokens for layer in few if layer.tokens), default=1.0)
    yield (
        f"{counted(len(rare), 'expert')} of them saw fewer than {ADVISED} tokens for each input; about --samples "
        f"{math.ceil(times * record.windows):,}, {times:.1f} times as many, would reach all that any token reached"
    )
    if filled:
        yield (
            f"{counted(len(filled), 'expert')} saw fewer than {LEAST} for each: their Hessian is filled up with the mean over "
            f"the experts of the block (--rare-experts mean)"
        )
    if never := sorted(name for name in rare if not experts[name].tokens):
        more = f" and {len(never) - 4:,} more" if len(never) > 4 else ""
        yield f"no token reached {', '.join(never[:4])}{more}: more of such text may not help"


def _types(record: RunRecord) -> Iterator[str]:
    """Yield which types of llama.cpp's blocks layers have, where they are not all as asked for."""
    scheme = record.recipe.scheme
    if not isinstance(scheme, BlockScheme):
        return
    found = Counter(str(layer.blocks) for layer in record.layers)
    if set(found) == {scheme.grid}:
        return
    said = ", ".join(f"{name} in {counted(count, 'layer')}" for name, count in found.most_common())
    if scheme.size is None:
        yield f"{f'{scheme.grid} bits per weight' if scheme.measured else f'--grid {scheme.grid}'}: {said}"
    else:
        reached = 100 * record.folder / bytes_in(scheme.size)
        yield f"--size {scheme.size}: {said}; the folder has {reached:.2f} % of that"
    if (asked := TYPES.get(str(scheme.grid))) is None:
        return
    for layer in record.layers:
        if layer.in_features % asked.columns:
            yield (
                f"blocks of {asked.columns} weights do not divide the {layer.in_features} inputs of {layer.name}: such layers "
                f"get the type that llama.cpp takes for them"
            )
            return


def _wide_steps(record: RunRecord) -> Iterator[str]:
    """Yield a line if steps take 32 bits, which they do where the model is stored so."""
    layer = record.layers[0]
    if record.recipe.format != "compressed-tensors" or layer.bits is None:
        return
    words = -(-layer.in_features * layer.bits // 32)  # of codes, a row
    steps = layer.out_features * (layer.in_features // (layer.group_size or layer.in_features))
    if layer.bytes - 4 * words * layer.out_features >= 4 * steps:
        yield (
            "each step takes 32 bits, as the model is in float32 and readers of compressed-tensors want steps in its dtype: 16 "
            "in --format gptq, or of the model in bfloat16"
        )


def _smaller_groups(record: RunRecord) -> Iterator[str]:
    """Yield a line if no one gave a group size and the default does not divide the inputs."""
    size = record.layers[0].group_size
    if record.recipe.scheme.layer_grid.group_size != "auto" or size == FITTING[0]:
        return
    if size is None:
        for layer in record.layers:
            if layer.in_features % FITTING[-1]:
                yield (
                    f"one step a row: no group of {FITTING[-1]} or more divides the {layer.in_features} inputs of {layer.name}; a "
                    f"smaller --group-size loses less and takes more bits"
                )
                return
        return
    for layer in record.layers:
        if layer.in_features % (2 * size):  # which is why they are not larger
            yield f"groups of {size}: the default, {FITTING[0]}, does not divide the {layer.in_features} inputs of {layer.name}"
            return


def layer_table(record: RunRecord) -> tuple[list[str], tuple[str, ...], Iterator[tuple[str, ...]], list[str]]:
    """Return what `nearplane inspect` prints: lines before the table, its columns and rows, and lines after it."""
    scheme, coded = record.recipe.scheme, record.entropy is not None
    before = [
        f"{record.source} quantized by {scheme.solver}, {record.recipe.format}, {record.device}"
        + (f", {record.seconds:.1f} s" if record.seconds else ""),  # a record inside a file tells no times
        f"{record.windows} windows of {record.seqlen} tokens, {record.extra_windows} extra; "
        + ", ".join(f"{name} {number}" for name, number in record.versions.items()),
    ]
    if record.tuning is not None:
        before += [record.tuning.sentence(), record.tuning.looked_at()]
    after = [f"left as it is: {name} ({reason})" for name, reason in record.skipped]
    after.append(f"total: {record.rate:.3f} bits per quantized weight, weight files {size_text(record.bytes)}")
    if record.extra_windows:
        after.insert(
            0,
            f"on extra: outputs against the original's, on {record.extra_windows} windows to which nothing was fitted",
        )
    if any(layer.worst_case and layer.clipped_rows for layer in record.layers):
        after.insert(0, "* some rows clip: for them the worst case does not hold")
    columns: tuple[str, ...]
    if not coded:
        columns = (
            "layer",
            "grid",
            "bits/weight",
            "relative loss",
            "on extra",
            "nearest/this",
            "nearest/extra",
            "bound/this",
            "clipped %",
            "above limit",
            "correction",
            "shape",
        )
        return before, columns, _grid_rows(record), after
    columns = (
        "layer",
        "shape",
        "asked",
        "bits/weight",
        "of it codes",
        "limit",
        "above it",
        "relative loss",
        "on extra",
        "bound/this",
        "correction",
    )
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
            layer.name,
            layer.blocks or f"{layer.bits}-bit {'sym' if layer.symmetric else 'asym'} g{layer.group_size or '-'}",
            f"{layer.rate:.3f}",
            f"{layer.relative_loss:.3e}",
            _power(layer.extra_relative_loss),
            _ratio(layer.nearest_loss, layer.loss),
            _ratio(layer.extra_nearest_loss, layer.extra_loss),
            _bound(layer),
            f"{100 * layer.clipped:.2f}",
            _number(layer.above_limit),
            f"{layer.correction:.2f}",
            f"{layer.out_features} x {layer.in_features}",
        )


def _coded_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    for layer in record.layers:
        yield (
            layer.name,
            f"{layer.out_features} x {layer.in_features}",
            _number(layer.asked),
            f"{layer.rate:.3f}",
            _number(layer.entropy),
            _number(layer.limit),
            _number(layer.above_limit),
            f"{layer.relative_loss:.3e}",
            _power(layer.extra_relative_loss),
            _bound(layer),
            f"{layer.correction:.2f}",
        )


def _bound(layer: LayerRecord) -> str:
    """Return how many times the loss the worst case is, with a star where rows clip."""
    return _ratio(layer.worst_case, layer.damped_loss) + ("*" if layer.worst_case and layer.clipped_rows else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _power(value: float | None) -> str:
    return "-" if value is None else f"{value:.3e}"


def _ratio(value: float | None, of: float | None) -> str:
    return f"{value / of:.2f}" if value and of else "-"
