"""Scores of networks on the windows of a text, some positions at a time, and the floor of the original's own dtype."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearplane.errors import ModelError
from nearplane.evaluation.predictions import Network, Readout, batches_here, opened, predictions
from nearplane.evaluation.protocols import NOT_SCORED, ScoredText
from nearplane.evaluation.statistics import TokenScores, score_tokens
from nearplane.models.divergence import predicts_always_the_same
from nearplane.models.pretrained import as_model_error
from nearplane.system.device import Device
from nearplane.system.matmul_library import chosen_library
from nearplane.system.progress import Progress, shown
from nearplane.system.ranks import ONE_PROCESS, Ranks

# of one network that are computed at a time, whichever is more; blocks of 16 MB are slow
LOGITS, POSITIONS = 1 << 20, 64
FLOOR_TOKENS = 4096  # of the first text, on which the floor is measured
COMPARED_ROWS = 8  # of a part, whose predictions are compared with the first ones

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Divergence of the original in its own dtype from itself in float32; a server in that dtype adds as much by rounding.

    Args:
        dtype: The dtype in its config.json; for float32 the divergence is 0 and is not measured.
        windows, tokens: Number of windows, the first ones of the text, and of scored tokens in them.
        kl: Mean KL(float32 || own dtype) in nats per token.
        agreement: Share of tokens with the same most likely token.
    """

    dtype: str
    windows: int = 0
    tokens: int = 0
    kl: float = 0.0
    agreement: float = 1.0


@contextmanager
def running(
    networks: Sequence[Network], windows: Tensor, ranks: Ranks
) -> Iterator[Iterator[tuple[slice, list[Readout]]]]:
    """Run networks on a rank's windows without autograd; their errors become errors of the model."""
    first, seqlen = networks[0], windows.shape[1] if networks[0].outline.vocabulary else 1
    with (
        chosen_library(first.shapes(), windows.numel(), first.device),
        as_model_error(f"{first.outline.name} does not run on its windows of {seqlen} tokens"),
        torch.no_grad(),
    ):
        yield predictions(networks, windows, ranks)


def token_scores(
    batches: Iterable[tuple[slice, list[Readout]]],
    names: Sequence[str],
    scored: ScoredText,
    vocabulary: int,
    ranks: Ranks,
) -> tuple[TokenScores, tuple[str, ...]]:
    """Return the scores of all tokens that have a target, of all ranks, and remarks on degenerate networks.

    Raises:
        ModelError: The networks have different vocabularies, or a log-probability is not finite.
    """
    assert scored.targets is not None
    parts: list[TokenScores] = []
    first: list[Tensor] = []  # predictions of each network at its first scored token
    constant = [True for _ in names]
    for which, readouts in batches:
        targets = scored.targets[which]
        step = max(1, max(POSITIONS, LOGITS // vocabulary) // len(targets))
        for begin in range(0, targets.shape[1], step):
            part = targets[:, begin : begin + step]
            window, position = (part != NOT_SCORED).nonzero(as_tuple=True)
            if not len(window):
                continue
            logits = [read(begin, begin + part.shape[1])[window, position] for read in readouts]
            if len({each.shape for each in logits}) > 1:
                raise ModelError(
                    f"{names[1]} predicts {logits[1].shape[-1]} tokens, but {names[0]} {logits[0].shape[-1]}. Pass the original."
                )
            right = part[window, position].to(logits[0].device)
            tokens, predicted = score_tokens(logits, right, window=window + which.start, position=position + begin + 1)
            parts.append(tokens)
            first = first or [each[:1].cpu() for each in predicted]
            for number, each in enumerate(predicted):
                rows = torch.cat([first[number], each[:: -(-len(each) // COMPARED_ROWS)].cpu()])
                constant[number] &= predicts_always_the_same(rows)
    found = [each for each in ranks.gather((parts, first, constant)) if each[0]]  # a rank may have no windows
    scores = TokenScores.joined([part for of_rank, _, _ in found for part in of_rank])
    first = [torch.cat([rows[number] for _, rows, _ in found]) for number in range(len(names))]
    constant = [
        all(same[number] for _, _, same in found) and (len(rows) == 1 or predicts_always_the_same(rows))
        for number, rows in enumerate(first)
    ]
    losses = [float(each.mean()) for each in (scores.nll, scores.original_nll) if each is not None]
    if not math.isfinite(sum(losses)):
        raise ModelError(
            f"{names[0]} or its original predicts NaN or Inf. Check the files, or compute in a wider dtype."
        )
    constant = [same and len(scores.nll) > 1 for same in constant]
    return scores, tuple(_remarks(names, constant, losses, first[0].shape[-1]))


def _remarks(names: Sequence[str], constant: Sequence[bool], losses: Sequence[float], vocabulary: int) -> Iterator[str]:
    """Yield a sentence for each network that predicts the same for every token, or worse than a guess."""
    for name, same, nll in zip((names[0], "the original"), constant, losses, strict=False):
        if same:
            yield f"{name} predicts the same for every token; check its files"
        elif nll > math.log(vocabulary):
            yield f"{name} predicts worse than a guess among {vocabulary:,} tokens, whose perplexity is {vocabulary:,}"


def cosines(batches: Iterable[tuple[slice, list[Readout]]], names: Sequence[str], ranks: Ranks) -> Tensor:
    """Return (windows,) the cosine of the embeddings of two networks: the means of their last hidden states of a window.

    Raises:
        ModelError: The embeddings have different sizes, or are not finite.
    """
    parts: list[Tensor] = []
    for _, readouts in batches:
        embedding, expected = (read(0, sys.maxsize).float().mean(1) for read in readouts)
        if expected.shape != embedding.shape:
            raise ModelError(
                f"{names[1]} embeds to {tuple(expected.shape[1:])}, but {names[0]} to {tuple(embedding.shape[1:])}. Pass the "
                f"original."
            )
        parts.append(torch.nn.functional.cosine_similarity(expected.double(), embedding.double(), dim=-1).cpu())
        if not torch.isfinite(parts[-1]).all():
            raise ModelError("An embedding is NaN or Inf. Check the files, or compute in a wider dtype.")
    return torch.cat([part for of_rank in ranks.gather(parts) for part in of_rank])


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for products in bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def measured_floor(
    original: Network, scored: ScoredText, place: Device, trust: bool, progress: Progress
) -> Floor | None:
    """Measure the original in its own dtype against itself in float32, on the first windows of a text.

    Returns None for a model object, which runs in its own dtype anyway, and if the network does not run in that dtype.
    """
    outline = original.outline
    if outline.folder is None:
        return None
    dtype = outline.network.dtype
    if dtype == torch.float32:
        return Floor(dtype="float32")
    count = max(1, FLOOR_TOKENS // scored.tokens.shape[1])
    if place.on_cpu and dtype == torch.bfloat16 and not multiplies_bfloat16():
        log.info(
            "the floor is measured on one window, as this processor has no products in bfloat16 and is slow with them"
        )
        count = 1
    assert scored.targets is not None
    few = replace(scored, tokens=scored.tokens[:count], targets=scored.targets[:count])
    try:
        networks = [opened(outline, place, dtype=dtype, trust_remote_code=trust), original]
        ranks = ONE_PROCESS  # few windows: every rank runs all of them
        with running(networks, few.tokens, ranks) as batches:
            compared = shown(progress, batches, "measuring the floor", len(batches_here(networks, few.tokens, ranks)))
            scores, _ = token_scores(compared, [outline.name] * 2, few, outline.vocabulary, ranks)
    except ModelError as error:
        log.warning("The floor is not measured: %s", error)
        return None
    assert scores.kl is not None
    assert scores.same_top is not None
    return Floor(
        dtype=str(dtype).removeprefix("torch."),
        windows=len(few.tokens),
        tokens=len(scores.kl),
        kl=float(scores.kl.mean()),
        agreement=float(scores.same_top.double().mean()),
    )
