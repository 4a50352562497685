"""What is in a model: a vocabulary head or none (encoders, which give hidden states alone), and parts that see images or hear.

Knows configs and networks of transformers; what becomes of the hidden states is for others to say.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from nearplane.models.tokens_with_audio import Spoken

HEARD = "whisper", "moonshine", "speech_to_text", "speecht5"  # types of models that write down what they hear, as tried


class Taken(StrEnum):
    """What networks are given."""

    TEXT = "text"
    IMAGES = "pixel values (images, channels, height, width)"
    SOUND = "sound with what is said in it (input_features, token_ids)"


def is_headless(config: Any) -> bool:
    """Return whether a config describes a model without head, which AutoModel builds and AutoModelForCausalLM does not.

    It names the plain model of its type, "BertModel", as its architecture. Of types that continue text, one whose embeddings would
    be its head (tied) is taken for a language model that was saved without it.
    """
    kind, made = _kind(config), _made(config)
    if made not in _plain(kind):
        return False
    decoder = getattr(config, "is_decoder", None)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or decoder is False:
        return True
    return not getattr(config, "tie_word_embeddings", False)


def is_multimodal(config: Any) -> bool:
    """Return whether a config describes a language model that sees images, too, which AutoModelForImageTextToText builds.

    Of types that there are with and without a vision tower (Llama 4, Qwen3.5) its architecture tells.
    """
    kind, made = _kind(config), _made(config)
    seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    return seeing is not None and (seeing == made or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_seq2seq(config: Any) -> bool:
    """Return whether AutoModelForSeq2SeqLM builds a model: an encoder with a decoder, or a language model that hears."""
    return _made(config) is not None and _made(config) == MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(
        _kind(config)
    )


def is_translator(config: Any) -> bool:
    """Return whether a config describes an encoder that is given text or sound, and a decoder that predicts tokens."""
    return bool(getattr(config, "is_encoder_decoder", False)) and (is_seq2seq(config) or writes_down(config))


def writes_down(config: Any) -> bool:
    """Return whether a config describes an encoder that is given sound, and a decoder that writes it down (Whisper)."""
    return hears_alone(config) is not None and _kind(config) in HEARD


def hears_alone(config: Any) -> str | None:
    """Return the architecture that AutoModelForSpeechSeq2Seq builds, where no text can stand for sound; else None."""
    made = _made(config)
    heard = made is not None and made == MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(_kind(config))
    return made if heard and not is_seq2seq(config) else None


def _kind(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _made(config: Any) -> str | None:
    """Return the name of the class that a model was saved from."""
    names = getattr(config, "architectures", None) or (None,)
    return names[0] if isinstance(names[0], str) else None


def has_head(network: nn.Module) -> bool:
    """Return whether a network predicts tokens."""
    transformer: Any = network
    ends = transformer.get_output_embeddings()
    return ends is not None or type(network).__name__ not in _plain(transformer.config.model_type)


def taken_by(network: nn.Module) -> Taken:
    """Return what a network is given."""
    if str(getattr(network, "main_input_name", "")) == "pixel_values":
        return Taken.IMAGES
    transformer: Any = network
    return Taken.SOUND if has_head(network) and writes_down(transformer.config) else Taken.TEXT


def towers(network: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the networks in a network that lie beside the one that looks tokens up: they see images or hear."""
    if taken_by(network) is Taken.IMAGES or has_two_stacks(network):
        return ()
    inputs = network.get_input_embeddings()
    place = next(name for name, part in network.named_modules() if part is inputs)
    whole = [name for name, part in network.named_modules() if isinstance(part, PreTrainedModel)]
    speaks = max((name for name in whole if _within(place, name)), key=len)
    return tuple(name for name in whole if not _within(speaks, name) and not _within(name, speaks))


def _within(name: str, part: str) -> bool:
    """Return whether a module lies in a part of a network, "" being all of it."""
    return not part or f"{name}.".startswith(f"{part}.")


def has_two_stacks(network: nn.Module) -> bool:
    """Return whether a network has blocks of an encoder and of a decoder, which looks at what comes out of the encoder."""
    transformer: Any = network
    return has_head(network) and is_translator(transformer.config)


def is_framed(network: nn.Module) -> bool:
    """Return whether a network was made for text between two tokens of its own, [CLS] and [SEP] or their like."""
    return not has_head(network) or has_two_stacks(network)


def padded_positions(network: nn.Module) -> int:
    """Return how many of the positions that a config names are taken by padding, as in RoBERTa: the first ones."""
    tables = [part for name, part in network.named_modules() if name.endswith("position_embeddings")]
    taken = [part.padding_idx + 1 for part in tables if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    return max(taken, default=0)


def _plain(kind: str) -> tuple[str, ...]:
    """Return the names of the classes of a type of model that have no head."""
    found = MODEL_MAPPING_NAMES.get(kind, ())
    return (found,) if isinstance(found, str) else tuple(found)


def main_input(network: PreTrainedModel, windows: Tensor) -> Tensor:
    """Return what a network is given first: windows as they are, or their sound, in its own dtype."""
    return windows.sound.to(network.dtype) if isinstance(windows, Spoken) else windows


def words(network: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """Return what a network is told beside its input: to keep nothing for later tokens, if it knows of that.

    The decoder behind an encoder is given the same tokens, or those that are said in its sound, one place on: it starts with its
    own token, and predicts the first.

    Args:
        network: that runs.
        tokens: (windows, seqlen) its input, or pixel values.
    """
    named = "use_cache" in inspect.signature(network.forward).parameters
    told: dict[str, Any] = {"use_cache": False} if named or has_head(network) else {}
    if has_two_stacks(network):
        transformer: Any = network
        start = tokens.new_full((len(tokens), 1), int(transformer.config.decoder_start_token_id))
        told["decoder_input_ids"] = torch.cat([start, tokens[:, :-1]], 1)
    return told


def read_out(network: nn.Module, output: Any) -> Tensor:
    """Return logits (windows, seqlen, vocabulary), or of a network without head the last hidden states.

    Logits at a token are those of the next one; behind an encoder, see `words`, the last are those of the first.
    """
    found: Tensor = output.logits if has_head(network) else output.last_hidden_state
    return found.roll(-1, 1) if has_two_stacks(network) else found
