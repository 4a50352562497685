"""Kinds of networks by their inputs and outputs.

A network has a vocabulary head or none (an encoder, which returns hidden states), perhaps towers for images or sound,
and takes text, images, or sound with its transcript. All is read off transformers' configs and networks.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from nearplane.models.spoken import Spoken

SPEECH_TYPES = "whisper", "moonshine", "speech_to_text", "speecht5"  # types of speech-to-text models that were tried


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


def continues_text(network: PreTrainedModel) -> bool:
    """Return whether a network continues a text: it takes text alone, predicts tokens, and has no encoder."""
    return input_kind(network) is InputKind.TEXT and has_head(network) and not has_two_stacks(network)


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


def shared_layers(config: Any) -> int | None:
    """Return the number of a network's last blocks that use keys and values of earlier ones; None if the config has no field."""
    return getattr(config.get_text_config(), "num_kv_shared_layers", None)
