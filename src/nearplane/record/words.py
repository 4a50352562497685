"""Sentences about the text and the losses of a run, for summary, report and model card. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from nearplane.errors import first_few
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT, MIN_TOKENS_PER_INPUT, USEFUL_TOKENS_PER_INPUT
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.sizes import counted

NOT_FITTED = "to which nothing was fitted"  # said of windows that follow the calibration windows in the text
NOTABLE_LOSS = 0.05  # share of a layer's output energy; at 4 bits most layers lose less than a tenth of it
# largest KL, in nats per token, for which each word is said
SCALE = ((0.01, "close to the original"), (0.03, "small"), (0.1, "noticeable"))
EXPERT = re.compile(r"\bexperts\.[0-9]+\.")
SMALL = SCALE[1][0]  # largest KL that needs no advice
# of the fitted loss, and share of the output: with 2.7 tokens an input, layers of SmolLM2 lose 1.7 times as much on other text
# in the median, and at most 3.2 times
MANY_TIMES, OVERFITTED_LOSS = 3, 0.01
MAX_NAMED = 3  # layers with the largest losses that are named


def calibrated(record: RunRecord) -> str:
    """Return what the run was calibrated on."""
    if not record.tokens:
        return "not calibrated: losses are computed as if all inputs of a layer were independent"
    measured = f", measured on {counted(record.extra_windows, 'extra window')}" if record.extra_windows else ""
    return f"calibrated on {record.tokens:,} tokens ({counted(record.windows, 'window')} of {record.seqlen}){measured}"


def is_expert(layer: LayerRecord) -> bool:
    """Return whether a layer is a matrix of an expert, by its name: without calibration nothing else in a record says so."""
    return layer.blended is not None or EXPERT.search(layer.name) is not None


def weights_of(record: RunRecord) -> Iterator[Weights]:
    """Yield the weights of every layer as a program meets them."""
    for layer in record.layers:
        rounded = record.recipe.inputs_of(layer.name) is not None
        yield Weights(layer.number_format, rounded, is_expert(layer))


def rounded_inputs(record: RunRecord) -> list[tuple[str, str]]:
    """Return the layers whose inputs runtimes round, in words, and to what; a pair for each number format if they differ."""
    found = {layer.format: record.recipe.inputs_of(layer.name) for layer in record.layers}
    names = {format: inputs.name for format, inputs in found.items() if inputs is not None}
    if len(names) == len(found) and len(set(names.values())) == 1:
        return [("these layers", names.popitem()[1])]
    return [(f"those in {format}", name) for format, name in names.items()]


def as_computed(record: RunRecord) -> str:
    """Return the options of `evaluate` that measure a checkpoint as programs compute it; empty: the weights alone say all."""
    rounded = " --activations" if record.recipe.rounded else ""
    return rounded + (" --kv-cache fp8" if record.recipe.kv_cache != "none" else "")


def for_one_program(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the files are for one program, and the usual reader of their format does not load them."""
    recipe = record.recipe
    usual = readers_of(recipe.format, None)
    reasons = (reason for weights in weights_of(record) if (reason := usual.reason(weights)) is not None)
    if recipe.runtime is not None and (reason := next(reasons, None)) is not None:
        yield f"made for {recipe.runtime}: {reason}"


def in_words(record: RunRecord) -> str:
    """Return the KL on the extra windows on a scale in words."""
    assert record.extra_kl is not None, "the record has no KL"
    more = "more bits" if record.recipe.scheme.limit is None else "a larger --size"
    tunes = record.tuning is None and record.recipe.scheme.limit is None  # else its record would be longer
    advice = f"more --samples, {more} or nearplane tune make" if tunes else f"more --samples or {more} make"
    word = word_for(record.extra_kl)
    return word if record.extra_kl <= SMALL else f"{word}; {advice} it smaller"


def word_for(kl: float) -> str:
    """Return the word for a KL in nats per token."""
    return next((word for most, word in SCALE if kl <= most), "large")


def divergence(record: RunRecord) -> Iterator[str]:
    """Yield how far predictions are from the original's on the extra windows, on a scale in words, where that was measured."""
    if record.extra_kl is None:
        return
    head = " (with the original's head)" if any(record.recipe.scheme.ends) else ""
    where = f"{counted(record.extra_windows, 'extra window')}, {NOT_FITTED}"
    yield f"predictions{head}: KL {record.extra_kl:.3g} nats per token from the original's on {where}: {in_words(record)}"


def losses(record: RunRecord) -> Iterator[str]:
    """Yield what each layer lost by itself, and with the layers before it on the extra windows where there are some.

    The first is the same quantity for every run with extra windows, so that runs can be compared by it. On windows that were
    fitted, it looks better than it is. Losses against the original network include what the layers before lost.
    """
    if not record.measured:
        return
    on_extra = f"on {counted(record.extra_windows, 'extra window')}, {NOT_FITTED}"
    fitted = sum(layer.extra_own_loss is None for layer in record.measured)
    where = " on the calibration tokens" if record.tokens else ", as if its inputs were independent"
    where += ", as the text has no further windows" * bool(record.tokens and not record.extra_windows)
    if known := fitted < len(record.measured):
        where = f" {on_extra}" + f" (of {counted(fitted, 'layer')} on the calibration tokens)" * bool(fitted)
    own = sorted(((layer.own_loss, layer.name) for layer in record.measured), reverse=True)
    above = sum(loss > NOTABLE_LOSS for loss, _ in own)
    exceeding_it = f"{above or 'no'} {'layer loses' if above < 2 else 'layers lose'} more than {_percent(NOTABLE_LOSS)}"
    middle = _percent(own[len(own) // 2][0])
    yield f"share of its output that a layer loses by itself{where}: {middle} in the median layer; {exceeding_it}"
    yield "most is lost in " + ", ".join(f"{name} ({_percent(loss)})" for loss, name in own[:MAX_NAMED])
    against = sorted(layer.extra_relative_loss for layer in record.measured if layer.extra_relative_loss is not None)
    corrects = record.recipe.scheme.correct
    if against and (corrects or not known):  # else it is the same
        shares = f"{_percent(against[(len(against) - 1) // 2])} in the median layer, at most {_percent(against[-1])}"
        before = "with what the layers before it lost" if corrects else "the same"
        yield f"{before}{'' if known else f', {on_extra}'}: {shares}"
    pairs = [(layer.extra_nearest_loss, layer.extra_loss) for layer in record.measured]
    if not against:
        pairs = [(layer.nearest_loss, layer.loss) for layer in record.measured]
    better = sorted(nearest / loss for nearest, loss in pairs if nearest and loss)
    if record.tokens and better:
        times = better[len(better) // 2]
        yield f"rounding every weight to the nearest value of the same grids would lose {times:.1f} times as much (median layer)"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


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
    elif record.tokens < USEFUL_TOKENS_PER_INPUT * widest.in_features and widest.blended is None:
        enough = math.ceil(USEFUL_TOKENS_PER_INPUT * widest.in_features / record.seqlen)
        yield (
            f"few tokens: {record.tokens / widest.in_features:.2g} for each of the {widest.in_features:,} inputs of {widest.name}; "
            f"predictions get closer up to {USEFUL_TOKENS_PER_INPUT} and more, with --samples {enough} (windows of "
            f"{record.seqlen} tokens)"
        )


def overfitted(record: RunRecord) -> Iterator[str]:
    """Yield a line on layers that lose much, and many times as much on the extra windows as on what was fitted."""
    layers = [
        layer
        for layer in record.measured
        if record.tokens and layer.own_loss > max(OVERFITTED_LOSS, MANY_TIMES * layer.relative_loss)
    ]
    if not layers:
        return
    layers.sort(key=lambda layer: -layer.own_loss)
    named = [
        f"{layer.name} ({_percent(layer.own_loss)}, fitted {_percent(layer.relative_loss)})"
        for layer in layers[:MAX_NAMED]
    ]
    yield (
        f"{counted(len(layers), 'layer')} by {'itself' if len(layers) == 1 else 'themselves'} lost more than {MANY_TIMES} times as "
        f"much on the extra windows as on the tokens that were fitted: {', '.join(named)}; more --samples make that smaller"
    )


def degenerate(record: RunRecord) -> Iterator[str]:
    """Yield which layers are left out of all means, and why."""
    if names := [f"{layer.name} ({layer.degenerate})" for layer in record.layers if layer.degenerate]:
        of = f"{len(names):,} of {counted(len(record.layers), 'layer')}"
        yield f"degenerate, so that their losses tell nothing and are left out: {of}: {first_few(names)}"


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
