"""Mutations of the files of a model, drawn with a `random.Random`: bits, lengths, offsets, tensors, headers, metadata.

Most know how a file is built, as blind ones are refused by its first check. Each is made in place; copy the folder before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edits import edit
from mutated_bytes import damaged
from mutated_gguf import gguf
from mutated_safetensors import safetensors

BYTES: Mapping[str, Callable[[bytes, random.Random], tuple[bytes, str, str]]] = {
    ".safetensors": safetensors,
    ".gguf": gguf,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What was done to which file.

    Args:
        kind: bits, lengths, offsets, tensors, truncation, header, metadata or files.
        file: name of the file.
        what: in words.
    """

    kind: str
    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def mutate(folder: Path, rng: random.Random, *, weights: float = 0.7) -> Mutation:
    """Mutate one file of a model's folder: of weights with this probability, else of text, and rarely the files as such."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in BYTES)
    path = rng.choice(paths)
    if rng.random() < 0.03:
        return _files(path, rng.choice(sorted(folder.iterdir())), rng)
    texts = sorted(path.name for path in folder.glob("*.json"))
    if rng.random() < weights or not texts:
        content, kind, what = BYTES[path.suffix](path.read_bytes(), rng)
        path.write_bytes(content)
        return Mutation(kind=kind, file=path.name, what=what)
    done = edit(folder, rng, texts)
    return Mutation(kind="metadata", file=done.file, what=done.what)


def of_bytes(path: Path, rng: random.Random) -> Mutation:
    """Mutate the bytes of one file."""
    content, kind, what = damaged(path.read_bytes(), rng)
    path.write_bytes(content)
    return Mutation(kind=kind, file=path.name, what=what)


def _files(path: Path, other: Path, rng: random.Random) -> Mutation:
    """Put something else in the place of a file."""
    kind = rng.choice(("missing", "empty", "folder", "pipe", "endless", "itself", "other"))
    content = other.read_bytes()
    path.unlink()
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "itself":
            path.symlink_to(path.name)
        case "other":
            path.write_bytes(content)
    return Mutation(kind="files", file=path.name, what=f"{kind} ({other.name})" if kind == "other" else kind)
