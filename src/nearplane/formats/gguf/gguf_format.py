"""The format GGUF: writers and readers of files of nearplane's own, and of those by `--like`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearplane.formats.container import Container, Format, Place
from nearplane.formats.gguf.gguf_container import GGUFFile
from nearplane.formats.gguf.gguf_header import LIKE_KEY, read_header
from nearplane.formats.gguf.gguf_layers import Blocks
from nearplane.formats.gguf.gguf_reader import GGUFReader, path_in
from nearplane.formats.gguf.like_file import LikeFile
from nearplane.formats.gguf.like_reader import LikeReader


def writer(place: Place, *arguments: Any, **options: Any) -> Container:
    """Return the writer of a file, see `Container`."""
    return (GGUFFile if place.like is None else LikeFile)(place, *arguments, **options)


def reader(folder: Path, *, unfinished: bool = False) -> GGUFReader:
    """Return the reader of a file, see `GGUFReader`."""
    path = path_in(folder)
    like = path.is_file() and LIKE_KEY in read_header(path).fields
    return (LikeReader if like else GGUFReader)(folder, unfinished=unfinished)


FORMAT = Format(Blocks(), writer, reader)
