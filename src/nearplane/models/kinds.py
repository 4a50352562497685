"""What kind of network a model is, what it is given and what comes out of it.

It has a vocabulary head or none (encoders, which give hidden states alone), and parts that see images or hear; it is given text,
images, or sound with the tokens that are said in it; and how far two networks' predictions, or hidden states, are apart is counted
here. Knows configs and networks of transformers.
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
    kind, tied = _kind(config), getattr(config, "tie_word_embeddings", False)
    continues = (
        kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is not False
    )
    return _made(config) in _plain(kind) and not (continues and tied)


def is_multimodal(config: Any) -> bool:
    """Return whether a config describes a language model that sees images, too, which AutoModelForImageTextToText builds.

    Of types that there are with and without a vision tower (Llama 4, Qwen3.5) its architecture tells.
    """
    kind, made = _kind(config), _made(config)
    seeing = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    return seeing is not None and (seeing == made or kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_seq2seq(config: Any) -> bool:
    """Return whether AutoModelForSeq2SeqLM builds a model: an encoder with a decoder, or a language model that hears."""
    made = _made(config)
    return made is not None and made == modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(_kind(config))


def writes_down(config: Any) -> bool:
    """Return whether a config describes an encoder that is given sound, and a decoder that writes it down (Whisper)."""
    return hears_alone(config) is not None and _kind(config) in HEARD


def hears_alone(config: Any) -> str | None:
    """Return the architecture that AutoModelForSpeechSeq2Seq builds, where no text can stand for sound; else None."""
    made = _made(config)
    heard = made is not None and made == modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(_kind(config))
    return made if heard and not is_seq2seq(config) else None


def _kind(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _made(config: Any) -> str | None:
    """Return the name of the class that a model was saved from."""
    names = getattr(config, "architectures", None) or (None,)
    return names[0] if isinstance(names[0], str) else None


def has_head(network: PreTrainedModel) -> bool:
    """Return whether a network predicts tokens."""
    plain = type(network).__name__ in _plain(network.config.model_type)
    return network.get_output_embeddings() is not None or not plain


def taken_by(network: PreTrainedModel) -> Taken:
    """Return what a network is given."""
    if str(getattr(network, "main_input_name", "")) == "pixel_values":
        return Taken.IMAGES
    return Taken.SOUND if has_head(network) and writes_down(network.config) else Taken.TEXT


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


def has_two_stacks(network: PreTrainedModel) -> bool:
    """Return whether a network has blocks of an encoder and of a decoder, which looks at what comes out of the encoder."""
    config: Any = network.config
    translates = getattr(config, "is_encoder_decoder", False) and (is_seq2seq(config) or writes_down(config))
    return has_head(network) and bool(translates)


def is_framed(network: PreTrainedModel) -> bool:
    """Return whether a network was made for text between two tokens of its own, [CLS] and [SEP] or their like."""
    return not has_head(network) or has_two_stacks(network)


def padded_positions(network: nn.Module) -> int:
    """Return how many of the positions that a config names are taken by padding, as in RoBERTa: the first ones."""
    tables = [part for name, part in network.named_modules() if name.endswith("position_embeddings")]
    taken = [part.padding_idx + 1 for part in tables if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    return max(taken, default=0)


def _plain(kind: str) -> tuple[str, ...]:
    """Return the names of the classes of a type of model that have no head."""
    found = modeling_auto.MODEL_MAPPING_NAMES.get(kind, ())
    return (found,) if isinstance(found, str) else tuple(found)


def main_input(network: PreTrainedModel, windows: Tensor) -> Tensor:
    """Return what a network is given first: windows as they are, or their sound, in its own dtype."""
    return windows.sound.to(network.dtype) if isinstance(windows, Spoken) else windows


def words(network: PreTrainedModel, tokens: Tensor) -> dict[str, Any]:
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
        start = tokens.new_full((len(tokens), 1), int(network.config.decoder_start_token_id))
        told["decoder_input_ids"] = torch.cat([start, tokens[:, :-1]], 1)
    return told


def read_out(network: PreTrainedModel, output: Any) -> Tensor:
    """Return logits (windows, seqlen, vocabulary), or of a network without head the last hidden states.

    Logits at a token are those of the next one; behind an encoder, see `words`, the last are those of the first.
    """
    found: Tensor = output.logits if has_head(network) else output.last_hidden_state
    return found.roll(-1, 1) if has_two_stacks(network) else found


class Spoken(Tensor):
    """What is said, (windows, seqlen) int64 token ids, and how it sounds.

    To all that counts, looks up or compares tokens it is a tensor of token ids, and what comes of that is a plain tensor. Windows
    that are taken, split off, gone through or moved to a device take their sound along.

    Attributes:
        sound: (windows, ..) float32, as the model's feature extractor makes it: of Whisper (windows, mel bins, frames).
    """

    sound: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of Parameter

    @classmethod
    def of(cls, tokens: Tensor, sound: Tensor) -> Spoken:
        """Join token ids with the sound of as many windows; no memory is copied."""
        found = tokens.as_subclass(cls)
        found.sound = sound
        return found

    def __getitem__(self, which: Any) -> Tensor:
        """Return some windows with their sound; by two indices, plain token ids."""
        ids = super().__getitem__(which)
        return ids if isinstance(which, tuple) else Spoken.of(ids, self.sound[which])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield window after window, (seqlen,) each."""
        return (self[i] for i in range(len(self)))

    def split(self, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Return the windows in parts."""
        assert dim == 0, "windows are not cut"
        return tuple(map(Spoken.of, torch.split(self.as_subclass(Tensor), size), torch.split(self.sound, size)))

    def to(self, *place: Any, **how: Any) -> Tensor:
        """Return them on another device; their sound stays float32."""
        ids = super().to(*place, **how)
        return Spoken.of(ids, self.sound.to(ids.device))


def joined(parts: list[Tensor]) -> Tensor:
    """Return windows one behind the other, with their sound if they have one."""
    ids, sounds = torch.cat(parts), [part.sound for part in parts if isinstance(part, Spoken)]
    return Spoken.of(ids, torch.cat(sounds)) if sounds else ids


def cut(windows: Tensor, seqlen: int) -> Tensor:
    """Return windows cut into shorter ones of at most `seqlen` tokens; what is said in a sound stays whole."""
    if isinstance(windows, Spoken) or windows.shape[1] <= seqlen:
        return windows
    return windows[:, : windows.shape[1] // seqlen * seqlen].reshape(-1, seqlen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Sums over tokens, so that batches add up.

    Args:
        kl: sum of KL(original || quantized), nats.
        agreed: tokens at which both networks hold the same one for the most likely.
        tokens: that were compared.
    """

    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(kl=self.kl + other.kl, agreed=self.agreed + other.agreed, tokens=self.tokens + other.tokens)


def divergence(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the predictions of two networks at the same positions.

    Args:
        original, quantized: (..., vocabulary) log-probabilities in float32.
    """
    kl = (original.exp() * (original - quantized)).sum(-1).double().sum()
    agreed = (original.argmax(-1) == quantized.argmax(-1)).sum()
    return Divergence(kl=float(kl), agreed=int(agreed), tokens=original[..., 0].numel())


def distance(original: Tensor, quantized: Tensor) -> Divergence:
    """Compare the last hidden states of two networks (..., hidden), as if each were the mean of a normal distribution.

    Its standard deviation is the root mean square of the original's token, in every direction: `KL = |x - y|^2 / (2 s^2)`.
    """
    original, quantized = original.float(), quantized.float()
    variance = original.square().mean(-1).clamp(min=1e-30)
    kl = ((original - quantized).square().sum(-1) / (2 * variance)).double().sum()
    return Divergence(kl=float(kl), tokens=original[..., 0].numel())
