"""Sentences about a record that the summary and the HTML page share. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from nearplane.errors import first_few
from nearplane.lattice.number_formats import TYPES
from nearplane.recipe.scheme import FITTING
from nearplane.recipe.schemes import BlockScheme
from nearplane.recipe.sizes import bytes_in, counted
from nearplane.record.record import RunRecord

UNSEEN = "to which nothing was fitted"  # windows of the text besides those of calibration
LEAST, ADVISED = 1, 4  # calibration tokens for each input of the widest layer: below the first a run is refused


def calibrated(record: RunRecord) -> str:
    """Return what the run was calibrated on."""
    if not record.tokens:
        return "without calibration: every loss is that of independent inputs"
    more = f", measured on {counted(record.extra_windows, 'window')} more" if record.extra_windows else ""
    return f"calibrated on {record.tokens:,} tokens ({counted(record.windows, 'window')} of {record.seqlen}){more}"


def remarks(record: RunRecord) -> Iterator[str]:
    """Yield a sentence for everything that went otherwise than asked, was left out, or is to be known before use."""
    if record.missed is not None:
        yield record.missed
    if not record.layers:
        return
    sentences = (
        _types,
        _smaller_groups,
        _wide_steps,
        _short_text,
        _few_tokens,
        _experts,
        _dead_inputs,
        _stored,
        left,
        exceeding,
    )
    yield from chain.from_iterable(each(record) for each in sentences)


def _short_text(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the text gave fewer windows than were asked for."""
    asked = record.recipe.calibration.samples
    if record.tokens and record.windows < asked:
        yield f"the calibration text holds {counted(record.windows, 'window')} of {record.seqlen} tokens, {asked} were asked for"


def shortage(windows: int, seqlen: int, samples: int, widest: str, inputs: int) -> str | None:
    """Return a sentence if there are fewer tokens than advised, else None.

    A Hessian of fewer tokens than inputs has directions of length 0, in which any error looks free; with a few more tokens than
    inputs the losses on the tokens that were fitted are still far below those on other text.

    Args:
        windows, seqlen: those that are fitted, and tokens of each.
        samples: windows that were asked for.
        widest: name of the layer with most inputs.
        inputs: of that layer.
    """
    tokens = windows * seqlen
    if tokens >= ADVISED * inputs:
        return None
    wanted = math.ceil(ADVISED * inputs / seqlen)
    least = f"at least {LEAST} is needed, {ADVISED} or more are advised"
    short = f" The text holds no more than {windows} windows to fit: pass a longer one." if windows < samples else ""
    return (
        f"{tokens:,} calibration tokens are {tokens / inputs:.2g} for each of the {inputs:,} inputs of {widest}; {least}. "
        f"Ask for --samples {wanted} or more (windows of {seqlen} tokens).{short}"
    )


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
        yield f"no token reached {first_few(never)}: more of such text may not help"


def _dead_inputs(record: RunRecord) -> Iterator[str]:
    """Yield sentences about inputs that were 0 for every calibration token, with the layers they are of.

    Where a row of a layer was rounded to 0 as a whole, as may be of up and gate at few bits, an input of the layer behind became 0.
    """
    known = [(layer, layer.pruned) for layer in record.layers if layer.pruned is not None]
    original = [(layer, layer.dead - count) for layer, count in known]
    unknown = [(layer, layer.dead) for layer in record.layers if layer.pruned is None]
    for counts, what in (
        (known, "neurons were pruned: quantization made these inputs 0 for every calibration token, and"),
        (original, "inputs were 0 for every calibration token, in the original network too;"),
        (unknown, "inputs were 0 for every calibration token;"),
    ):
        if names := [f"{layer.name} ({count} of {layer.in_features})" for layer, count in counts if count]:
            yield f"{sum(count for _, count in counts):,} {what} their weights are 0 now: {first_few(names)}"


def _stored(record: RunRecord) -> Iterator[str]:
    """Yield a sentence if the original has its weights in few bits."""
    if record.stored:
        yield f"the original is stored in {record.stored}; losses are measured against its weights decoded to bfloat16"


def left(record: RunRecord) -> Iterator[str]:
    """Yield what was left as it is, in one sentence what differs by numbers alone."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in record.skipped:
        alike.setdefault((re.sub(r"\d+", "*", name), reason), []).append(name)
    for (pattern, reason), names in alike.items():
        if len(names) == 1:
            yield f"left as it is: {names[0]} ({reason})"
        else:
            yield f"left as they are: {pattern}, {len(names):,} of them ({reason})"
    if record.recipe.ignore:
        how = ", those in F32 as F16, as llama.cpp has them" if record.recipe.files.for_llama_cpp else ""
        yield f"left as they are{how}: all layers that --ignore {' '.join(record.recipe.ignore)} names"


def exceeding(record: RunRecord) -> Iterator[str]:
    """Yield a sentence about the layers that lose more than was asked for."""
    if layers := record.exceeding:
        names = [f"{each.name} ({each.relative_loss:.3e} at {each.rate:.3f} bits per weight)" for each in layers]
        yield f"more is lost than --max-loss {record.recipe.max_loss:g} in {counted(len(names), 'layer')}: {first_few(names)}"


def _types(record: RunRecord) -> Iterator[str]:
    """Yield which types of llama.cpp's blocks layers have, where they are not all as asked for."""
    scheme = record.recipe.scheme
    if not isinstance(scheme, BlockScheme):
        return
    found = Counter(layer.format for layer in record.layers)
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
    format = layer.number_format
    if not record.recipe.files.steps_of_model:
        return
    words = -(-layer.in_features * format.bits // 32)  # of codes, a row
    steps = layer.out_features * format.groups(layer.in_features)
    if layer.bytes - 4 * words * layer.out_features >= 4 * steps:
        yield (
            "each step takes 32 bits, as the model is in float32 and readers of compressed-tensors want steps in its dtype: 16 "
            "in --format gptq, or of the model in bfloat16"
        )


def _smaller_groups(record: RunRecord) -> Iterator[str]:
    """Yield a line if no one gave a group size and the default does not divide the inputs."""
    size = record.layers[0].number_format.group
    if getattr(record.recipe.scheme, "group_size", None) != "auto" or size == FITTING[0]:
        return
    narrow = next((x for x in record.layers if x.in_features % (2 * size if size else FITTING[-1])), None)
    if narrow is None:  # else it is why they are not larger
        return
    if size is None:
        yield (
            f"one step a row: no group of {FITTING[-1]} or more divides the {narrow.in_features} inputs of {narrow.name}; a "
            f"smaller --group-size loses less and takes more bits"
        )
    else:
        yield f"groups of {size}: the default, {FITTING[0]}, does not divide the {narrow.in_features} inputs of {narrow.name}"
