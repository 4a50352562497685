"""What is in a model: a vocabulary head or none (encoders, which give hidden states alone), and parts that see images or hear.

Knows configs and networks of transformers; what becomes of the hidden states is for others to say.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)


def is_headless(config: Any) -> bool:
    """Return whether a config describes a model without head, which AutoModel builds and AutoModelForCausalLM does not.

    It names the plain model of its type, "BertModel", as its architecture. Of types that continue text, one whose embeddings would
    be its head (tied) is taken for a language model that was saved without it.
    """
    kind, made = getattr(config, "model_type", ""), (getattr(config, "architectures", None) or ("",))[0]
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
    kind, made = getattr(config, "model_type", ""), (getattr(config, "architectures", None) or ("",))[0]
    seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    return seeing is not None and (seeing == made or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def has_head(network: nn.Module) -> bool:
    """Return whether a network predicts tokens."""
    transformer: Any = network
    ends = transformer.get_output_embeddings()
    return ends is not None or type(network).__name__ not in _plain(transformer.config.model_type)


def takes_images(network: nn.Module) -> bool:
    """Return whether a network is given pixel values, (images, channels, height, width), in place of tokens."""
    return str(getattr(network, "main_input_name", "")) == "pixel_values"


def towers(network: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the networks in a network that lie beside the one that looks tokens up: they see images or hear."""
    if takes_images(network):
        return ()
    inputs = network.get_input_embeddings()
    place = next(name for name, part in network.named_modules() if part is inputs)
    whole = [name for name, part in network.named_modules() if isinstance(part, PreTrainedModel)]
    speaks = max((name for name in whole if _within(place, name)), key=len)
    return tuple(name for name in whole if not _within(speaks, name) and not _within(name, speaks))


def _within(name: str, part: str) -> bool:
    """Return whether a module lies in a part of a network, "" being all of it."""
    return not part or f"{name}.".startswith(f"{part}.")


def padded_positions(network: nn.Module) -> int:
    """Return how many of the positions that a config names are taken by padding, as in RoBERTa: the first ones."""
    tables = [part for name, part in network.named_modules() if name.endswith("position_embeddings")]
    taken = [part.padding_idx + 1 for part in tables if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    return max(taken, default=0)


def _plain(kind: str) -> tuple[str, ...]:
    """Return the names of the classes of a type of model that have no head."""
    found = MODEL_MAPPING_NAMES.get(kind, ())
    return (found,) if isinstance(found, str) else tuple(found)


def words(network: nn.Module) -> dict[str, Any]:
    """Return what a network is told beside its input: to keep nothing for later tokens, if it knows of that."""
    named = "use_cache" in inspect.signature(network.forward).parameters
    return {"use_cache": False} if named or has_head(network) else {}


def read_out(network: nn.Module, output: Any) -> Tensor:
    """Return logits (windows, seqlen, vocabulary), or of a network without head the last hidden states."""
    found: Tensor = output.logits if has_head(network) else output.last_hidden_state
    return found
