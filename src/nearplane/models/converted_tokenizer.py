"""Tokenizers in other files than tokenizer.json, converted to it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from nearplane.models.model import Model
from nearplane.models.pretrained import OTHER_TOKENIZERS, TOKENIZER, as_model_error, tokenizer_of


def tokenizer_folder(model: Model) -> Path:
    """Return the folder of a model, or if its tokenizer has no tokenizer.json, a temporary one with a converted tokenizer.

    The temporary folder lasts as long as the model.

    Raises:
        ModelError: A tokenizer in other files cannot be loaded.
    """
    folder = model.folder
    if (folder / TOKENIZER).is_file() or not any((folder / name).is_file() for name in OTHER_TOKENIZERS):
        return folder
    place = Path(tempfile.mkdtemp())
    weakref.finalize(model, shutil.rmtree, place, ignore_errors=True)
    save_tokenizer(folder, place, trust_remote_code=model.trust_remote_code)
    return place


def save_tokenizer(folder: Path, place: Path, *, trust_remote_code: bool = False) -> None:
    """Save the tokenizer of a model, and its config (which may name special tokens), into another folder.

    Raises:
        ModelError: The tokenizer cannot be loaded or saved.
    """
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    with as_model_error(f"{folder} has a tokenizer that transformers cannot save"):
        tokenizer.save_pretrained(place)
    shutil.copyfile(folder / "config.json", place / "config.json")
