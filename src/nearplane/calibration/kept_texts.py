"""Texts that networks wrote, kept in the user's cache, so that a stopped run and other runs of a model take the same one."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.system.files import digest_of, size_and_date, write_whole

WORDS = 1  # of `self_written.py`; raised whenever it draws other tokens
WINDOWS = "windows"  # name of the tensor in a file
log = logging.getLogger("nearplane")


def cache_folder() -> Path:
    """Return the folder of what is kept: NEARPLANE_CACHE, or `nearplane` in the user's folder of caches."""
    if named := os.environ.get("NEARPLANE_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearplane"


def name_of_text(folder: Path, asked: tuple[object, ...]) -> str:
    """Return the name under which the text of a model is kept: it changes with the model's files and with what is asked."""
    files = [(path.name, size_and_date(path)) for path in sorted(folder.iterdir()) if path.is_file()]
    return digest_of(repr((WORDS, str(folder.resolve()), files, asked, torch.__version__)))


def kept_text(name: str) -> Tensor | None:
    """Return a kept text; None if there is none, or if it cannot be read."""
    with suppress(OSError, SafetensorError, KeyError):
        return load_file(_file(name))[WINDOWS]
    return None


def keep_text(name: str, windows: Tensor) -> None:
    """Keep a text, or log that the folder cannot be written."""
    try:
        write_whole(_file(name), save({WINDOWS: windows}))
    except FormatError as error:
        log.warning("the text that the network wrote is not kept, so that a stopped run writes it again: %s", error)


def _file(name: str) -> Path:
    return cache_folder() / "self" / f"{name}.safetensors"
