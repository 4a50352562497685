"""evaluate(): perplexity of a model on a text and its divergence from the original; for encoders, similarity of embeddings.

It reads all formats that `quantize` writes with nearplane's own readers, and any transformers folder. Decoded weights are
used in float32; model objects run as they are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import Given, model_label, refuse_tokenizer
from nearplane.calibration.texts import check_start, check_vocabulary, framing_tokens, read_windows
from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.loading.dense_network import dense_network
from nearplane.loading.source_folder import source_folder
from nearplane.models.kinds import Divergence, InputKind, divergence, predicts_always_the_same
from nearplane.models.pretrained import as_model_error, tokenizer_of
from nearplane.system.arguments import checked
from nearplane.system.device import Device
from nearplane.system.matmul_library import chosen_library
from nearplane.system.progress import Progress, logged, silent
from nearplane.verbs.early_checks import check_evaluate
from nearplane.verbs.evaluate_networks import Network, opened, predictions, windows_at_a_time


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


@checked("model", "text", "against")
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

    Encoders predict no tokens: they need `against`, and the embeddings of both models are compared.

    Args:
        model: Folder or hub id of a transformers checkpoint or of one that `quantize` wrote, or a .gguf file. Or a model
            object, which runs in its own dtype and on its own device.
        text: A .txt or .jsonl file or a folder of them, tokenized whole without special tokens and cut into windows
            that do not overlap. Or a list of texts, token ids (windows, seqlen), pixel values (images, channels, height,
            width), or sound with transcripts (input_features, token_ids). Windows of encoders begin and end with tokens
            such as [CLS] and [SEP]. Encoder-decoders predict their own input, or its transcript.
        tokenizer: Tokenizer of a model object; not needed for token ids.
        seqlen: Tokens per window. None: 2048, or the model's positions if fewer.
        samples: Number of windows, from the beginning of the text. None: all.
        against: The original model.

    Raises:
        CalibrationError: The text is missing, empty or shorter than one window.
        ModelError, FormatError: A model cannot be read, or the two have different vocabularies.
    """
    check_evaluate(model, text, against=against, seqlen=seqlen, samples=samples)
    given = Given.of(text, "text")
    refuse_tokenizer(model, tokenizer)
    sources = (model,) if against is None else (model, against)
    names, place = [model_label(each) for each in sources], Device.named(device)
    networks = [opened(each, place, trust_remote_code=trust_remote_code) for each in sources]
    network = networks[0]
    _check_taken(networks, names, InputKind.TEXT if given is None else given.kind)
    if network.folder is not None and (given is None or given.tokens is None):
        tokenizer = tokenizer_of(network.folder, trust_remote_code=trust_remote_code)
    windows = _windows(network, tokenizer, text, given, samples, seqlen)
    seqlen = windows.shape[1] if network.vocabulary else 1
    if network.vocabulary:
        check_vocabulary(windows, network.vocabulary)
        check_start(windows, network.start, names[0])
    total = -(-len(windows) // windows_at_a_time(networks, windows))
    with (
        chosen_library(network.shapes(), windows.numel(), Device(network.device)),
        as_model_error(f"{names[0]} does not run on its windows of {seqlen} tokens"),
    ):
        compared = progress(logged(predictions(networks, windows), "evaluating", total), "evaluating", total)
        measure = _of_embeddings if network.embeds else _of_predictions
        return measure(compared, names, len(windows), seqlen)


def _check_taken(networks: Sequence[Network], names: Sequence[str], input_kind: InputKind) -> None:
    """Refuse networks with another kind of input, and an encoder without its original.

    Raises:
        CalibrationError: A network takes another kind of input than was given.
        RecipeError: An encoder has no original to compare with.
    """
    for network, name in zip(networks, names, strict=True):
        if network.takes is not input_kind:
            advice = "Pass text" if network.takes is InputKind.TEXT else f"Pass {network.takes} from Python"
            raise CalibrationError(f"{name} takes {network.takes}; the input is {input_kind}. {advice}.")
    if networks[0].embeds and len(networks) == 1:
        raise RecipeError(
            f"{names[0]} has no vocabulary head and predicts no tokens. Pass the original with against (--against), to compare "
            f"the embeddings of both."
        )


def _of_predictions(
    compared: Iterable[tuple[Tensor, ...]], names: Sequence[str], windows: int, seqlen: int
) -> Evaluation:
    """Return the scores of batches of windows (windows, seqlen), each with log-probabilities (windows, seqlen - 1,
    vocabulary) of one or two networks.

    Raises:
        ModelError: The networks have different vocabularies, or a log-probability is not finite.
    """
    nll, dense_nll, distance, tokens = 0.0, 0.0, Divergence(), 0
    constant = [True for _ in names]
    for batch, predicted, *others in compared:
        for number, each in enumerate((predicted, *others)):
            constant[number] &= predicts_always_the_same(each)
        targets = batch[:, 1:, None].to(predicted.device)
        tokens += targets.numel()
        nll -= float(predicted.gather(-1, targets).double().sum())
        for expected in others:
            if expected.shape != predicted.shape:
                raise ModelError(
                    f"{names[1]} predicts {expected.shape[-1]} tokens, but {names[0]} {predicted.shape[-1]}. Pass the original."
                )
            distance += divergence(expected, predicted)
            dense_nll -= float(expected.gather(-1, targets).double().sum())
    if not math.isfinite(nll + dense_nll):
        raise ModelError(
            f"{names[0]} or its original predicts NaN or Inf. Check the files, or compute in a wider dtype."
        )
    scores = Evaluation(
        perplexity=_exp(nll / tokens),
        nll=nll / tokens,
        tokens=tokens,
        windows=windows,
        seqlen=seqlen,
        remarks=tuple(_remarks(names, constant, (nll / tokens, dense_nll / tokens), predicted.shape[-1])),
    )
    if len(names) == 1:
        return scores
    return replace(
        scores, kl=distance.kl / tokens, agreement=distance.agreed / tokens, original=_exp(dense_nll / tokens)
    )


def _remarks(names: Sequence[str], constant: Sequence[bool], losses: Sequence[float], vocabulary: int) -> Iterator[str]:
    """Yield a sentence for each network that predicts the same for every token, or worse than a guess."""
    for name, same, nll in zip((names[0], "the original"), constant, losses, strict=False):
        if same:
            yield f"{name} predicts the same for every token; check its files"
        elif nll > math.log(vocabulary):
            yield f"{name} predicts worse than a guess among {vocabulary:,} tokens, whose perplexity is {vocabulary:,}"


def _of_embeddings(
    compared: Iterable[tuple[Tensor, ...]], names: Sequence[str], windows: int, seqlen: int
) -> Evaluation:
    """Return the similarity of the embeddings (windows, hidden) of two networks.

    Raises:
        ModelError: The embeddings have different sizes, or are not finite.
    """
    cosines: list[Tensor] = []
    for _, embedding, expected in compared:
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
    )


def _windows(
    network: Network,
    tokenizer: PreTrainedTokenizerBase | None,
    text: Any,
    given: Given | None,
    samples: int | None,
    seqlen: int | None,
) -> Tensor:
    """Return the windows (windows, seqlen) of the text."""
    positions, tokens = network.positions, None if given is None else given.tokens
    if tokens is not None:
        if seqlen not in (None, tokens.shape[1]):
            raise RecipeError(f"seqlen is {seqlen}, but the windows have {tokens.shape[1]} tokens. Leave out seqlen.")
        seqlen = tokens.shape[1]
    if seqlen is not None and positions is not None and seqlen > positions:
        raise CalibrationError(f"seqlen {seqlen} is more than the model's maximum length of {positions} tokens.")
    if tokens is not None:
        return tokens[:samples]
    seqlen = seqlen or min(2048, positions or 2048)
    if seqlen < 2:
        raise ModelError(f"The model's maximum length is {positions} token; expected at least 2. Check config.json.")
    if tokenizer is None:
        raise RecipeError("A model object has no tokenizer: pass tokenizer=, or token ids (windows, seqlen) as text.")
    return read_windows(
        tokenizer,
        text if given is None else given.texts,
        samples=samples or sys.maxsize,
        seqlen=seqlen,
        between=framing_tokens(tokenizer) if network.framed else (),
    )


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def load_dense(
    source: str | Path, device: torch.device, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with every weight decoded, and its tokenizer."""
    folder = source_folder(source, trust_remote_code=trust_remote_code)
    model = dense_network(folder, trust_remote_code=trust_remote_code).to(device)
    return model, tokenizer_of(folder, trust_remote_code=trust_remote_code)
