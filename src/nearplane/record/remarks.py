"""Sentences on what a user of a checkpoint should know before using it, for the summary and the HTML report. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from nearplane.errors import first_few
from nearplane.number_formats import TYPES
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.scheme import DEFAULT_GROUP_SIZES
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT, MIN_TOKENS_PER_INPUT
from nearplane.record.mix_summary import mix_sentences
from nearplane.record.record import RunRecord
from nearplane.record.words import (
    by_source,
    degenerate,
    exceeding,
    few_tokens,
    for_one_program,
    left,
    overfitted,
    rounded_inputs,
)
from nearplane.system.sizes import bytes_in, counted


def remarks(record: RunRecord) -> Iterator[str]:
    """Yield a sentence for everything that differs from the request, was left out, or matters before the checkpoint is used."""
    yield from unusual(record)
    yield from usual(record)


def unusual(record: RunRecord) -> Iterator[str]:
    """Yield sentences on what somebody should look at: what was missed, too little text, and layers that lose much."""
    if (sentence := missed(record)) is not None:
        yield sentence
    if record.layers:
        sentences = (few_tokens, overfitted, _short_text, _rare_experts, _dead_inputs, degenerate, exceeding)
        yield from chain.from_iterable(each(record) for each in sentences)


def usual(record: RunRecord) -> Iterator[str]:
    """Yield sentences on what is as it must be for such a model and format, but not as everybody expects."""
    if record.layers:
        sentences = (
            for_one_program,
            _types,
            _mix,
            _activations,
            _folds,
            _kv_cache,
            _smaller_groups,
            _wide_steps,
            by_source,
            _experts,
            _stored,
            left,
        )
        yield from chain.from_iterable(each(record) for each in sentences)


def missed(record: RunRecord) -> str | None:
    """Return a sentence if a requested rate or size is missed by more than 0.5 % (llama.cpp's types: 2 %), else None."""
    if record.recipe.scheme.asked is None:
        return None
    requested, unit = record.recipe.scheme.asked
    if unit != "bytes" and record.recipe.layers:  # the rate refers to layers without an override
        return None
    actual = record.folder if unit == "bytes" else record.rate
    coarse = record.recipe.files.block_types
    if abs(actual / requested - 1) <= (0.02 if coarse else 0.005):
        return None
    if coarse:
        why = "llama.cpp has no types in between, or the record took less space than was reserved"
    else:
        others = "" if record.recipe.max_loss is None else ", or needed more bits to keep --max-loss"
        why = f"some layers cannot reach their planned rate{others}"
    return f"{requested:,g} {unit} requested, {actual:,.6g} reached: {why}; see `nearplane inspect`."


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


def _mix(record: RunRecord) -> Iterator[str]:
    """Yield how the formats of layers were chosen, and how many layers got each."""
    if record.mix is None:
        return
    yield from mix_sentences(record.mix)
    counts = Counter(layer.format for layer in record.layers)
    yield ", ".join(f"{name} in {counted(count, 'layer')}" for name, count in counts.most_common())


def _folds(record: RunRecord) -> Iterator[str]:
    """Yield what scales of channels mean for whoever combines the weights with others."""
    if record.folds:
        exact = " but for rounding in float32" if any(each.offset for each in record.folds) else ""
        yield (
            f"{counted(len(record.folds), 'norm')} and the weights behind them carry channel scales, so that inputs "
            f"lose less when they are rounded. The network is the same{exact}; adapters made for the original do not fit"
        )


def _activations(record: RunRecord) -> Iterator[str]:
    """Yield a line if runtimes round the inputs of layers."""
    if rounded := " and ".join(f"of {layers} to {numbers}" for layers, numbers in rounded_inputs(record)):
        yield (
            f"runtimes round the inputs {rounded}, which loses more than the weights alone and which the "
            f"targets take into account; nearplane evaluate --activations measures both"
        )


def _kv_cache(record: RunRecord) -> Iterator[str]:
    """Yield a line if the files have scales of a server's cache."""
    if record.recipe.kv_cache != "none":
        yield (
            f"{len(record.cache_scales)} layers have scales of keys and values, by which vLLM keeps its cache in fp8; nearplane "
            f"evaluate --kv-cache fp8 measures what that loses"
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


def _short_text(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the calibration text has fewer windows than were asked for."""
    asked = record.recipe.calibration.samples
    if record.tokens and asked is not None and record.windows < asked:
        yield f"the calibration text has {counted(record.windows, 'window')} of {record.seqlen} tokens; {asked} were requested"


def _experts(record: RunRecord) -> Iterator[str]:
    """Yield how many calibration tokens were routed to experts, and how many of them count in corrections."""
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


def _rare_experts(record: RunRecord) -> Iterator[str]:
    """Yield what was done for experts that few tokens reached."""
    matrices = [layer for layer in record.layers if layer.blended is not None]
    experts = {layer.name.rpartition(".")[0]: layer for layer in matrices}  # one matrix of each
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


def _stored(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the original model is itself stored in few bits."""
    if record.stored:
        yield f"the original is stored in {record.stored}; losses are measured against its weights decoded to bfloat16"
