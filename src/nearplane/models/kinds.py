"""Kinds of networks by their inputs and outputs, and the divergence between the outputs of two networks.

A network has a vocabulary head or none (an encoder, which returns hidden states), perhaps towers for images or sound,
and takes text, images, or sound with its transcript. All is read off transformers' configs and networks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

SPEECH_TYPES = "whisper", "moonshine", "speech_to_text", "speecht5"  # types of speech-to-text models that were tried
SAME_PREDICTIONS = 1e-5  # largest difference of log-probabilities that counts as rounding
COMPARED_TOKENS = 64  # tokens whose predictions are compared with each other
NOTHING_TO_MEASURE = (
    "The model predicts the same for every token of the calibration text, so the effect of errors on its predictions "
    "cannot be measured. Check the checkpoint and the text."
)


class InputKind(StrEnum):
    """Input of a network."""

    TEXT = "text"
    IMAGES = "pixel values (images, channels, height, width)"
    SOUND = "sound with its transcript (input_features, token_ids)"


def is_headless(config: Any) -> bool:
    """Return whether a config describes a model without head, which AutoModel builds and AutoModelForCausalLM does not.

    Its architecture is then the plain model of its type, "BertModel". A plain model of a causal type with tied
    embeddings counts as a language model that was saved without its head.
    """
    kind, tied = _kind(config), getattr(config, "tie_word_embeddings", False)
    causal = (
        kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is not False
    )
    return _class_name(config) in _plain(kind) and not (causal and tied)


def is_multimodal(config: Any) -> bool:
    """Return whether a config describes a language model with images, which AutoModelForImageTextToText builds.

    For types with and without a vision tower (Llama 4, Qwen3.5), the architecture in the config decides.
    """
    kind, name = _kind(config), _class_name(config)
    visual = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    return visual is not None and (visual == name or kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_seq2seq(config: Any) -> bool:
    """Return whether AutoModelForSeq2SeqLM builds a model, such as an encoder with a decoder."""
    name = _class_name(config)
    return name is not None and name == modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(_kind(config))


def writes_down(config: Any) -> bool:
    """Return whether a config describes a supported speech-to-text model such as Whisper, with encoder and decoder."""
    return hears_alone(config) is not None and _kind(config) in SPEECH_TYPES


def hears_alone(config: Any) -> str | None:
    """Return the architecture if AutoModelForSpeechSeq2Seq builds it and it takes only sound; else None."""
    name = _class_name(config)
    speech = name is not None and name == modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(_kind(config))
    return name if speech and not is_seq2seq(config) else None


def _kind(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _class_name(config: Any) -> str | None:
    """Return the name of the class of the saved model, from its config."""
    names = getattr(config, "architectures", None) or (None,)
    return names[0] if isinstance(names[0], str) else None


def has_head(network: PreTrainedModel) -> bool:
    """Return whether a network predicts tokens."""
    plain = type(network).__name__ in _plain(network.config.model_type)
    return network.get_output_embeddings() is not None or not plain


def input_kind(network: PreTrainedModel) -> InputKind:
    """Return the kind of input of a network."""
    if str(getattr(network, "main_input_name", "")) == "pixel_values":
        return InputKind.IMAGES
    return InputKind.SOUND if has_head(network) and writes_down(network.config) else InputKind.TEXT


def towers(network: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the inner networks beside the language model, for images or sound."""
    if input_kind(network) is InputKind.IMAGES or has_two_stacks(network):
        return ()
    inputs = network.get_input_embeddings()
    embeddings = next(name for name, part in network.named_modules() if part is inputs)
    networks = [name for name, part in network.named_modules() if isinstance(part, PreTrainedModel)]
    language_model = max((name for name in networks if _lies_in(embeddings, name)), key=len)
    return tuple(name for name in networks if not _lies_in(language_model, name) and not _lies_in(name, language_model))


def _lies_in(name: str, part: str) -> bool:
    """Return whether a module lies in a part of a network; "" is the whole network."""
    return not part or f"{name}.".startswith(f"{part}.")


def has_two_stacks(network: PreTrainedModel) -> bool:
    """Return whether a network has an encoder and a decoder with cross-attention to the encoder's output."""
    config: Any = network.config
    two_stacks = getattr(config, "is_encoder_decoder", False) and (is_seq2seq(config) or writes_down(config))
    return has_head(network) and bool(two_stacks)


def is_framed(network: PreTrainedModel) -> bool:
    """Return whether a network expects text between two special tokens such as [CLS] and [SEP]."""
    return not has_head(network) or has_two_stacks(network)


def padded_positions(network: nn.Module) -> int:
    """Return how many of a config's positions are reserved for padding, as the first ones in RoBERTa."""
    tables = [part for name, part in network.named_modules() if name.endswith("position_embeddings")]
    reserved = [
        part.padding_idx + 1 for part in tables if isinstance(part, nn.Embedding) and part.padding_idx is not None
    ]
    return max(reserved, default=0)


def _plain(kind: str) -> tuple[str, ...]:
    """Return the names of the classes without head of a type of model."""
    names = modeling_auto.MODEL_MAPPING_NAMES.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)


def main_input(network: PreTrainedModel, windows: Tensor) -> Tensor:
    """Return the first argument of a network: the windows, or their sound in the network's dtype."""
    return windows.sound.to(network.dtype) if isinstance(windows, Spoken) else windows


def call_kwargs(network: PreTrainedModel, tokens: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of a network's forward pass: no cache, and the input of a decoder after an encoder.

    The decoder's input is the same tokens, or the transcript of the sound, shifted by one: it begins with the decoder's
    start token, at which the first token is predicted.

    Args:
        network: The network to run.
        tokens: (windows, seqlen) tokens, or pixel values.
    """
    has_option = "use_cache" in inspect.signature(network.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": False} if has_option or has_head(network) else {}
    if has_two_stacks(network):
        start = tokens.new_full((len(tokens), 1), int(network.config.decoder_start_token_id))
        kwargs["decoder_input_ids"] = torch.cat([start, tokens[:, :-1]], 1)
    return kwargs


def read_out(network: PreTrainedModel, output: Any) -> Tensor:
    """Return logits (windows, seqlen, vocabulary), or the last hidden states of a network without head.

    Logits at a token predict the next token. With an encoder, see `call_kwargs`, those at the last token predict the first.
    """
    outputs: Tensor = output.logits if has_head(network) else output.last_hidden_state
    return outputs.roll(-1, 1) if has_two_stacks(network) else outputs


class Spoken(Tensor):
    """Transcripts, (windows, seqlen) int64 token ids, with their sound.

    Most operations treat it as a tensor of token ids and return a plain tensor. Indexing, splitting, iteration and `to`
    keep the sound of each window.

    Attributes:
        sound: (windows, ..) float32 output of the model's feature extractor; for Whisper (windows, mel bins, frames).
    """

    sound: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of Parameter

    @classmethod
    def of(cls, tokens: Tensor, sound: Tensor) -> Spoken:
        """Combine token ids with the sound of the same windows; no memory is copied."""
        spoken = tokens.as_subclass(cls)
        spoken.sound = sound
        return spoken

    def __getitem__(self, which: Any) -> Tensor:
        """Return some windows with their sound; for two indices, plain token ids."""
        ids = super().__getitem__(which)
        return ids if isinstance(which, tuple) else Spoken.of(ids, self.sound[which])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the windows, (seqlen,) each."""
        return (self[i] for i in range(len(self)))

    def split(self, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Return the windows in parts, with their sound."""
        assert dim == 0, "windows are not cut"
        return tuple(map(Spoken.of, torch.split(self.as_subclass(Tensor), size), torch.split(self.sound, size)))

    def to(self, *place: Any, **how: Any) -> Tensor:
        """Return the windows on another device; the sound stays float32."""
        ids = super().to(*place, **how)
        return Spoken.of(ids, self.sound.to(ids.device))


def joined_windows(parts: list[Tensor]) -> Tensor:
    """Return the windows of all parts in one tensor, with their sound if there is any."""
    ids, sounds = torch.cat(parts), [part.sound for part in parts if isinstance(part, Spoken)]
    return Spoken.of(ids, torch.cat(sounds)) if sounds else ids


def cut_windows(windows: Tensor, seqlen: int) -> Tensor:
    """Return windows cut into shorter ones of at most `seqlen` tokens; transcripts with sound are not cut."""
    if isinstance(windows, Spoken) or windows.shape[1] <= seqlen:
        return windows
    return windows[:, : windows.shape[1] // seqlen * seqlen].reshape(-1, seqlen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Divergence between two networks as sums over tokens, so that batches can be added.

    Args:
        kl: Sum of KL(original || quantized) in nats.
        agreed: Number of tokens at which both networks predict the same token as most likely.
        tokens: Number of tokens compared.
    """

    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(kl=self.kl + other.kl, agreed=self.agreed + other.agreed, tokens=self.tokens + other.tokens)


def predicts_always_the_same(predicted: Tensor) -> bool:
    """Return whether log-probabilities (..., vocabulary) at several evenly spaced tokens are equal up to rounding."""
    rows = predicted.flatten(0, -2)
    rows = rows[:: -(-len(rows) // COMPARED_TOKENS)]
    return len(rows) > 1 and float((rows - rows[0]).abs().max()) < SAME_PREDICTIONS


def divergence(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the predictions of two networks at the same positions.

    Args:
        original, quantized: (..., vocabulary) log-probabilities in float32.
    """
    kl = (original.exp() * (original - quantized)).sum(-1).double().sum()
    agreed = (original.argmax(-1) == quantized.argmax(-1)).sum()
    sums = torch.stack([kl, agreed.double()]).tolist()  # a device is waited for once
    return Divergence(kl=sums[0], agreed=int(sums[1]), tokens=original[..., 0].numel())


def distance(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the last hidden states (..., hidden) of two networks, each taken as the mean of a normal distribution.

    Its standard deviation s is the root mean square of the original hidden state: `KL = |x - y|^2 / (2 s^2)`.
    """
    original, quantized = original.float(), quantized.float()
    variance = original.square().mean(-1).clamp(min=1e-30)
    kl = ((original - quantized).square().sum(-1) / (2 * variance)).double().sum()
    return Divergence(kl=float(kl), tokens=original[..., 0].numel())
