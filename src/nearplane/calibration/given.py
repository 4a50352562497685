"""What Python programs hand over instead of paths: a model object, texts, tokens, images, sound with what is said in it.

An object is saved to a temporary folder and streamed from there like any model; texts and tokens become windows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.models.kinds import Spoken, Taken
from nearplane.models.pretrained import in_a_sentence
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.spellings import SPELLINGS

TEXTS, TOKENS = "texts given in Python", "tokens given in Python"  # in the record, where a path would be
IMAGES, SOUND = "images given in Python", "sound given in Python"
# what to pass in place of what the record does not hold
AGAIN: dict[object, str] = dict.fromkeys((IMAGES, SOUND), "the same again from Python:")
AGAIN |= {TEXTS: "a .jsonl file of them with --calibration, or", TOKENS: "them from Python with --calibration, or"}
EXPECTED = (
    "a path, a list of texts, whole numbers (windows, seqlen), pixel values (images, channels, height, width), or a pair of "
    "tensors or arrays (input_features, token_ids)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Texts, or tokens: (windows, seqlen) int64, which may have their sound, or (images, channels, height, width) float32.

    The other is None.
    """

    texts: tuple[str, ...] | None = None
    tokens: Tensor | None = None

    @classmethod
    def of(cls, value: object, what: str = "calibration") -> Given | None:
        """Take a list of texts, or a tensor or array of token ids or pixel values, or a pair of features of sound and token ids.

        None where it is a path or nothing.

        Raises:
            CalibrationError: it is something else, or holds nothing.
        """
        if value is None or isinstance(value, str | os.PathLike):
            return None
        if isinstance(value, Sequence) and value and all(isinstance(text, str) for text in value):
            return cls(texts=tuple(value))
        if isinstance(value, Sequence) and [isinstance(part, Tensor | np.ndarray) for part in value] == [True, True]:
            sound, tokens = (_tensor(part, f"{what}[{place}]") for place, part in enumerate(value))
            if sound.is_floating_point() and not tokens.is_floating_point():  # else two images
                return cls(tokens=_spoken(sound, _windows(tokens, f"{what}[1]"), what))
        return cls(tokens=_windows(value, what))

    @property
    def kind(self) -> Taken:
        """What it is for."""
        if isinstance(self.tokens, Spoken):
            return Taken.SOUND
        return Taken.IMAGES if self.tokens is not None and self.tokens.is_floating_point() else Taken.TEXT

    def recorded(self, recipe: Recipe) -> Recipe:
        """Return a recipe that says what was given, and the sizes of windows of tokens.

        Raises:
            RecipeError: it asks for other sizes.
        """
        wanted = recipe.calibration
        if self.tokens is None:
            return replace(recipe, calibration=replace(wanted, calibration=TEXTS))
        if self.kind is Taken.IMAGES:
            return replace(recipe, calibration=replace(wanted, calibration=IMAGES, samples=len(self.tokens)))
        windows, seqlen = self.tokens.shape
        if wanted.seqlen not in (None, seqlen) or wanted.samples not in (Calibration().samples, windows):
            raise RecipeError(
                f"calibration holds {windows} windows of {seqlen} tokens; samples is {wanted.samples}, seqlen {wanted.seqlen}. "
                f"Leave both out: all windows are used as they are, the last ones, at most a ninth, to measure losses on."
            )
        named = SOUND if self.kind is Taken.SOUND else TOKENS
        return replace(recipe, calibration=replace(wanted, calibration=named, samples=windows, seqlen=seqlen))


def with_text(recipe: Recipe, calibration: object) -> Recipe:
    """Return the recipe of a record with its text where it is now, if a path says so; see `Given.of` for what else it may be."""
    if not isinstance(calibration, str | os.PathLike):
        return recipe
    return replace(recipe, calibration=replace(recipe.calibration, calibration=str(calibration)))


def _windows(value: Any, what: str) -> Tensor:
    """Return (windows, seqlen) int64 token ids, or (images, channels, height, width) float32 pixel values."""
    tokens = _tensor(value, what)
    if tokens.is_floating_point() and tokens.ndim == 4 and tokens.numel() and bool(torch.isfinite(tokens).all()):
        return tokens.detach().to("cpu", torch.float32).contiguous()
    whole = not tokens.is_floating_point() and not tokens.is_complex() and tokens.dtype != torch.bool
    if not whole or tokens.ndim != 2 or tokens.numel() == 0 or tokens.shape[1] < 2:
        found = f"{str(tokens.dtype).removeprefix('torch.')} {tuple(tokens.shape)}"
        raise CalibrationError(f"{what} is {found}; expected {EXPECTED} with at least one window of two.")
    tokens = tokens.to(torch.int64)
    if (least := int(tokens.min())) < 0:
        raise CalibrationError(f"{what} holds the token id {least}; expected 0 or more: leave padding out.")
    return tokens.detach().to("cpu").contiguous()


def _tensor(value: Any, what: str) -> Tensor:
    """Return a tensor of a tensor, an array or nested lists, in memory of its own unless it is one already.

    Raises:
        CalibrationError: it makes up none.
    """
    try:
        return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or of objects
        raise CalibrationError(
            f"{what} is a {type(value).__name__} that makes up no tensor; expected {EXPECTED}."
        ) from error


def _spoken(sound: Tensor, tokens: Tensor, what: str) -> Tensor:
    """Return token ids (windows, seqlen) with the sound (windows, ..) in which they are said.

    Raises:
        CalibrationError: the two do not belong together, or the sound is not finite.
    """
    if sound.ndim < 2 or len(sound) != len(tokens):
        raise CalibrationError(
            f"{what} is a pair of {tuple(sound.shape)} and {tuple(tokens.shape)}; expected features of sound and the token ids "
            f"(windows, seqlen) that are said in it, of as many windows."
        )
    sound = sound.detach().to("cpu", torch.float32).contiguous()
    if not bool(torch.isfinite(sound).all()):
        raise CalibrationError(f"{what} holds NaN or Inf in its sound, in float32. Make the features again.")
    return Spoken.of(tokens, sound)


def taken(spellings: Mapping[str, Any]) -> tuple[Given | None, dict[str, Any]]:
    """Return texts or tokens among the keywords of `quantize`, and the other keywords.

    Raises:
        CalibrationError: they are neither.
    """
    for word, value in spellings.items():
        if SPELLINGS.get(word, word) == "calibration" and (given := Given.of(value, word)) is not None:
            return given, {other: spellings[other] for other in spellings if other != word}
    return None, dict(spellings)


def refuse_lost(calibration: object) -> None:
    """Refuse to look for what was given in Python where a path is expected.

    Raises:
        CalibrationError: the record does not hold it; says how to pass it again.
    """
    if calibration in AGAIN:
        raise CalibrationError(
            f"The calibration was {calibration}, of which the record holds the SHA-256 alone. Pass {AGAIN[calibration]} "
            f"nearplane.verify(..., calibration=...)."
        )


def called(model: str | Path | PreTrainedModel) -> str:
    """Return how the record names a model."""
    if isinstance(model, str | os.PathLike):
        return str(model)
    return str(getattr(model, "name_or_path", "") or f"{type(model).__name__} given in Python")


@contextmanager
def as_folder(model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[str]:
    """Yield the path or hub id of a model: that given, or of a temporary folder to which an object was saved.

    Raises:
        RecipeError: a tokenizer is given beside a path.
        ModelError: the object is no model that transformers saves.
    """
    refuse_tokenizer(model, tokenizer)
    if isinstance(model, str | os.PathLike):
        yield str(model)
        return
    check_model(model)
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ModelError(f"The {type(model).__name__} that was given is quantized already; start from the original.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"The {type(model).__name__} that was given has weights on the meta device, or sent away by accelerate: pass the "
            f"folder that it was loaded from."
        )
    with tempfile.TemporaryDirectory(prefix="nearplane-") as place:
        with in_a_sentence(
            f"The {type(model).__name__} that was given could not be saved to {place} (TMPDIR chooses where)"
        ):
            model.save_pretrained(place)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)
        yield place


def refuse_tokenizer(model: object, tokenizer: object) -> None:
    """Refuse a tokenizer beside the path of a model, whose folder has its own.

    Raises:
        RecipeError: both are given.
    """
    if tokenizer is not None and isinstance(model, str | os.PathLike):
        raise RecipeError(f"tokenizer= goes with a model object; that of {model} is the one in its folder.")


def check_model(model: object) -> PreTrainedModel:
    """Return a model object; refuse what is neither a path nor a model of transformers.

    Raises:
        ModelError: says what is expected.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model is a {type(model).__name__}; expected a folder, a hub id or a PreTrainedModel of transformers (of adapters "
            f"or compiled modules, the model inside: merge_and_unload(), _orig_mod)."
        )
    return model
