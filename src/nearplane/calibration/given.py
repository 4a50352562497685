"""Calibration data passed as Python objects: texts, tokens, images, or sound with its transcripts.

Of what a tokenizer returns, positions that its attention_mask leaves out are removed, and all others are packed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearplane.calibration.activations import positions_per_window
from nearplane.calibration.text_files import IMAGES, SOUND, TEXTS, TOKENS
from nearplane.calibration.texts import check_vocabulary
from nearplane.errors import CalibrationError, RecipeError
from nearplane.models.kinds import InputKind, is_framed
from nearplane.models.model import Model
from nearplane.models.pretrained import as_model_error
from nearplane.models.spoken import Spoken
from nearplane.recipe.recipe import Calibration, Recipe

EXPECTED_DATA = (
    "a path, a list of texts, token ids (windows, seqlen), what a tokenizer returns (input_ids with their attention_mask), "
    "pixel values (images, channels, height, width), or a pair of tensors or arrays (input_features, token_ids)"
)
# entries of what tokenizers and collators return that change no input of a network that continues text
OF_TOKENIZERS = {
    *("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length", "labels")
}
Encoded = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # what a tokenizer returns, see `Given.of`
logger = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Calibration data passed from Python: either texts or tensors; the other field is None.

    Args:
        texts: The documents.
        tokens: (windows, seqlen) int64 token ids, perhaps with sound, or (images, channels, height, width) float32.
        packed: Whether `tokens` are rows of other lengths, packed into windows; see `_of_encodings`.
    """

    texts: tuple[str, ...] | None = None
    tokens: Tensor | None = None
    packed: bool = False

    @classmethod
    def of(cls, value: object, what: str = "calibration") -> Given | None:
        """Accept a list of texts, an array of token ids or pixel values, or a pair of sound features and token ids.

        Also what a tokenizer returns for one or several texts, or a list of these. Returns None for a path and for None.

        Raises:
            CalibrationError: The value is something else, or empty.
        """
        if value is None or isinstance(value, str | os.PathLike):
            return None
        if isinstance(value, Sequence) and value and all(isinstance(text, str) for text in value):
            return cls(texts=tuple(value))
        encodings = [value] if isinstance(value, Mapping) else value
        if isinstance(encodings, Sequence) and encodings and all(isinstance(part, Mapping) for part in encodings):
            return cls._of_encodings(encodings, what)
        if isinstance(value, Sequence) and [isinstance(part, Tensor | np.ndarray) for part in value] == [True, True]:
            sound, tokens = (_tensor(part, f"{what}[{place}]") for place, part in enumerate(value))
            if sound.is_floating_point() and not tokens.is_floating_point():  # otherwise two images
                return cls(tokens=_spoken(sound, _windows(tokens, f"{what}[1]"), what))
        return cls(tokens=_windows(value, what))

    @classmethod
    def _of_encodings(cls, encodings: Sequence[Mapping[str, Any]], what: str) -> Given:
        """Pack all tokens that are not masked, row after row, into windows as long as the longest row with its padding.

        Rows of one length without padding stay the windows that they are.

        Raises:
            CalibrationError: The encodings have other inputs than tokens, or masks of other lengths, or no tokens.
        """
        rows, longest, masked = list[Any](), 0, 0
        for number, encoding in enumerate(encodings):
            name = what if len(encodings) == 1 else f"{what}[{number}]"
            others = ", ".join(sorted(map(str, {*encoding} - OF_TOKENIZERS)))
            if others or "input_ids" not in encoding:
                raise CalibrationError(
                    f"{name} has the entries {', '.join(map(str, encoding))}; expected input_ids and their attention_mask, as a "
                    f"tokenizer returns them. Pass it with input_ids{f', and without {others}' if others else ''}."
                )
            ids = _rows(encoding["input_ids"])
            masks = [[1] * len(row) for row in ids]
            if "attention_mask" in encoding:
                masks = _rows(encoding["attention_mask"])
            if [*map(len, ids)] != [*map(len, masks)]:
                raise CalibrationError(
                    f"{name}: its attention_mask has another shape than its input_ids. Pass one for each token."
                )
            if any(is_text not in (0, 1) for is_text in chain.from_iterable(masks)):
                raise CalibrationError(
                    f"{name}: its attention_mask has values other than 0 and 1. Pass 1 for text and 0 for padding, as a tokenizer "
                    f"returns them."
                )
            for row, mask in zip(ids, masks, strict=True):
                rows.append([token for token, is_text in zip(row, mask, strict=True) if is_text])
                longest, masked = max(longest, len(row)), masked + len(row) - len(rows[-1])
        if all(len(row) == longest for row in rows):
            return cls(tokens=_windows(rows, what))
        if not any(rows):
            raise CalibrationError(
                f"{what}: its attention_mask leaves out all tokens. Pass 1 for text and 0 for padding."
            )
        tokens = _tensor([token for row in rows for token in row], what)
        length = max(1, min(longest, len(tokens)))
        windows = _windows(tokens[: len(tokens) // length * length].view(-1, length), what)
        logger.warning(
            f"{what}: {masked:,} masked positions are left out, and the other {len(tokens):,} tokens of {len(rows):,} rows are "
            f"packed into {len(windows):,} windows of {length}."
        )
        return cls(tokens=windows, packed=True)

    def check_packed(self, framed: bool, called: str) -> None:
        """Refuse packed rows for a network whose windows begin and end with special tokens.

        Raises:
            CalibrationError: The rows were packed.
        """
        if framed and self.packed:
            raise CalibrationError(
                f"{called} reads each text between special tokens, so rows of different lengths cannot be packed into windows. "
                f"Pass the texts, or rows of one length without padding."
            )

    def windows(self, model: Model, recipe: Recipe, count: int, seqlen: int) -> tuple[Tensor | None, int]:
        """Return the first `count` windows and their length, of images in hidden states; None and `seqlen` for texts.

        Raises:
            CalibrationError, ModelError, RecipeError: The network does not take them.
        """
        self.check_packed(is_framed(model.network), type(model.network).__name__)
        windows = None if self.tokens is None else self.tokens[:count]  # `tune` takes more
        if windows is not None and self.kind is InputKind.IMAGES:
            return windows, _positions_of_images(model, recipe, windows)
        if isinstance(windows, Spoken):
            _check_spoken(model, windows)
        return windows, seqlen

    @property
    def kind(self) -> InputKind:
        """The kind of network input that this data is."""
        if isinstance(self.tokens, Spoken):
            return InputKind.SOUND
        return InputKind.IMAGES if self.tokens is not None and self.tokens.is_floating_point() else InputKind.TEXT

    def recorded(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the name of this data and the number and length of its windows.

        Raises:
            RecipeError: The recipe asks for another number or length.
        """
        options = recipe.calibration
        if self.tokens is None:
            return replace(recipe, calibration=replace(options, calibration=TEXTS))
        if self.kind is InputKind.IMAGES:
            return replace(recipe, calibration=replace(options, calibration=IMAGES, samples=len(self.tokens)))
        windows, seqlen = self.tokens.shape
        if options.seqlen not in (None, seqlen) or options.samples not in (Calibration().samples, windows):
            raise RecipeError(
                f"calibration has {windows} windows of {seqlen} tokens, but samples is {options.samples} and seqlen is "
                f"{options.seqlen}. Leave out both: all windows are used, at most the last ninth to measure losses."
            )
        name = SOUND if self.kind is InputKind.SOUND else TOKENS
        options = replace(options, calibration=name, samples=windows, seqlen=seqlen, first_token="none")  # as they are
        return replace(recipe, calibration=options)


def _windows(value: Any, what: str) -> Tensor:
    """Return (windows, seqlen) int64 token ids, or (images, channels, height, width) float32 pixel values."""
    tokens = _tensor(value, what)
    if tokens.is_floating_point() and tokens.ndim == 4 and tokens.numel() and bool(torch.isfinite(tokens).all()):
        return tokens.detach().to("cpu", torch.float32).contiguous()
    integers = not tokens.is_floating_point() and not tokens.is_complex() and tokens.dtype != torch.bool
    if not integers or tokens.ndim != 2 or tokens.numel() == 0 or tokens.shape[1] < 2:
        description = f"{str(tokens.dtype).removeprefix('torch.')} {tuple(tokens.shape)}"
        raise CalibrationError(f"{what} is {description}; expected {EXPECTED_DATA} with at least one window of two.")
    tokens = tokens.to(torch.int64)
    if (least := int(tokens.min())) < 0:
        raise CalibrationError(f"{what} contains the token id {least}; expected 0 or more. Leave out padding.")
    return tokens.detach().to("cpu").contiguous()


def _rows(values: Any) -> list[list[Any]]:
    """Return rows of numbers, which may be one row, as lists; anything else is a row without numbers."""
    if not isinstance(values, Sequence | Tensor | np.ndarray):
        return [[]]
    values = [
        each.tolist() if isinstance(each, Tensor | np.ndarray) else [*each] if isinstance(each, tuple) else each
        for each in values
    ]
    return values if values and isinstance(values[0], list) else [values]


def _tensor(value: Any, what: str) -> Tensor:
    """Return a tensor unchanged, or a new tensor with the values of an array or nested lists.

    Raises:
        CalibrationError: The value cannot be converted to a tensor.
    """
    try:
        if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided or value.is_nested):
            raise TypeError("no value at each place")
        return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, of objects, sparse, or without values
        raise CalibrationError(
            f"{what} is a {type(value).__name__} that cannot be converted to a tensor of values; expected {EXPECTED_DATA}."
        ) from error


def _spoken(sound: Tensor, tokens: Tensor, what: str) -> Tensor:
    """Return token ids (windows, seqlen) with the sound (windows, ..) that they transcribe.

    Raises:
        CalibrationError: The numbers of windows differ, or the sound is not finite.
    """
    if sound.ndim < 2 or len(sound) != len(tokens):
        raise CalibrationError(
            f"{what} is a pair of shapes {tuple(sound.shape)} and {tuple(tokens.shape)}; expected sound features and the "
            f"token ids (windows, seqlen) of their transcripts, with the same number of windows."
        )
    sound = sound.detach().to("cpu", torch.float32).contiguous()
    if not bool(torch.isfinite(sound).all()):
        raise CalibrationError(f"The sound of {what} contains NaN or Inf in float32. Compute the features again.")
    return Spoken.of(tokens, sound)


def _positions_of_images(model: Model, recipe: Recipe, images: Tensor) -> int:
    """Return the number of hidden states of each image: those of patches and of class tokens.

    Raises:
        ModelError: The network does not take images of this size.
        RecipeError: The recipe asks for bits per layer, which are not measured on images.
    """
    kind = type(model.network).__name__
    if recipe.allocate == "slope" or recipe.scheme.entropy_coded or recipe.files.block_types:
        raise RecipeError(
            f"{kind} takes images, on which the bits of each layer are not measured yet. Use --bits with whole numbers "
            f"and --allocate uniform."
        )
    with as_model_error(f"{kind} does not take images {tuple(images.shape[1:])}, (channels, height, width)"):
        return positions_per_window(model, images)


def _check_spoken(model: Model, windows: Spoken) -> None:
    """Refuse sound or transcripts that a network does not take.

    Raises:
        ModelError: The network does not take sound of this size.
        CalibrationError: Token ids are not in the vocabulary, or all begin with the start token.
    """
    kind = type(model.network).__name__
    check_vocabulary(windows, len(model.network.get_input_embeddings().weight))
    check_start(windows, model.config.decoder_start_token_id, kind)
    with as_model_error(f"{kind} does not take sound {tuple(windows.sound.shape[1:])} with {windows.shape[1]} tokens"):
        positions_per_window(model, windows)


def check_start(tokens: Tensor, start: int | None, called: str) -> None:
    """Refuse transcripts that all begin with the decoder's start token, which is added anyway.

    Args:
        tokens: (windows, seqlen) token ids of the transcripts.
        start: The decoder's start token; None if there is none.
        called: Name of the model in messages.

    Raises:
        CalibrationError: All transcripts begin with the start token.
    """
    if start is not None and bool((tokens[:, 0] == start).all()):
        raise CalibrationError(
            f"All token_ids begin with {start}, the start token that the decoder of {called} adds itself. "
            f"Pass them without it, as for labels=."
        )
