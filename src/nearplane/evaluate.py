"""evaluate(): perplexity of a model on a text, and its divergence from the original.

Reads every format that `quantize` writes with readers of our own, and any plain transformers folder. Everything is computed in
float32 on the decoded weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.divergence import Divergence, divergence
from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.formats.dense import dense_network
from nearplane.models.data import check_vocabulary, read_windows
from nearplane.models.stream import device_of, positions_of
from nearplane.pretrained import find_folder, tokenizer_of
from nearplane.progress import logged
from nearplane.recipe import Device

BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured.

    Args:
        perplexity: exp of the mean negative log-likelihood.
        nll: mean negative log-likelihood, nats per scored token.
        tokens: scored; the first token of a window is not.
        windows, seqlen: of the text.
        kl: mean KL(original || this) in nats per scored token; None without an original.
        agreement: fraction of scored tokens at which both hold the same token for the most likely; None likewise.
        original: perplexity of the original; None likewise.
    """

    perplexity: float
    nll: float
    tokens: int
    windows: int
    seqlen: int
    kl: float | None = None
    agreement: float | None = None
    original: float | None = None


def evaluate(
    model: str | Path,
    text: str | Path,
    *,
    seqlen: int | None = None,
    samples: int | None = None,
    against: str | Path | None = None,
    device: Device = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[Iterable[Any], str, int], Iterable[Any]] = lambda items, label, total: items,
) -> Evaluation:
    """Measure perplexity, and with `against` the divergence from the original.

    Args:
        model: a folder or hub id: any transformers checkpoint, or what `quantize` wrote.
        text: .txt, .jsonl or a folder of them, tokenized whole without special tokens, cut into windows that do not overlap.
        seqlen: tokens of a window; None: 2048, or the model's positions if fewer.
        samples: windows, the first ones of the text; None: all.
        against: the original.

    Raises:
        CalibrationError: the text is missing, empty or shorter than one window.
        ModelError, FormatError: a model cannot be read, or the two have different vocabularies.
    """
    place = device_of(device)
    if samples is not None and samples < 1:
        raise RecipeError(f"samples is {samples}; expected a positive number, or none for the whole text.")
    if seqlen is not None and seqlen < 2:
        raise RecipeError(f"seqlen is {seqlen}; expected at least 2: the first token of a window is not scored.")
    network, tokenizer = load_dense(model, place, trust_remote_code=trust_remote_code)
    original = None if against is None else load_dense(against, place, trust_remote_code=trust_remote_code)[0]
    positions = positions_of(network.config)
    if seqlen is not None and positions is not None and seqlen > positions:
        raise CalibrationError(
            f"--seqlen {seqlen} is more than the {positions} positions of the model; pass at most {positions}."
        )
    seqlen = seqlen or min(2048, positions or 2048)
    if seqlen < 2:
        raise ModelError(
            f"{model}: config.json gives the model {positions} position; nothing is predicted of one token."
        )
    windows = read_windows(tokenizer, text, samples=samples or sys.maxsize, seqlen=seqlen)
    check_vocabulary(windows, network.get_input_embeddings().weight.shape[0])
    batches = windows.split(max(1, BATCH_TOKENS // seqlen))
    nll, unquantized, apart = 0.0, 0.0, Divergence()
    for batch in progress(logged(batches, "evaluating", len(batches)), "evaluating", len(batches)):
        predicted = log_probabilities(network, batch.to(place))
        nll -= float(predicted.gather(-1, batch[:, 1:, None].to(place)).double().sum())
        if original is not None:
            expected = log_probabilities(original, batch.to(place))
            if expected.shape != predicted.shape:
                raise ModelError(
                    f"{against} predicts {expected.shape[-1]} tokens, {model} {predicted.shape[-1]}. Pass its original."
                )
            apart += divergence(expected, predicted)
            unquantized -= float(expected.gather(-1, batch[:, 1:, None].to(place)).double().sum())
    tokens = windows[:, 1:].numel()
    return Evaluation(
        perplexity=math.exp(nll / tokens), nll=nll / tokens, tokens=tokens, windows=len(windows), seqlen=seqlen,
        kl=apart.kl / tokens if against is not None else None,
        agreement=apart.agreed / tokens if against is not None else None,
        original=math.exp(unquantized / tokens) if against is not None else None,
    )  # fmt: skip


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return (windows, seqlen - 1, vocabulary) float32 log-probabilities of every next token of `tokens` (windows, seqlen)."""
    return model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)


def load_dense(
    source: str | Path, device: torch.device, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with every weight decoded, and its tokenizer."""
    folder = find_folder(str(source), trust_remote_code=trust_remote_code)
    model = dense_network(folder, trust_remote_code=trust_remote_code)
    return model.to(device), tokenizer_of(folder, trust_remote_code=trust_remote_code)
