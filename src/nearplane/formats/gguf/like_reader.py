"""Reader of a GGUF that was written by `--like`: its header says which rows of the checkpoint a tensor holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearplane.errors import ModelError
from nearplane.formats.gguf.contents import CHANGES, Content, Part
from nearplane.formats.gguf.gguf_container import gguf_package
from nearplane.formats.gguf.gguf_header import BLOCKS, SHA_SIZE, SUMS, TENSORS, Info
from nearplane.formats.gguf.gguf_layers import unpack
from nearplane.formats.gguf.gguf_reader import DENSE, GGUFReader
from nearplane.number_formats import TYPES
from nearplane.system.safetensors_files import DTYPE_NAMES, TensorInfo

Q8_0 = TYPES["q8_0"]


class Piece(NamedTuple):
    """Bytes in the file with some rows of a tensor of the checkpoint.

    Args:
        info: Their place in the file.
        part: The rows.
        content: What the tensor in the file holds.
        digest: SHA-256 of the bytes; None: not checked.
    """

    info: Info
    part: Part
    content: Content
    digest: str | None

    def into(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor of the checkpoint as the file stores them, as float32 where in blocks."""
        rows = CHANGES[self.content.change][0](tensor.reshape(self.part.flat)[self.part.rows.index()])
        rows = self._turned(rows).contiguous()
        if self.info.type in DENSE:
            return rows.to(DENSE[self.info.type])
        gguf = gguf_package()
        blocks = gguf.quants.quantize(rows.float().numpy(), gguf.GGMLQuantizationType(self.info.type))
        return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(self.info.type)))

    def back(self, stored: Tensor) -> Tensor:
        """Return rows of the checkpoint from values as the file stores them."""
        return CHANGES[self.content.change][1](self._turned(stored, back=True).reshape(-1, self.part.flat[1]))

    def _turned(self, rows: Tensor, back: bool = False) -> Tensor:
        if not self.content.turned:
            return rows
        if back:
            return rows.view(self.info.shape).mT.reshape(-1, self.part.flat[1])
        *others, inner, outer = self.info.shape
        return rows.view(*others, outer, inner).mT.reshape(-1, outer)


class LikeReader(GGUFReader):
    """Reader of the tensors of a file by their names in the checkpoint, if the file has all of their rows.

    Raises:
        ModelError: See `GGUFReader`.
    """

    def _fill(self, unfinished: bool) -> None:
        """Describe the tensors by their names in the checkpoint."""
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        texts, hashes = (self.header.texts(self.path, key) for key in (TENSORS, SUMS))
        for info, text, sums in zip(self.header.tensors, texts, hashes, strict=True):
            try:
                content = Content.from_json(text)
                pieces = content.pieces(info) if content.parts else []
                if content.kept and info.type not in (*DENSE, Q8_0.number):
                    raise ValueError(f"the type {BLOCKS[info.type].name}")
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise ModelError(
                    f"{self.path}: the description of {info.name} in {TENSORS} is wrong ({error!r}). Fetch the file "
                    f"again."
                ) from error
            for number, (piece, part) in enumerate(pieces):
                digest = sums[SHA_SIZE * number : SHA_SIZE * (number + 1)]
                name = part.name if self._kept(piece, content) else f"{part.name}_{BLOCKS[info.type].name}"
                self._pieces[name].append(Piece(piece, part, content, None if unfinished else digest))
        for name, same in self._pieces.items():
            self._describe(name, same)

    @staticmethod
    def _kept(info: Info, content: Content) -> bool:
        """Return whether a tensor is read as numbers: not as blocks of a quantized layer."""
        return info.type in DENSE or content.kept

    def _describe(self, name: str, pieces: list[Piece]) -> None:
        """Describe a tensor of the checkpoint if all of its rows are in the file."""
        first, rows = pieces[0], torch.cat([piece.part.rows.index() for piece in pieces])
        count, columns = first.part.flat
        if len(rows.unique()) != count or any(piece.part.shape != first.part.shape for piece in pieces):
            return
        kinds, shape = {piece.info.type for piece in pieces}, first.part.shape
        if not self._kept(first.info, first.content):
            kind = BLOCKS[first.info.type]
            if len(kinds) > 1 or columns % kind.columns:
                raise ModelError(f"{self.path}: the parts of {name} do not fit. Fetch the file again.")
            shape, dtype = (count, columns // kind.columns * kind.bytes), torch.uint8
        else:
            dtype = DENSE[first.info.type] if len(kinds) == 1 and first.info.type in DENSE else torch.float32
        size = math.prod(shape) * dtype.itemsize
        self.infos[name] = TensorInfo(DTYPE_NAMES[dtype], shape, size, self.path)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors in the form of the checkpoint, with rows in its order.

        Raises:
            FormatError: The data of a tensor do not match their SHA-256.
        """
        tensors = {}
        with self.path.open("rb") as file:
            for name in names:
                tensors[name] = self._joined(
                    name, lambda piece, name=name: _stored(self._raw(file, name, piece.info, piece.digest), piece)
                )
        return tensors

    def _joined(self, name: str, stored: Any) -> Tensor:
        """Return a tensor of the checkpoint from its pieces, `stored(piece)` as the file has them."""
        info, pieces = self.infos[name], self._pieces[name]
        first = pieces[0]
        if not self._kept(first.info, first.content):
            blocks = torch.empty(info.shape, dtype=torch.uint8)
            for piece in pieces:
                blocks[piece.part.rows.index()] = stored(piece).view(len(piece.part.rows), -1)
            return blocks
        dtype = next(each for each, known in DTYPE_NAMES.items() if known == info.dtype)
        values = torch.empty(first.part.flat, dtype=dtype)
        for piece in pieces:
            values[piece.part.rows.index()] = piece.back(stored(piece)).to(dtype)
        return values.view(info.shape)

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the original model as the file stores it, rounded; None if it lacks some of its rows."""
        if name not in self.infos:
            return None
        return self._joined(name, lambda piece: piece.into(tensor))

    def check_network(self, config: Mapping[str, Any]) -> None:
        """Accept the metadata, which are those of another program."""


def _stored(raw: bytearray, piece: Piece) -> Tensor:
    """Return the values of a piece, or its bytes if it belongs to a quantized layer."""
    info = piece.info
    if info.type in DENSE:
        return torch.frombuffer(raw, dtype=DENSE[info.type])
    blocks = torch.frombuffer(raw, dtype=torch.uint8)
    if not piece.content.kept:
        return blocks
    return unpack(Q8_0, blocks.view(math.prod(info.shape[:-1]), -1), info.shape[-1]).decode()
