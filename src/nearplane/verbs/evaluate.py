"""evaluate(): perplexity of a model on a text and its divergence from the original; for encoders, similarity of embeddings.

It reads all formats that `quantize` writes with nearplane's own readers, and any transformers folder. Decoded weights are
used in float32; model objects run as they are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.cache_scales import check_cache, scales_by_layer
from nearplane.calibration.given import Given, check_start
from nearplane.calibration.self_written import self_written
from nearplane.calibration.text_files import is_self_written
from nearplane.calibration.texts import check_vocabulary
from nearplane.calibration.windows import check_padding, digest_of
from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.evaluation.predictions import Network, Outline, batches_here, opened
from nearplane.evaluation.protocol_names import PLAIN_WINDOWS, Protocol
from nearplane.evaluation.protocols import (
    ScoredText,
    default_seqlen,
    llama_cpp_figures,
    lm_eval_figures,
    next_tokens,
    scored_text,
)
from nearplane.evaluation.scoring import Floor, cosines, measured_floor, running, token_scores
from nearplane.evaluation.statistics import TokenScores, summarize
from nearplane.formats.stored import Stored, quantization_of
from nearplane.loading.dense_network import dense_network
from nearplane.loading.rounded_layers import RoundedLayers, rounded_layers
from nearplane.loading.source_folder import source_folder
from nearplane.models.kinds import InputKind
from nearplane.models.model import open_model
from nearplane.models.pretrained import tokenizer_of
from nearplane.models.two_tokenizers import check_same_tokens, decoded
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.paths import refuse_tokenizer
from nearplane.system.progress import Tracked, shown, silent
from nearplane.system.ranks import Ranks
from nearplane.verbs.evaluate_request import EvaluateRequest
from nearplane.verbs.evaluation_result import Evaluation
from nearplane.verbs.follow import agree, files_of, on_all_ranks

SELF_SAMPLES, SELF_SEQLEN, SELF_SEED = (
    16,
    512,
    1,
)  # of text that the original writes; texts to calibrate on have the seed 0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Evaluation on one text, and the figures of its tokens; None for encoders."""

    evaluation: Evaluation
    scores: TokenScores | None = None


@takes(EvaluateRequest, tokenizer=PreTrainedTokenizerBase | None)
def evaluate(request: EvaluateRequest) -> Evaluation:
    """Measure perplexity, and with `against` the divergence from the original.

    Encoders predict no tokens: they need `against`, and the embeddings of both models are compared.

    Raises:
        CalibrationError: The text is missing, empty or shorter than one window, or the token ids are mostly padding.
        ModelError, FormatError: A model cannot be read, or the two have different vocabularies or tokenizers.
    """
    return prepare_texts(request).measure()[0].evaluation


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """Texts cut into windows, and the models that are to be measured on them, of which no weight is read yet.

    Args:
        outlines: The model, and the original if there is one.
        texts: Windows of the texts, each with its name.
        request: What is asked.
        rounded: Layers of the model whose inputs runtimes round; empty unless asked for.
        cache_scales: Scales of keys and of values by the number of the layer; None: they are not rounded.
    """

    outlines: Sequence[Outline]
    texts: Sequence[tuple[ScoredText, str]]
    request: EvaluateRequest
    rounded: RoundedLayers
    cache_scales: Mapping[int, tuple[Tensor, Tensor]] | None = None

    def measure(self) -> list[Measured]:
        """Read the models, and measure them on each text by itself; the floor is measured on the first."""
        with on_all_ranks() as ranks:
            return self._measured(ranks)

    def _measured(self, ranks: Ranks) -> list[Measured]:
        request, outlines = self.request, self.outlines
        if ranks.world > 1:
            windows = [digest_of(part.tokens) for part, _ in self.texts]
            request = request if ranks.leads else replace(request, progress=silent)
            agree(ranks, {"windows": windows, "model": [each.folder and files_of(each.folder) for each in outlines]})
        for part, name in self.texts:
            log.info("%s windows to evaluate (%s)", f"{len(part.tokens):,}", name)
        place, trust = Device.named(request.device, ranks=ranks), request.trust_remote_code
        networks = [opened(each, place, trust_remote_code=trust) for each in outlines]
        floor = None
        if request.floor and len(networks) > 1 and not outlines[0].embeds:
            floor = measured_floor(networks[1], self.texts[0][0], place, trust, request.progress)
        measured = [_measured(networks, *text, request, None if n else floor) for n, text in enumerate(self.texts)]
        parts = ("inputs",) * request.activations + ("cache",) * (request.kv_cache != "none")
        if not parts:
            return measured
        networks[0].rounded, networks[0].cache_scales = self.rounded, self.cache_scales
        computed = [_measured(networks, *text, request) for text in self.texts]
        return [
            replace(alone, evaluation=replace(alone.evaluation, computed=replace(both.evaluation, rounded=parts)))
            for alone, both in zip(measured, computed, strict=True)
        ]


def prepare_texts(request: EvaluateRequest) -> PreparedTexts:
    """Check a model, its original and the texts, and cut these into windows; see `evaluate`."""
    request.check()
    model, against, texts, protocol = request.model, request.against, request.texts, request.protocol
    tokenizer, trust = request.tokenizer, request.trust_remote_code
    refuse_tokenizer(model, tokenizer)
    Device.named(request.device)
    given = [Given.of(_written(request) if is_self_written(text) else text, "text") for text in texts]
    outlines = [Outline.of(each, trust_remote_code=trust) for each in (model, against) if each is not None]
    for each in given:
        _check_taken(outlines, InputKind.TEXT if each is None else each.kind, protocol)
    outline, layers, scales = outlines[0], RoundedLayers(), None
    if request.kv_cache != "none":
        scales = _cache_scales(outline)
    if request.activations:
        if outline.folder is None:
            raise RecipeError(
                "A model object runs as it is, so activations=True needs the folder of a checkpoint instead."
            )
        layers = rounded_layers(outline.network, outline.folder)
    if outline.folder is not None and any(each is None or each.tokens is None for each in given):
        tokenizer = tokenizer_of(outline.folder, trust_remote_code=trust)
    scored = [_scored(outlines, tokenizer, text, each, request) for text, each in zip(texts, given, strict=True)]
    positions, shortest = _positions(outlines)
    if request.seqlen is None and scored[0].tokens.shape[1] == positions:
        log.info("windows have %d tokens, the maximum length of %s", positions, shortest)
    for original in outlines[1:]:
        if any(original.vocabulary and int(part.tokens.max()) >= original.vocabulary for part in scored):
            raise ModelError(
                f"{original.name} has {original.vocabulary} tokens, but {outline.name} {outline.vocabulary}. Pass the original."
            )
    folders = {each.name: each.folder for each in outlines if each.folder is not None}
    tokenized = [part.tokens for part, each in zip(scored, given, strict=True) if each is None or each.tokens is None]
    if tokenizer is not None and tokenized:
        read = (text for windows in tokenized for text in decoded(tokenizer, windows))
        check_same_tokens(folders, read, trust_remote_code=trust)
    return PreparedTexts(outlines, [*zip(scored, map(_name, texts), strict=True)], request, layers, scales)


def _cache_scales(outline: Outline) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the scales of a model's cache by the number of the layer; empty where the folder has none.

    Raises:
        RecipeError: The network has no cache whose scales vLLM takes.
    """
    check_cache(outline.network)
    folder = outline.folder
    tensors = {} if folder is None or quantization_of(folder) is None else Stored(folder).beside()
    found = scales_by_layer(outline.network, tensors)
    if not found:
        log.info(
            "%s has no scales of keys and values that belong to its layers: they are 1.0, as in vLLM", outline.name
        )
    return found


def _written(request: EvaluateRequest) -> Tensor:
    """Return windows of text that the original writes, drawn otherwise than text to calibrate on by default."""
    original = open_model(str(request.against), trust_remote_code=request.trust_remote_code)
    seqlen = request.seqlen or min(SELF_SEQLEN, original.positions or SELF_SEQLEN)
    samples, device = request.samples or SELF_SAMPLES, Device.named(request.device)
    return self_written(original, samples, seqlen, SELF_SEED, device, request.progress)


def _name(text: Any) -> str:
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
    if protocol not in PLAIN_WINDOWS and (first.framed or input_kind is not InputKind.TEXT):
        raise RecipeError(
            f"--protocol {protocol} is for language models that continue a text, which {first.name} does not. Leave it out."
        )


def _positions(outlines: Sequence[Outline]) -> tuple[int, str]:
    """Return the fewest positions that one of the models has, and its name."""
    return min((each.positions or sys.maxsize, each.name) for each in outlines)


def _scored(
    outlines: Sequence[Outline],
    tokenizer: PreTrainedTokenizerBase | None,
    text: Any,
    given: Given | None,
    request: EvaluateRequest,
) -> ScoredText:
    """Return the windows of a text and what is scored of them."""
    protocol, seqlen, samples = request.protocol, request.seqlen, request.samples
    outline, tokens = outlines[0], None if given is None else given.tokens
    positions, shortest = _positions(outlines)
    if tokens is not None:
        if protocol not in PLAIN_WINDOWS:
            raise RecipeError(
                f"--protocol {protocol} cuts windows of a text itself, but token ids are given. Pass a text."
            )
        if seqlen not in (None, tokens.shape[1]):
            raise RecipeError(f"seqlen is {seqlen}, but the windows have {tokens.shape[1]} tokens. Leave out seqlen.")
        seqlen = tokens.shape[1]
    if seqlen is not None and seqlen > positions:
        raise CalibrationError(
            f"seqlen {seqlen} is more than the maximum length of {shortest}, {positions} tokens. Use --seqlen {positions}, or less."
        )
    if given is not None and tokens is not None:
        given.check_packed(outline.framed, outline.name)
        if outline.takes is InputKind.TEXT:
            check_padding(tokens)
        tokens = tokens[:samples]
        scored = ScoredText(tokens=tokens, targets=next_tokens(tokens) if outline.vocabulary else None)
    else:
        seqlen = seqlen or default_seqlen(protocol, None if positions == sys.maxsize else positions)
        if seqlen < 2:
            raise ModelError(
                f"The maximum length of {shortest} is {positions} token; expected at least 2. Check config.json."
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
    networks: Sequence[Network], scored: ScoredText, name: str, request: EvaluateRequest, floor: Floor | None = None
) -> Measured:
    """Return the evaluation on one text, and the scores of its tokens."""
    names, windows = [network.outline.name for network in networks], len(scored.tokens)
    seqlen = scored.tokens.shape[1] if networks[0].outline.vocabulary else 1
    ranks = networks[0].device.ranks
    with running(networks, scored.tokens, ranks) as batches:
        total = len(batches_here(networks, scored.tokens, ranks))
        compared = shown(request.progress, Tracked(batches, "evaluating batches", total), "evaluating batches", total)
        if networks[0].outline.embeds:
            alike = cosines(compared, names, ranks)
            evaluation = Evaluation(tokens=seqlen * windows, windows=windows, seqlen=seqlen, text=name)
            evaluation = replace(evaluation, cosine=float(alike.mean()), worst_cosine=float(alike.min()))
            return Measured(evaluation=evaluation)
        scores, remarks = token_scores(compared, names, scored, networks[0].outline.vocabulary, ranks)
    statistics, protocol, base = summarize(scores), request.protocol, scores.original_nll
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


def load_dense(
    source: str | Path, device: torch.device, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with every weight decoded, and its tokenizer."""
    folder = source_folder(source, trust_remote_code=trust_remote_code)
    model = dense_network(folder, device=device, trust_remote_code=trust_remote_code)
    return model, tokenizer_of(folder, trust_remote_code=trust_remote_code)
