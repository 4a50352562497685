"""Writer of OUT/model.gguf by `--like`: header, order and unquantized tensors are those of another GGUF."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.formats.gguf.gguf_container import EMBEDDING_TENSORS, GGUFFile, gguf_package
from nearplane.formats.gguf.gguf_header import (
    KEY_PREFIX,
    LIKE_KEY,
    LIST,
    MAGIC,
    METADATA,
    NUMBER,
    RECORD_KEY,
    SHA_SIZE,
    SUMS,
    TENSORS,
    TEXT,
    VERSION,
    WIDTH,
    Info,
    nbytes,
    padded,
    read_header,
)
from nearplane.formats.gguf.gguf_reader import DENSE
from nearplane.formats.gguf.like import Q8_0, Like
from nearplane.number_formats import TYPES
from nearplane.system.safetensors_files import DTYPE_NAMES

COPIED_BYTES = 1 << 24  # at once
OWN = ("general.file_type", "general.quantization_version", "general.alignment", KEY_PREFIX)  # not taken from the file
UNSIGNED = 4  # number of the type of whole numbers of 32 bits


class LikeFile(GGUFFile):
    """A GGUF with the header of another one, the codes of quantized layers, and all else as in the other file."""

    def _prepare(self) -> None:
        """Refuse types that the file cannot have; set the pieces of quantized layers by name of the weight."""
        assert self.place.like is not None, "chosen for a file to be like"
        self._like: Like = self.place.like
        self._pieces: dict[str, list[tuple[str, Tensor]]] = {}
        self._ours: set[str] = set()  # names of these pieces
        self._kinds()

    def _kinds(self) -> list[int]:
        """Return the types of the tensors.

        Raises:
            RecipeError: Layers of one tensor have several types, or embeddings are to have another than in the file.
        """
        kinds = []
        for info, content in zip(self._like.header.tensors, self._like.contents, strict=True):
            kind = Q8_0.number if self._like.in_q8_0(info, content) else info.type
            if self._like.quantized(content):
                names = {part.name.removesuffix(".weight") for part in content.parts}
                types = {self.config["types"][name] for name in names}
                if len(types) > 1:
                    raise RecipeError(
                        f"{info.name} in {self._like.path.name} has the layers {', '.join(sorted(names)[:3])}.., which "
                        f"would have the types {' and '.join(sorted(types))}. Use one type for them, "
                        f"for example with --layer."
                    )
                if (chosen := types.pop()) not in TYPES:
                    raise RecipeError(
                        f"{info.name} would have the type {chosen}, whose global scale {self._like.path.name} has no tensor "
                        f"for. Use --grid mxfp4, or leave out --like."
                    )
                kind = TYPES[chosen].number
            elif (
                info.name in EMBEDDING_TENSORS
                and NUMBER.get((self.config.get("embeddings") or "").upper(), kind) != kind
            ):
                raise RecipeError(
                    f"--embeddings {self.config['embeddings']}, but {info.name} is {DTYPE_NAMES[DENSE[kind]]} in "
                    f"{self._like.path.name}, whose unquantized tensors are kept. Leave out --embeddings, or "
                    f"convert to that type."
                )
            kinds.append(kind)
        return kinds

    def _begin_file(self, path: Path) -> int:
        """Write the header; return the number of bytes that the file will have in the end."""
        header, contents = self._like.header, self._like.contents
        infos, names = [], []
        end = 0
        for info, kind, content in zip(header.tensors, self._kinds(), contents, strict=True):
            size = nbytes(path, info.name, info.shape, kind)
            shape = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
            infos.append(_text(info.name) + shape + struct.pack("<IQ", kind, end))
            names.append(replace(content, kept=not self._like.quantized(content)).to_json())
            end += padded(size)
        pieces = [1 if content.turned else max(1, len(content.parts)) for content in contents]
        own = {
            "general.file_type": _number(self._file_type()),
            "general.quantization_version": _number(gguf_package().GGML_QUANT_VERSION),
            LIKE_KEY: _texted(self._like.path.name),
            f"{KEY_PREFIX}quantization_config": _texted(json.dumps(self.config)),
            RECORD_KEY: _texted(" " * max(self.room, 1)),  # overwritten in the end, as are the hashes
            METADATA: _texted("0" * SHA_SIZE),
            TENSORS: _list(names),
            SUMS: _list(["0" * SHA_SIZE * count for count in pieces]),
        }
        with self._like.path.open("rb") as source, path.open("wb") as file:
            taken = [key for key in header.fields if not key.startswith(OWN)]
            file.write(MAGIC + struct.pack("<IQQ", VERSION, len(infos), len(taken) + len(own)))
            for key in taken:
                place = header.places[key]
                source.seek(place.start - 4)  # with the type of the value
                file.write(_text(key) + source.read(len(place) + 4))
            file.write(b"".join(_text(key) + value for key, value in own.items()) + b"".join(infos))
            file.write(bytes(padded(file.tell()) - file.tell()))
            return file.tell() + end

    def tokenizer_read_again(self) -> dict[str, str]:
        """Return nothing: the tokenizer is that of the other file, which llama.cpp's converter wrote."""
        return {}

    def _find_places(self, path: Path) -> None:
        """Read the positions of tensors from the header; names are those in the file, with the number of the piece."""
        header = read_header(path)
        self._fields, self._places, self._size = header.fields, header.places, header.size
        self._infos, self._pieces, self._ours = {}, {}, set()
        for info, content in zip(header.tensors, self._like.contents, strict=True):
            for number, (piece, part) in enumerate(content.pieces(info) if content.parts else [(info, None)]):
                key = f"{info.name}#{number}"
                self._infos[key] = piece
                if part is not None and self._like.quantized(content):
                    self._pieces.setdefault(part.name, []).append((key, part.rows.index()))
                    self._ours.add(key)

    def _start(self) -> dict[str, Tensor]:
        """Create the file, with all tensors that are not quantized."""
        file = self._file = self._open()
        sources = {info.name: info for info in self._like.header.tensors}
        begun = {name: info.begin for name, info in sources.items()}
        with self._like.path.open("rb") as source:
            for key, info in self._infos.items():
                size = math.prod(info.shape) * WIDTH[sources[info.name].type]
                if key not in self._ours:
                    source.seek(begun[info.name])
                    file.seek(info.begin)
                    self._sums[key] = _copied(source, size, file, info, sources[info.name].type)
                begun[info.name] += size
        return {}

    def _share(self, name: str) -> int:
        """Return the bytes of a tensor that are counted when its block is written; others count with the header."""
        return self._infos[name].size if name in self._ours else 0

    def _store(self, file: BinaryIO, tensors: Mapping[str, Tensor]) -> int:
        """Write the tensors of quantized layers; return their bytes."""
        size = 0
        for name, tensor in tensors.items():
            stem, _, suffix = name.rpartition(".")
            if suffix in self.layers.SUFFIXES:
                for key, index in self._pieces[f"{stem}.weight"]:
                    self._put(file, key, self._infos[key], tensor.cpu()[index])
                    size += self._share(key)
        return size


def _copied(source: BinaryIO, size: int, file: BinaryIO, info: Info, kind: int) -> str:
    """Copy `size` bytes of a tensor of type `kind`, as Q8_0 if `info` says so; return the SHA-256 of the result."""
    gguf = gguf_package()
    digest, row = sha256(), info.shape[-1] * WIDTH[kind]
    most = max(row, COPIED_BYTES // row * row)  # whole rows at once
    for begin in range(0, size, most):
        data = source.read(min(most, size - begin))
        if info.type == Q8_0.number:
            values = torch.frombuffer(bytearray(data), dtype=DENSE[kind]).float().view(-1, info.shape[-1])
            data = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0).tobytes()
        file.write(data)
        digest.update(data)
    return digest.hexdigest()


def _text(text: str) -> bytes:
    """Return a text with its length before it."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _number(number: int) -> bytes:
    """Return the value of a key: a number."""
    return struct.pack("<II", UNSIGNED, number)


def _texted(text: str) -> bytes:
    """Return the value of a key: a text."""
    return struct.pack("<I", TEXT) + _text(text)


def _list(texts: Sequence[str]) -> bytes:
    """Return the value of a key: a list of texts."""
    return struct.pack("<IIQ", LIST, TEXT, len(texts)) + b"".join(map(_text, texts))
