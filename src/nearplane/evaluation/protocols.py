"""Protocols of perplexity: which windows of a text are read, which tokens are scored, and what the sum is divided by.

    nearplane   windows that do not overlap, each beginning as the tokenizer begins a text; all tokens but the first of a
                window; per token
    papers      the same without the tokenizer's first token
    llama.cpp   windows of papers, each beginning with BOS if the model adds it; only the second half is scored; per token
    lm-eval     every document after a prefix token, each window with as much context as fits; per word and per byte

llama.cpp's own statistics count tokens as independent. They are given under its own names, and never mixed with ours.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nearplane.calibration.texts import Frame, frame_of, read_documents, read_windows
from nearplane.errors import CalibrationError, ModelError
from nearplane.evaluation.protocol_names import PLAIN_WINDOWS, Protocol
from nearplane.evaluation.statistics import TokenScores
from nearplane.models.pretrained import as_model_error, tokens_before

Text = str | Path | Sequence[str]  # see `read_windows`
NOT_SCORED = -1  # in targets
PAPERS_SEQLEN, LLAMA_CPP_SEQLEN, UNLIMITED_SEQLEN = 2048, 512, 2048  # default tokens per window
MIN_LLAMA_CPP_WINDOWS = 2  # llama-perplexity refuses a shorter text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """Windows of a text and the tokens that are scored.

    Args:
        tokens: (windows, seqlen) input of the networks: int64 token ids, perhaps with sound; or images.
        targets: (windows, seqlen) right token after each token, `NOT_SCORED` where none is scored. None for embeddings.
        words, bytes: Sizes of the documents, by which lm-eval divides; 0 for other protocols.
        documents: Number of documents; 0 for other protocols.
    """

    tokens: Tensor
    targets: Tensor | None = None
    words: int = 0
    bytes: int = 0
    documents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalFigures:
    """Perplexities as lm-eval calls them, of one network.

    Args:
        word_perplexity: exp(nll / words); words are what whitespace separates.
        byte_perplexity: exp(nll / bytes); bytes of the text in UTF-8.
        bits_per_byte: nll / bytes / ln 2.
    """

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppFigure:
    """A figure as `llama-perplexity` prints it.

    Args:
        name: Its name there.
        value: Its value, in percent where the name has a p.
        error: Its standard error, which counts tokens as independent; None where it prints none.
    """

    name: str
    value: float
    error: float | None = None


def next_tokens(tokens: Tensor) -> Tensor:
    """Return (windows, seqlen) targets: every next token; none after the last."""
    targets = torch.full(tokens.shape, NOT_SCORED, dtype=torch.int64)
    targets[:, :-1] = tokens[:, 1:]
    return targets


def default_seqlen(protocol: Protocol, positions: int | None) -> int:
    """Return the tokens per window of a model with so many positions; lm-eval uses all of them."""
    if protocol == "lm-eval":
        return positions or UNLIMITED_SEQLEN
    most = LLAMA_CPP_SEQLEN if protocol == "llama.cpp" else PAPERS_SEQLEN
    return min(most, positions or most)


def scored_text(
    protocol: Protocol,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    *,
    seqlen: int,
    samples: int | None,
    framed: bool = False,
) -> ScoredText:
    """Read the windows of a text by a protocol.

    Args:
        protocol: Protocol of the windows.
        tokenizer: Tokenizer of the model.
        text: A text, see `read_windows`.
        seqlen: Tokens per window.
        samples: Number of windows from the beginning, or for lm-eval of documents. None: all.
        framed: Whether windows begin and end with the special tokens of encoders.

    Raises:
        CalibrationError: The text is missing, malformed or too short.
    """
    samples = samples or sys.maxsize
    if protocol in PLAIN_WINDOWS:
        frame = frame_of(tokenizer, "none" if protocol == "papers" else "auto", encoder=framed)
        tokens = read_windows(tokenizer, text, samples=samples, seqlen=seqlen, frame=frame)
        return ScoredText(tokens=tokens, targets=next_tokens(tokens))
    read = _llama_cpp if protocol == "llama.cpp" else _lm_eval
    return read(tokenizer, text, seqlen, samples)


def _llama_cpp(tokenizer: PreTrainedTokenizerBase, text: Text, seqlen: int, samples: int) -> ScoredText:
    """Return windows as `llama-perplexity` cuts them.

    BOS stands before the text, and replaces the first token of every window. Of the tokens 0 to n - 1 of a window, those
    from n/2 + 1 are scored.
    """
    before = tokens_before(tokenizer)
    beginning = before[0] if before and before[0] == tokenizer.bos_token_id else None
    start = [] if beginning is None else [torch.tensor([beginning])]
    needed = min(samples, sys.maxsize // seqlen) * seqlen
    read = read_windows(tokenizer, text, samples=max(needed, 2 * seqlen), seqlen=1, frame=Frame())
    ids = torch.cat([*start, read[:, 0]])
    if len(ids) < MIN_LLAMA_CPP_WINDOWS * seqlen:
        raise CalibrationError(
            f"{_named(text)} has {len(ids)} tokens, but --protocol llama.cpp needs two windows of {seqlen}, as "
            f"llama-perplexity does. Pass a longer text, or use shorter windows with --seqlen."
        )
    tokens = ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)[:samples].clone()
    targets = next_tokens(tokens)
    targets[:, : seqlen // 2] = NOT_SCORED
    if beginning is not None:
        tokens[:, 0] = beginning
    return ScoredText(tokens=tokens, targets=targets)


def _lm_eval(tokenizer: PreTrainedTokenizerBase, text: Text, seqlen: int, samples: int) -> ScoredText:
    """Return windows as lm-eval's `loglikelihood_rolling` cuts them, padded at the end to equal length.

    The first window of a document begins with a prefix token, BOS or else EOS, from which its first token is predicted.
    Later windows begin with the last token of the window before; the last one has more context, if there is more.
    """
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if not isinstance(prefix, int):
        raise ModelError(
            "The tokenizer has neither BOS nor EOS, before which lm-eval sets every text. Use another --protocol."
        )
    windows: list[tuple[list[int], list[int]]] = []
    words = count = size = 0
    for document in islice(read_documents(tokenizer, text), samples):
        count, words, size = count + 1, words + len(re.split(r"\s+", document)), size + len(document.encode())
        special = {"add_special_tokens": False} if document.startswith(tokenizer.decode([prefix])) else {}
        with as_model_error("The model's tokenizer cannot tokenize the text (fetch the model again)"):
            ids = [prefix, *tokenizer(document, verbose=False, **special)["input_ids"]]
        for begin in range(0, len(ids) - 1, seqlen):
            end = min(begin + seqlen, len(ids) - 1)
            first = 0 if begin == 0 else end - seqlen
            windows.append((ids[first:end], [NOT_SCORED] * (begin - first) + ids[begin + 1 : end + 1]))
    if not windows:
        raise CalibrationError(f"{_named(text)} has no tokens. Pass a file with text.")
    longest = max(len(tokens) for tokens, _ in windows)
    return ScoredText(
        tokens=torch.tensor([tokens + [prefix] * (longest - len(tokens)) for tokens, _ in windows]),
        targets=torch.tensor([targets + [NOT_SCORED] * (longest - len(targets)) for _, targets in windows]),
        words=words,
        bytes=size,
        documents=count,
    )


def _named(text: Any) -> str:
    """Return the name of a text in a message."""
    return f"The list of {len(text)} texts" if isinstance(text, tuple | list) else str(text)


def lm_eval_figures(nll: Tensor, text: ScoredText) -> LmEvalFigures:
    """Return lm-eval's figures from the negative log-likelihoods of all scored tokens."""
    total = float(nll.sum())
    return LmEvalFigures(
        word_perplexity=float(np.exp(total / text.words)),
        byte_perplexity=float(np.exp(total / text.bytes)),
        bits_per_byte=total / text.bytes / math.log(2),
    )


def llama_cpp_figures(scores: TokenScores) -> tuple[LlamaCppFigure, ...]:
    """Return the figures that `llama-perplexity` prints, by its formulas and under its names.

    The error of a mean is sqrt((mean of squares - square of the mean) / (tokens - 1)).
    """
    nll, error = _mean_and_error(scores.nll)
    perplexity = math.exp(nll)
    if scores.original_nll is None or scores.kl is None or scores.same_top is None:
        return (LlamaCppFigure(name="PPL", value=perplexity, error=perplexity * error),)
    return tuple(_llama_cpp_comparison(scores, scores.original_nll, scores.kl, scores.same_top))


def _llama_cpp_comparison(scores: TokenScores, base: Tensor, kl: Tensor, same: Tensor) -> Iterator[LlamaCppFigure]:
    """Yield the figures of `llama-perplexity --kl-divergence`."""
    count = len(kl)
    (nll, error), (base_nll, base_error) = _mean_and_error(scores.nll), _mean_and_error(base)
    covariance = (float((scores.nll * base).mean()) - nll * base_nll) / max(1, count - 1)
    perplexity, base_perplexity = math.exp(nll), math.exp(base_nll)
    ratio_error = math.sqrt(max(0.0, error**2 + base_error**2 - 2 * covariance))
    difference_variance = (perplexity * error) ** 2 + (base_perplexity * base_error) ** 2
    difference_error = math.sqrt(max(0.0, difference_variance - 2 * perplexity * base_perplexity * covariance))
    ratio = math.exp(nll - base_nll)

    def figure(name: str, value: float, error: float | None = None) -> LlamaCppFigure:
        return LlamaCppFigure(name=name, value=value, error=error)

    yield figure("Mean PPL(Q)", perplexity, perplexity * error)
    yield figure("Mean PPL(base)", base_perplexity, base_perplexity * base_error)
    if error and base_error:
        yield figure("Cor(ln(PPL(Q)), ln(PPL(base)))", 100 * covariance / (error * base_error))
    yield figure("Mean ln(PPL(Q)/PPL(base))", nll - base_nll, ratio_error)
    yield figure("Mean PPL(Q)/PPL(base)", ratio, ratio * ratio_error)
    yield figure("Mean PPL(Q)-PPL(base)", perplexity - base_perplexity, difference_error)
    yield figure("Mean KLD", *_mean_and_error(kl))
    for name, share in KL_QUANTILES:
        yield figure(f"{name} KLD", float(np.quantile(kl.numpy(), share)))
    change = 100 * scores.probability_change
    yield figure("Mean Δp", *_mean_and_error(change))
    for name, share in CHANGE_QUANTILES:
        yield figure(f"{name} Δp", float(np.quantile(change.numpy(), share)))
    square, square_error = _mean_and_error(change.square())
    rms = math.sqrt(square)
    yield figure("RMS Δp", rms, 0.5 / rms * square_error if rms else 0.0)
    top = float(same.double().mean())
    yield figure("Same top p", 100 * top, 100 * math.sqrt(top * (1 - top) / max(1, count - 1)))


_TAILS = (("99.9%", 0.999), ("99.0%", 0.99), ("95.0%", 0.95), ("90.0%", 0.9))
_HEADS = (("10.0%", 0.1), ("5.0%", 0.05), ("1.0%", 0.01), ("0.1%", 0.001), ("Minimum", 0.0))
KL_QUANTILES = (("Maximum", 1.0), *_TAILS, ("Median", 0.5), *_HEADS)
CHANGE_QUANTILES = (("Maximum", 1.0), *_TAILS, ("75.0%", 0.75), ("Median", 0.5), ("25.0%", 0.25), *_HEADS)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values and its standard error, which counts them as independent."""
    mean = float(values.mean())
    variance = float(values.square().mean()) - mean**2
    return mean, math.sqrt(max(0.0, variance) / max(1, len(values) - 1))
