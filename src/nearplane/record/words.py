"""Sentences about the text and the losses of a run, for summary, report and model card. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from nearplane.errors import first_few
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT, MIN_TOKENS_PER_INPUT
from nearplane.record.record import RunRecord
from nearplane.system.sizes import counted

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
