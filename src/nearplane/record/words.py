"""Sentences about a run record that the summary and the HTML report share. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from nearplane.errors import first_few
from nearplane.number_formats import TYPES
from nearplane.recipe.scheme import DEFAULT_GROUP_SIZES
from nearplane.recipe.schemes import BlockScheme
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT, MIN_TOKENS_PER_INPUT
from nearplane.record.record import RunRecord
from nearplane.record.uses import typed, uses
from nearplane.system.files import read_object
from nearplane.system.sizes import bytes_in, counted

NOT_FITTED = "to which nothing was fitted"  # said of windows that follow the calibration windows in the text
NOTABLE_LOSS = 0.05  # share of a layer's output energy; at 4 bits most layers lose less than a tenth of it
MAX_NAMED = 3  # layers with the largest losses that are named


def calibrated(record: RunRecord) -> str:
    """Return what the run was calibrated on."""
    if not record.tokens:
        return "not calibrated: losses are computed as if all inputs of a layer were independent"
    measured = f", measured on {counted(record.extra_windows, 'extra window')}" if record.extra_windows else ""
    return f"calibrated on {record.tokens:,} tokens ({counted(record.windows, 'window')} of {record.seqlen}){measured}"


def losses(record: RunRecord) -> Iterator[str]:
    """Yield what the layers lost: on the extra windows where there are some, else on the windows that were fitted.

    Losses on windows that were fitted look better than they are. Losses on extra windows compare the outputs with those
    of the original network, so they include what the layers before lost.
    """
    losses = [
        (layer.extra_relative_loss, layer.extra_nearest_loss, layer.extra_loss, layer.name)
        for layer in record.measured
        if layer.extra_relative_loss is not None
    ]
    if losses:
        where = f" on {counted(record.extra_windows, 'extra window')}, {NOT_FITTED}"
    else:
        losses = [(layer.relative_loss, layer.nearest_loss, layer.loss, layer.name) for layer in record.measured]
        where = ""
        if record.tokens and not record.extra_windows:
            where = " on the calibration tokens, as the text has no further windows"
    if not losses:
        return
    worst = sorted(losses, key=lambda loss: loss[0], reverse=True)
    above = sum(loss > NOTABLE_LOSS for loss, *_ in losses)
    exceeding_it = f"{above or 'no'} {'layer loses' if above < 2 else 'layers lose'} more than {_percent(NOTABLE_LOSS)}"
    yield (
        f"share of a layer's output that is lost{where}: {_percent(worst[len(worst) // 2][0])} in the median layer; {exceeding_it}"
    )
    yield "most is lost in " + ", ".join(f"{name} ({_percent(loss)})" for loss, _, _, name in worst[:MAX_NAMED])
    better = sorted(nearest / loss for _, nearest, loss, _ in losses if nearest and loss)
    if record.tokens and better:
        times = better[len(better) // 2]
        yield f"rounding every weight to the nearest value of the same grids would lose {times:.1f} times as much (median layer)"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def remarks(record: RunRecord) -> Iterator[str]:
    """Yield a sentence for everything that differs from the request, was left out, or matters before the checkpoint is used."""
    if record.missed is not None:
        yield record.missed
    if not record.layers:
        return
    sentences = (
        _types,
        _activations,
        _smaller_groups,
        _wide_steps,
        by_source,
        _short_text,
        few_tokens,
        _experts,
        _dead_inputs,
        degenerate,
        _stored,
        left,
        exceeding,
    )
    yield from chain.from_iterable(each(record) for each in sentences)


def _short_text(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the calibration text has fewer windows than were asked for."""
    asked = record.recipe.calibration.samples
    if record.tokens and asked is not None and record.windows < asked:
        yield f"the calibration text has {counted(record.windows, 'window')} of {record.seqlen} tokens; {asked} were requested"


def by_source(record: RunRecord) -> Iterator[str]:
    """Yield what was lost on the extra windows of each text of a mix."""
    parts = []
    for number, each in enumerate(record.sources):
        loss = record.lost(number)
        lost = "" if loss is None else f" {100 * loss:.2g} % on {counted(each.extra_windows, 'extra window')}"
        parts.append(f"{each.name}{lost} ({counted(each.windows, 'calibration window')}, weight {each.weight:g})")
    if parts:
        yield f"lost share of a layer's output by text of the mix, mean over layers: {'; '.join(parts)}"


def shortage(windows: int, seqlen: int, samples: int, widest: str, inputs: int) -> str | None:
    """Return a sentence if there are fewer calibration tokens than advised, else None.

    With fewer tokens than inputs, the Hessian has directions of length 0, in which every error looks free. With only a few
    more tokens than inputs, the losses on the calibration tokens are still far below those on other text.

    Args:
        windows, seqlen: The number of calibration windows, and the tokens of each.
        samples: The number of windows that were asked for.
        widest: The name of the layer with the most inputs.
        inputs: The number of inputs of that layer.
    """
    tokens = windows * seqlen
    if tokens >= ADVISED_TOKENS_PER_INPUT * inputs:
        return None
    enough = math.ceil(ADVISED_TOKENS_PER_INPUT * inputs / seqlen)
    short = f" The text has only {windows} such windows: pass a longer text." if windows < samples else ""
    return (
        f"{tokens:,} calibration tokens are {tokens / inputs:.2g} for each of the {inputs:,} inputs of {widest}; at least "
        f"{MIN_TOKENS_PER_INPUT} is needed, {ADVISED_TOKENS_PER_INPUT} or more are advised. Use --samples {enough} or more "
        f"(windows of {seqlen} tokens).{short}"
    )


def few_tokens(record: RunRecord) -> Iterator[str]:
    """Yield a line if there were fewer calibration tokens than advised."""
    if not record.tokens or not record.layers or not record.recipe.scheme.calibrated:
        return
    widest = max(record.layers, key=lambda layer: layer.in_features)
    asked = record.recipe.calibration.samples or 0
    sentence = shortage(record.windows, record.seqlen, asked, widest.name, widest.in_features)
    if sentence is not None:
        yield f"too few tokens to trust the losses: {sentence}"


def _experts(record: RunRecord) -> Iterator[str]:
    """Yield how many calibration tokens were routed to experts, and what was done for experts with few tokens."""
    matrices = [layer for layer in record.layers if layer.blended is not None]
    if not matrices:
        return
    experts = {layer.name.rpartition(".")[0]: layer for layer in matrices}  # one matrix of each
    counts = sorted(layer.tokens for layer in experts.values())
    yield (
        f"{counted(len(counts), 'expert')}: each gets {counts[0]:,} to {counts[-1]:,} of the {record.tokens:,} calibration tokens "
        f"(median {counts[len(counts) // 2]:,})"
    )
    compared = [(layer.alike, layer.tokens) for layer in matrices if layer.alike is not None]
    if total := sum(tokens for _, tokens in compared):
        share = sum(alike * tokens for alike, tokens in compared) / total
        yield (
            f"{100 * share:.1f} % of the tokens of experts reach the same expert in the original model; "
            f"only these are corrected"
        )
    few = [layer for layer in matrices if layer.tokens < ADVISED_TOKENS_PER_INPUT * layer.in_features]
    rare = {layer.name.rpartition(".")[0] for layer in few}
    filled = {layer.name.rpartition(".")[0] for layer in few if layer.blended}
    if not rare:
        return
    factor = max(
        (ADVISED_TOKENS_PER_INPUT * layer.in_features / layer.tokens for layer in few if layer.tokens), default=1.0
    )
    yield (
        f"{counted(len(rare), 'expert')} got fewer than the advised {ADVISED_TOKENS_PER_INPUT} tokens for each input; about "
        f"--samples {math.ceil(factor * record.windows):,} ({factor:.1f} times as many) would be enough for every expert that "
        f"tokens reached"
    )
    if filled:
        yield (
            f"{counted(len(filled), 'expert')} got fewer than {MIN_TOKENS_PER_INPUT} token for each input: the mean Hessian of the "
            f"experts of the block was added to theirs (--rare-experts mean)"
        )
    if never := sorted(name for name in rare if not experts[name].tokens):
        yield f"no token was routed to {first_few(never)}: more text of this kind may not help"


def _dead_inputs(record: RunRecord) -> Iterator[str]:
    """Yield sentences about inputs that were 0 for every calibration token, with the names of their layers.

    An input can become 0 by quantization: at few bits, a whole row of an up or gate projection may be rounded to 0.
    """
    known = [(layer, layer.pruned) for layer in record.layers if layer.pruned is not None]
    original = [(layer, layer.dead - count) for layer, count in known]
    unknown = [(layer, layer.dead) for layer in record.layers if layer.pruned is None]
    for counts, what in (
        (known, "neurons were pruned: quantization made their outputs 0 for every calibration token, and"),
        (original, "inputs were 0 for every calibration token, also in the original model;"),
        (unknown, "inputs were 0 for every calibration token;"),
    ):
        if names := [f"{layer.name} ({count} of {layer.in_features})" for layer, count in counts if count]:
            yield f"{sum(count for _, count in counts):,} {what} the weights for them were set to 0: {first_few(names)}"


def degenerate(record: RunRecord) -> Iterator[str]:
    """Yield which layers are left out of all means, and why."""
    if names := [f"{layer.name} ({layer.degenerate})" for layer in record.layers if layer.degenerate]:
        of = f"{len(names):,} of {counted(len(record.layers), 'layer')}"
        yield f"degenerate, so that their losses tell nothing and are left out: {of}: {first_few(names)}"


def _stored(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the original model is itself stored in few bits."""
    if record.stored:
        yield f"the original is stored in {record.stored}; losses are measured against its weights decoded to bfloat16"


def left(record: RunRecord) -> Iterator[str]:
    """Yield what was not quantized, with one sentence for all names that differ only by numbers."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in record.skipped:
        alike.setdefault((re.sub(r"\d+", "*", name), reason), []).append(name)
    for (pattern, reason), names in alike.items():
        if len(names) == 1:
            yield f"not quantized: {names[0]} ({reason})"
        else:
            yield f"not quantized: {pattern}, {len(names):,} of them ({reason})"
    if record.recipe.ignore:
        how = " (float32 is stored as F16, as llama.cpp does)" if record.recipe.files.one_file else ""
        how = how if record.recipe.like is None else f" (as in {record.recipe.like}, or in Q8_0)"
        yield f"not quantized{how}: all layers that match --ignore {' '.join(record.recipe.ignore)}"


def exceeding(record: RunRecord) -> Iterator[str]:
    """Yield a sentence about the layers that lose more than --max-loss allows."""
    if layers := record.exceeding:
        names = [f"{each.name} ({each.relative_loss:.3e} at {each.rate:.3f} bits per weight)" for each in layers]
        yield f"{counted(len(names), 'layer')} with a relative loss above --max-loss {record.recipe.max_loss:g}: {first_few(names)}"


def _types(record: RunRecord) -> Iterator[str]:
    """Yield how many layers got each GGUF type, where not all have the type that was asked for."""
    scheme = record.recipe.scheme
    if not isinstance(scheme, BlockScheme):
        return
    types = Counter(layer.format for layer in record.layers)
    if set(types) == {scheme.grid}:
        return
    list_of_types = ", ".join(f"{name} in {counted(count, 'layer')}" for name, count in types.most_common())
    if scheme.size is None:
        yield f"{f'{scheme.grid} bits per weight' if scheme.measured else f'--grid {scheme.grid}'}: {list_of_types}"
    else:
        reached = 100 * record.folder / bytes_in(scheme.size)
        yield f"--size {scheme.size}: {list_of_types}; the folder takes {reached:.2f} % of that size"
    if (asked := TYPES.get(str(scheme.grid).removesuffix("_s").removesuffix("_m"))) is None:
        return
    for layer in record.layers:
        if layer.in_features % asked.columns:
            yield (
                f"the {layer.in_features} inputs of {layer.name} cannot be divided into blocks of {asked.columns} weights: such "
                f"layers get the type that llama.cpp uses instead"
            )
            return


def _activations(record: RunRecord) -> Iterator[str]:
    """Yield a line if runtimes round the inputs of layers."""
    if (activations := record.recipe.activations) != "none":
        yield (
            f"runtimes round the inputs of these layers to {activations}, which loses more than the weights alone and which the "
            f"targets take into account; nearplane evaluate --activations measures both"
        )


def _wide_steps(record: RunRecord) -> Iterator[str]:
    """Yield a line if steps are stored in 32 bits, as they are where the model is stored in float32."""
    layer = record.layers[0]
    format = layer.number_format
    if not record.recipe.files.steps_of_model:
        return
    words = -(-layer.in_features * format.bits // 32)  # 32-bit words of codes in a row
    steps = layer.out_features * format.groups(layer.in_features)
    if layer.bytes - 4 * words * layer.out_features >= 4 * steps * (2 if format.minimum else 1):
        remedy = "With the model" if record.recipe.files.minimum else "With --format gptq, or with the model"
        yield (
            f"each step takes 32 bits: the model is stored in float32, and {record.recipe.format} stores steps in the model's "
            f"dtype. {remedy} in bfloat16, a step takes 16 bits"
        )


def _smaller_groups(record: RunRecord) -> Iterator[str]:
    """Yield a line if no group size was given and the default does not divide the inputs."""
    size = record.layers[0].number_format.group
    if getattr(record.recipe.scheme, "group_size", None) != "auto" or size == DEFAULT_GROUP_SIZES[0]:
        return
    narrow = next((x for x in record.layers if x.in_features % (2 * size if size else DEFAULT_GROUP_SIZES[-1])), None)
    if narrow is None:  # all layers could have larger groups
        return
    if size is None:
        yield (
            f"each row has a single step: no group of {DEFAULT_GROUP_SIZES[-1]} or more divides the {narrow.in_features} inputs of "
            f"{narrow.name}; a smaller --group-size loses less and takes more bits"
        )
    else:
        default = DEFAULT_GROUP_SIZES[0]
        yield f"groups of {size}: the default, {default}, does not divide the {narrow.in_features} inputs of {narrow.name}"


def next_commands(record: RunRecord, out: Path) -> Iterator[str]:
    """Yield the commands that measure the loss of the whole model, show every layer, and use the checkpoint."""
    folder = typed(out)
    if record.tokens:
        original = typed(record.source)
        rounded = "" if record.recipe.activations == "none" else " --activations"
        command = f"nearplane evaluate {folder} --against {original}{rounded} --text TEXT"
        yield f"how far predictions are from the original's: {command}"
    yield f"figures of every layer: nearplane inspect {folder}"
    path = out / "config.json"
    config = read_object(path, expected="Expected the config of a model") if path.is_file() else {}
    yield f"use it: {', or '.join(each.phrase for each in uses(record, config, str(out)))}"
