"""evaluate(): perplexity of a model on a text and its divergence from the original; for encoders, similarity of embeddings.

It reads all formats that `quantize` writes with nearplane's own readers, and any transformers folder. Decoded weights are
used in float32; model objects run as they are.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import Given, refuse_tokenizer
from nearplane.calibration.texts import check_start, check_vocabulary
from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.loading.dense_network import dense_network
from nearplane.loading.source_folder import source_folder
from nearplane.models.kinds import InputKind, predicts_always_the_same
from nearplane.models.pretrained import as_model_error, tokenizer_of
from nearplane.system.arguments import checked
from nearplane.system.device import Device
from nearplane.system.matmul_library import chosen_library
from nearplane.system.progress import Progress, logged, silent
from nearplane.verbs.early_checks import Protocol, check_evaluate
from nearplane.verbs.evaluate_networks import Network, Outline, Readout, opened, predictions, windows_at_a_time
from nearplane.verbs.evaluate_protocols import (
    NOT_SCORED,
    LlamaCppFigure,
    LmEvalFigures,
    ScoredText,
    default_seqlen,
    llama_cpp_figures,
    lm_eval_figures,
    next_tokens,
    scored_text,
)
from nearplane.verbs.evaluate_statistics import Statistics, TokenScores, score_tokens, summarize

LOGITS = 1 << 22  # of one network that are computed at a time
FLOOR_TOKENS = 4096  # of the first text, on which the floor is measured
COMPARED_ROWS = 8  # of a part, whose predictions are compared with the first ones

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Divergence of the original in its own dtype from itself in float32: no checkpoint served in that dtype can be nearer.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of `evaluate`.

    Args:
        perplexity: exp(nll); None for a model without vocabulary head (an encoder).
        nll: Mean negative log-likelihood in nats per scored token; None likewise.
        tokens: Number of scored tokens, which excludes the first of each window; all tokens for encoders.
        windows, seqlen: Number of windows, and tokens per window (1 for images).
        kl: Mean KL(original || model) in nats per scored token; None without an original.
        agreement: Fraction of scored tokens for which both models have the same most likely token; None likewise.
        original: Perplexity of the original; None likewise.
        cosine: Encoders only: mean over windows of the cosine of both embeddings (means of the last hidden states).
        worst_cosine: Smallest of these cosines.
        remarks: Sentences about a network whose predictions are degenerate: worse than a guess, or always the same.
        text: Name of the text.
        protocol: Protocol of the windows, see `evaluate_protocols.py`.
        statistics: All statistics with their intervals; None for encoders.
        floor: The floor of the divergence; None unless asked for, and for model objects.
        llama_cpp: Figures of `llama-perplexity`, only by this protocol.
        lm_eval, lm_eval_original: Perplexities of lm-eval of the model and of the original, only by this protocol.
        words, bytes, documents: Of the text, by which lm-eval divides; 0 for other protocols.
    """

    perplexity: float | None = None
    nll: float | None = None
    tokens: int
    windows: int
    seqlen: int
    kl: float | None = None
    agreement: float | None = None
    original: float | None = None
    cosine: float | None = None
    worst_cosine: float | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)  # they name folders
    text: str = field(default="", compare=False)
    protocol: Protocol = "papers"
    statistics: Statistics | None = None
    floor: Floor | None = None
    llama_cpp: tuple[LlamaCppFigure, ...] = ()
    lm_eval: LmEvalFigures | None = None
    lm_eval_original: LmEvalFigures | None = None
    words: int = 0
    bytes: int = 0
    documents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Evaluation on one text, and the figures of its tokens; None for encoders."""

    evaluation: Evaluation
    scores: TokenScores | None = None


Text = str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor]


@checked("model", "text", "against")
def evaluate(
    model: str | Path | PreTrainedModel,
    text: str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    protocol: Protocol = "papers",
    seqlen: int | None = None,
    samples: int | None = None,
    against: str | Path | PreTrainedModel | None = None,
    floor: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Measure perplexity, and with `against` the divergence from the original.

    Encoders predict no tokens: they need `against`, and the embeddings of both models are compared.

    Args:
        model: Folder or hub id of a transformers checkpoint or of one that `quantize` wrote, or a .gguf file. Or a model
            object, which runs in its own dtype and on its own device.
        text: A .txt or .jsonl file or a folder of them, tokenized whole without special tokens and cut into windows
            that do not overlap. Or a list of texts, token ids (windows, seqlen), pixel values (images, channels, height,
            width), or sound with transcripts (input_features, token_ids). Windows of encoders begin and end with tokens
            such as [CLS] and [SEP]. Encoder-decoders predict their own input, or its transcript.
        tokenizer: Tokenizer of a model object; not needed for token ids.
        protocol: Windows and units of the perplexity; llama.cpp and lm-eval take texts only.
        seqlen: Tokens per window. None: 2048, or 512 for llama.cpp, or the model's positions if fewer or for lm-eval.
        samples: Number of windows, or for lm-eval of documents, from the beginning of the text. None: all.
        against: The original model.
        floor: Whether to measure the divergence of the original in its own dtype from itself in float32, too.

    Raises:
        CalibrationError: The text is missing, empty or shorter than one window.
        ModelError, FormatError: A model cannot be read, or the two have different vocabularies.
    """
    (measured,) = evaluate_texts(
        model,
        [text],
        tokenizer=tokenizer,
        protocol=protocol,
        seqlen=seqlen,
        samples=samples,
        against=against,
        floor=floor,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    return measured.evaluation


def evaluate_texts(
    model: str | Path | PreTrainedModel,
    texts: Sequence[Text],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    protocol: Protocol = "papers",
    seqlen: int | None = None,
    samples: int | None = None,
    against: str | Path | PreTrainedModel | None = None,
    floor: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> list[Measured]:
    """Evaluate a model on several texts, each by itself; the models are read once. See `evaluate`."""
    check_evaluate(model, texts, against=against, seqlen=seqlen, samples=samples, protocol=protocol)
    given = [Given.of(text, "text") for text in texts]
    refuse_tokenizer(model, tokenizer)
    place = Device.named(device)
    outlines = [Outline.of(each, trust_remote_code=trust_remote_code) for each in (model, against) if each is not None]
    for each in given:
        _check_taken(outlines, InputKind.TEXT if each is None else each.kind, protocol)
    outline = outlines[0]
    if outline.folder is not None and any(each is None or each.tokens is None for each in given):
        tokenizer = tokenizer_of(outline.folder, trust_remote_code=trust_remote_code)
    scored = [
        _scored(outline, tokenizer, protocol, text, each, samples, seqlen)
        for text, each in zip(texts, given, strict=True)
    ]
    networks = [opened(each, place, trust_remote_code=trust_remote_code) for each in outlines]
    lowest = None
    if floor and against is not None and not outline.embeds:
        lowest = _floor(networks[1], scored[0], place, trust_remote_code, progress)
    return [
        _measured(networks, part, _name(text), protocol, lowest, progress)
        for text, part in zip(texts, scored, strict=True)
    ]


def _name(text: Text) -> str:
    """Return the name of a text in the output."""
    return str(text) if isinstance(text, str | Path) else "given in Python"


def _check_taken(outlines: Sequence[Outline], input_kind: InputKind, protocol: Protocol) -> None:
    """Refuse networks with another kind of input or that a protocol does not suit, and an encoder without its original.

    Raises:
        CalibrationError: A network takes another kind of input than was given.
        RecipeError: An encoder has no original to compare with, or the protocol is for decoders.
    """
    for outline in outlines:
        if outline.takes is not input_kind:
            advice = "Pass text" if outline.takes is InputKind.TEXT else f"Pass {outline.takes} from Python"
            raise CalibrationError(f"{outline.name} takes {outline.takes}; the input is {input_kind}. {advice}.")
    first = outlines[0]
    if first.embeds and len(outlines) == 1:
        raise RecipeError(
            f"{first.name} has no vocabulary head and predicts no tokens. Pass the original with against (--against), to compare "
            f"the embeddings of both."
        )
    if protocol != "papers" and (first.framed or input_kind is not InputKind.TEXT):
        raise RecipeError(
            f"--protocol {protocol} is for language models that continue a text, which {first.name} does not. Leave it out."
        )


def _scored(
    outline: Outline,
    tokenizer: PreTrainedTokenizerBase | None,
    protocol: Protocol,
    text: Any,
    given: Given | None,
    samples: int | None,
    seqlen: int | None,
) -> ScoredText:
    """Return the windows of a text and what is scored of them."""
    positions, tokens = outline.positions, None if given is None else given.tokens
    if tokens is not None:
        if protocol != "papers":
            raise RecipeError(
                f"--protocol {protocol} cuts windows of a text itself, but token ids are given. Pass a text."
            )
        if seqlen not in (None, tokens.shape[1]):
            raise RecipeError(f"seqlen is {seqlen}, but the windows have {tokens.shape[1]} tokens. Leave out seqlen.")
        seqlen = tokens.shape[1]
    if seqlen is not None and positions is not None and seqlen > positions:
        raise CalibrationError(f"seqlen {seqlen} is more than the model's maximum length of {positions} tokens.")
    if tokens is not None:
        scored = ScoredText(
            tokens=tokens[:samples], targets=next_tokens(tokens[:samples]) if outline.vocabulary else None
        )
    else:
        seqlen = seqlen or default_seqlen(protocol, positions)
        if seqlen < 2:
            raise ModelError(
                f"The model's maximum length is {positions} token; expected at least 2. Check config.json."
            )
        if tokenizer is None:
            raise RecipeError(
                "A model object has no tokenizer: pass tokenizer=, or token ids (windows, seqlen) as text."
            )
        source = text if given is None or given.texts is None else given.texts
        scored = scored_text(protocol, tokenizer, source, seqlen=seqlen, samples=samples, framed=outline.framed)
    if outline.vocabulary:
        check_vocabulary(scored.tokens, outline.vocabulary)
        check_start(scored.tokens, outline.start, outline.name)
    return scored


def _measured(
    networks: Sequence[Network],
    scored: ScoredText,
    name: str,
    protocol: Protocol,
    floor: Floor | None,
    progress: Progress,
) -> Measured:
    """Return the evaluation on one text, and the scores of its tokens."""
    names, windows = [network.outline.name for network in networks], len(scored.tokens)
    seqlen = scored.tokens.shape[1] if networks[0].outline.vocabulary else 1
    with _running(networks, scored.tokens) as batches:
        total = -(-windows // windows_at_a_time(networks, scored.tokens))
        compared = progress(logged(batches, "evaluating", total), "evaluating", total)
        if networks[0].outline.embeds:
            return Measured(evaluation=_of_embeddings(compared, names, windows, seqlen, name))
        scores, remarks = _of_predictions(compared, names, scored, networks[0].outline.vocabulary)
    statistics = summarize(scores)
    base = scores.original_nll
    by_words = protocol == "lm-eval"
    return Measured(
        evaluation=Evaluation(
            perplexity=statistics.perplexity.value,
            nll=float(scores.nll.mean()),
            tokens=len(scores.nll),
            windows=windows,
            seqlen=seqlen,
            kl=None if statistics.kl is None else statistics.kl.value,
            agreement=None if statistics.same_top is None else statistics.same_top.value,
            original=None if statistics.original_perplexity is None else statistics.original_perplexity.value,
            remarks=remarks,
            text=name,
            protocol=protocol,
            statistics=statistics,
            floor=floor,
            llama_cpp=llama_cpp_figures(scores) if protocol == "llama.cpp" else (),
            lm_eval=lm_eval_figures(scores.nll, scored) if by_words else None,
            lm_eval_original=lm_eval_figures(base, scored) if by_words and base is not None else None,
            words=scored.words,
            bytes=scored.bytes,
            documents=scored.documents,
        ),
        scores=scores,
    )


@contextmanager
def _running(networks: Sequence[Network], windows: Tensor) -> Iterator[Iterator[tuple[slice, list[Readout]]]]:
    """Run networks on windows without autograd; their errors become errors of the model."""
    first, seqlen = networks[0], windows.shape[1] if networks[0].outline.vocabulary else 1
    with (
        chosen_library(first.shapes(), windows.numel(), Device(first.device)),
        as_model_error(f"{first.outline.name} does not run on its windows of {seqlen} tokens"),
        torch.no_grad(),
    ):
        yield predictions(networks, windows)


def _of_predictions(
    batches: Iterable[tuple[slice, list[Readout]]], names: Sequence[str], scored: ScoredText, vocabulary: int
) -> tuple[TokenScores, tuple[str, ...]]:
    """Return the scores of all tokens that have a target, and remarks on degenerate networks.

    Raises:
        ModelError: The networks have different vocabularies, or a log-probability is not finite.
    """
    assert scored.targets is not None
    parts: list[TokenScores] = []
    first: list[Tensor] = []  # predictions of each network at its first scored token
    constant = [True for _ in names]
    for which, readouts in batches:
        targets = scored.targets[which]
        step = max(1, LOGITS // (len(targets) * vocabulary))
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
            first = first or [each[:1].clone() for each in predicted]
            for number, each in enumerate(predicted):
                rows = torch.cat([first[number], each[:: -(-len(each) // COMPARED_ROWS)]])
                constant[number] &= predicts_always_the_same(rows)
    scores = TokenScores.joined(parts)
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


def _of_embeddings(
    batches: Iterable[tuple[slice, list[Readout]]], names: Sequence[str], windows: int, seqlen: int, text: str
) -> Evaluation:
    """Return the similarity of the embeddings of two networks: the means of their last hidden states of a window.

    Raises:
        ModelError: The embeddings have different sizes, or are not finite.
    """
    cosines: list[Tensor] = []
    for _, readouts in batches:
        embedding, expected = (read(0, sys.maxsize).float().mean(1) for read in readouts)
        if expected.shape != embedding.shape:
            raise ModelError(
                f"{names[1]} embeds to {tuple(expected.shape[1:])}, but {names[0]} to {tuple(embedding.shape[1:])}. Pass the "
                f"original."
            )
        cosines.append(torch.nn.functional.cosine_similarity(expected.double(), embedding.double(), dim=-1).cpu())
        if not torch.isfinite(cosines[-1]).all():
            raise ModelError("An embedding is NaN or Inf. Check the files, or compute in a wider dtype.")
    similarities = torch.cat(cosines)
    return Evaluation(
        tokens=seqlen * windows,
        windows=windows,
        seqlen=seqlen,
        cosine=float(similarities.mean()),
        worst_cosine=float(similarities.min()),
        text=text,
    )


def _floor(original: Network, scored: ScoredText, place: Device, trust: bool, progress: Progress) -> Floor | None:
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
    assert scored.targets is not None
    few = replace(scored, tokens=scored.tokens[:count], targets=scored.targets[:count])
    try:
        networks = [opened(outline, place, dtype=dtype, trust_remote_code=trust), original]
        with _running(networks, few.tokens) as batches:
            total = -(-len(few.tokens) // windows_at_a_time(networks, few.tokens))
            compared = progress(batches, "measuring the floor", total)
            scores, _ = _of_predictions(compared, [outline.name] * 2, few, outline.vocabulary)
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


def load_dense(
    source: str | Path, device: torch.device, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with every weight decoded, and its tokenizer."""
    folder = source_folder(source, trust_remote_code=trust_remote_code)
    model = dense_network(folder, trust_remote_code=trust_remote_code).to(device)
    return model, tokenizer_of(folder, trust_remote_code=trust_remote_code)
