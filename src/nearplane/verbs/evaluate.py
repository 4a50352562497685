"""evaluate(): perplexity of a model on a text, and its divergence from the original; of encoders, how alike embeddings are.

Reads every format that `quantize` writes with readers of our own, and any plain transformers folder. Everything is computed in
float32 on the decoded weights, but model objects as they are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import Given, called, refuse_tokenizer
from nearplane.calibration.texts import around, check_start, check_vocabulary, read_windows
from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.loading.dense_network import dense_network
from nearplane.models.kinds import Divergence, Taken, divergence
from nearplane.models.pretrained import find_folder, in_a_sentence, tokenizer_of
from nearplane.system.device import Device
from nearplane.system.matmul_library import fastest
from nearplane.system.progress import Progress, logged, silent
from nearplane.verbs.evaluate_networks import Network, opened, predictions, windows_at_a_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured.

    Args:
        perplexity: exp of the mean negative log-likelihood; None where there is no head (encoders).
        nll: mean negative log-likelihood, nats per scored token; None likewise.
        tokens: scored, without the first of a window; of encoders all.
        windows, seqlen: of the text; images are windows of one.
        kl: mean KL(original || this) in nats per scored token; None without an original.
        agreement: fraction of scored tokens at which both hold the same token for the most likely; None likewise.
        original: perplexity of the original; None likewise.
        cosine: of encoders, mean over windows of the cosine between both embeddings, the means of the last hidden states.
        worst_cosine: the least of all windows.
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


def evaluate(
    model: str | Path | PreTrainedModel,
    text: str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seqlen: int | None = None,
    samples: int | None = None,
    against: str | Path | PreTrainedModel | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Measure perplexity, and with `against` the divergence from the original.

    Encoders predict nothing: of these `against` is needed, and the embeddings of both are compared.

    Args:
        model: a folder or hub id: any transformers checkpoint, or what `quantize` wrote. Or a model object, which is run as it is:
            in its dtype, on its device.
        text: .txt, .jsonl or a folder of them, tokenized whole without special tokens, cut into windows that do not overlap. Or a
            list of texts, token ids (windows, seqlen), pixel values (images, channels, height, width), or sound with what is said
            in it (input_features, token_ids). Of encoders windows begin and end with [CLS] and [SEP], or their like. Decoders
            behind an encoder predict the window that it is given, or what is said in it.
        tokenizer: of a model object; tokens need none.
        seqlen: tokens of a window; None: 2048, or the model's positions if fewer.
        samples: windows, the first ones of the text; None: all.
        against: the original.

    Raises:
        CalibrationError: the text is missing, empty or shorter than one window.
        ModelError, FormatError: a model cannot be read, or the two have different vocabularies.
    """
    if samples is not None and samples < 1:
        raise RecipeError(f"samples is {samples}; expected a positive number, or none for the whole text.")
    if seqlen is not None and seqlen < 2:
        raise RecipeError(f"seqlen is {seqlen}; expected at least 2: the first token of a window is not scored.")
    given = Given.of(text, "text")
    refuse_tokenizer(model, tokenizer)
    sources = (model,) if against is None else (model, against)
    place = Device.named(device)
    networks = [opened(each, place, trust_remote_code=trust_remote_code) for each in sources]
    network, names = networks[0], [called(each) for each in sources]
    _check_taken(networks, names, Taken.TEXT if given is None else given.kind)
    if network.folder is not None and (given is None or given.tokens is None):
        tokenizer = tokenizer_of(network.folder, trust_remote_code=trust_remote_code)
    windows = _windows(network, tokenizer, text, given, samples, seqlen)
    seqlen = windows.shape[1] if network.vocabulary else 1
    if network.vocabulary:
        check_vocabulary(windows, network.vocabulary)
        check_start(windows, network.start, names[0])
    total = -(-len(windows) // windows_at_a_time(networks, windows))
    with (
        fastest(network.shapes(), windows.numel(), Device(network.device)),
        in_a_sentence(f"{names[0]} does not run on its windows of {seqlen} tokens"),
    ):
        compared = progress(logged(predictions(networks, windows), "evaluating", total), "evaluating", total)
        measure = _of_embeddings if network.embeds else _of_predictions
        return measure(compared, names, len(windows), seqlen)


def _check_taken(networks: Sequence[Network], names: Sequence[str], found: Taken) -> None:
    """Refuse networks that take something else than was given, and one alone that predicts nothing.

    Raises:
        CalibrationError: the first.
        RecipeError: the second.
    """
    for network, name in zip(networks, names, strict=True):
        if network.takes is not found:
            way = "Pass text" if network.takes is Taken.TEXT else f"Pass {network.takes} from Python"
            raise CalibrationError(f"{name} takes {network.takes}; what was given is {found}. {way}.")
    if networks[0].embeds and len(networks) == 1:
        raise RecipeError(
            f"{names[0]} has no vocabulary head and predicts no tokens. Pass its original as against (--against): the embeddings "
            f"of both are compared."
        )


def _of_predictions(
    compared: Iterable[tuple[Tensor, ...]], names: Sequence[str], windows: int, seqlen: int
) -> Evaluation:
    """Return what is measured of windows (windows, seqlen), each with the log-probabilities (windows, seqlen - 1, vocabulary)
    of one or two networks.

    Raises:
        ModelError: they have different vocabularies, or are not finite.
    """
    nll, original, apart, tokens = 0.0, 0.0, Divergence(), 0
    for batch, found, *others in compared:
        wanted = batch[:, 1:, None].to(found.device)
        tokens += wanted.numel()
        nll -= float(found.gather(-1, wanted).double().sum())
        for expected in others:
            if expected.shape != found.shape:
                raise ModelError(
                    f"{names[1]} predicts {expected.shape[-1]} tokens, {names[0]} {found.shape[-1]}. Pass its original."
                )
            apart += divergence(expected, found)
            original -= float(expected.gather(-1, wanted).double().sum())
    if not math.isfinite(nll + original):
        raise ModelError(
            f"{names[0]} or its original predicts NaN or Inf. Check its files, or compute in a wider dtype."
        )
    alone = Evaluation(perplexity=_exp(nll / tokens), nll=nll / tokens, tokens=tokens, windows=windows, seqlen=seqlen)
    if len(names) == 1:
        return alone
    return replace(alone, kl=apart.kl / tokens, agreement=apart.agreed / tokens, original=_exp(original / tokens))


def _of_embeddings(
    compared: Iterable[tuple[Tensor, ...]], names: Sequence[str], windows: int, seqlen: int
) -> Evaluation:
    """Return how alike the embeddings (windows, hidden) of two networks are.

    Raises:
        ModelError: they are not of one size, or not finite.
    """
    cosines: list[Tensor] = []
    for _, found, expected in compared:
        if expected.shape != found.shape:
            raise ModelError(
                f"{names[1]} gives {tuple(expected.shape[1:])} where {tuple(found.shape[1:])} is compared. Pass its original."
            )
        cosines.append(torch.nn.functional.cosine_similarity(expected.double(), found.double(), dim=-1).cpu())
        if not torch.isfinite(cosines[-1]).all():
            raise ModelError("An embedding is NaN or Inf. Check the files, or compute in a wider dtype.")
    alike = torch.cat(cosines)
    return Evaluation(
        tokens=seqlen * windows,
        windows=windows,
        seqlen=seqlen,
        cosine=float(alike.mean()),
        worst_cosine=float(alike.min()),
    )


def _windows(
    network: Network,
    tokenizer: PreTrainedTokenizerBase | None,
    text: Any,
    given: Given | None,
    samples: int | None,
    seqlen: int | None,
) -> Tensor:
    """Return the windows (windows, seqlen) to measure on."""
    positions, tokens = network.positions, None if given is None else given.tokens
    if tokens is not None:
        if seqlen not in (None, tokens.shape[1]):
            raise RecipeError(f"seqlen is {seqlen}, the windows of text have {tokens.shape[1]} tokens; leave it out.")
        seqlen = tokens.shape[1]
    if seqlen is not None and positions is not None and seqlen > positions:
        raise CalibrationError(
            f"--seqlen {seqlen} is more than the {positions} positions of the model; pass at most {positions}."
        )
    if tokens is not None:
        return tokens[:samples]
    seqlen = seqlen or min(2048, positions or 2048)
    if seqlen < 2:
        raise ModelError(f"config.json gives the model {positions} position; of one token nothing is predicted.")
    if tokenizer is None:
        raise RecipeError(
            "A model object comes without tokenizer: pass tokenizer=, or token ids (windows, seqlen) as text."
        )
    return read_windows(
        tokenizer,
        text if given is None else given.texts,
        samples=samples or sys.maxsize,
        seqlen=seqlen,
        between=around(tokenizer) if network.framed else (),
    )


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def load_dense(
    source: str | Path, device: torch.device, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with every weight decoded, and its tokenizer."""
    folder = find_folder(str(source), trust_remote_code=trust_remote_code)
    model = dense_network(folder, trust_remote_code=trust_remote_code).to(device)
    return model, tokenizer_of(folder, trust_remote_code=trust_remote_code)
