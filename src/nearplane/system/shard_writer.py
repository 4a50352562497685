"""Writer of a folder of safetensors: one part after the other, which are joined to few files in the end.

    part-00001.safetensors             tensors of one call of `write`, until they are joined
    model.safetensors                  all tensors; or, where they have more than `MAX_FILE` bytes,
    model-00001-of-00003.safetensors   files of up to `MAX_FILE` bytes and an index

A file is equal to what `safetensors.torch.save_file` writes of its tensors. Parts are copied into it in small pieces and
deleted once it is on disk. So joining takes as much disk space as the largest file, and no memory. Every tensor is compared
with its checksum from before it was written. A join that was killed goes on: files that are there are only read.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nearplane.errors import FormatError, ModelError
from nearplane.system.files import flush, flush_all, size_and_date
from nearplane.system.paths import INCOMPLETE, INDEX, MARK, MAX_FILE, WEIGHTS_FILE
from nearplane.system.safetensors_files import (
    Kind,
    checksum,
    file_order,
    index_text,
    read_shard_header,
    shard_header,
    shard_size,
)

PIECE = 4 << 20  # bytes that are copied at once
PORTION = 2 * 10**9  # bytes of tensors that are held and written together, at most, unless one tensor is larger


def file_names(count: int) -> list[str]:
    """Return the names of so many files with all tensors of a checkpoint."""
    numbers = range(1, count + 1)
    return [WEIGHTS_FILE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in numbers]


def portions(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return names in portions of at most `MAX_FILE` bytes, in their order; what is larger is a portion of its own."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, each in sizes.items():
        if groups[-1] and size + each > MAX_FILE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += each
    return groups


def in_portions(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in portions of at most `PORTION` bytes, in their order; what is larger is a portion of its own."""
    portion: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if portion and sum(each.nbytes for each in portion.values()) + tensor.nbytes > PORTION:
            yield portion
            portion = {}
        portion[name] = tensor
    yield portion


def files_of(parts: Mapping[str, Mapping[str, Kind]]) -> dict[str, list[str]]:
    """Return by name the files that parts are joined to, each with the names of its parts."""
    groups = portions({part: sum(size for _, _, size in tensors.values()) for part, tensors in parts.items()})
    return dict(zip(file_names(len(groups)), groups, strict=True))


class ShardWriter:
    """Writer of a folder of safetensors; the folder is marked incomplete until `finish`.

    Args:
        folder: Folder to write; it is made if missing.
        total: Number of calls of `write`, or None if it is unknown until the end.
        checksums: Whether there is an index with a checksum of every tensor, even beside a single file.
        kind: Value of "format" in the metadata of the files.

    Raises:
        FormatError: A file cannot be written, for example because the disk is full.
    """

    def __init__(self, folder: Path, total: int | None, *, checksums: bool = False, kind: str = "pt") -> None:
        self.folder, self.total, self.kind = folder, total, kind
        self._checksums: dict[str, str] | None = {} if checksums else None
        self._parts: dict[str, dict[str, Kind]] = {}
        self._crcs: dict[str, int] = {}  # CRC-32 of the bytes of every tensor
        self._dates: dict[str, tuple[int, int, int] | None] = {}  # of every part when it was written or read
        self._kept: set[str] = set()  # parts that a `state` names
        self._written = 0  # calls of `write`
        self._digests: dict[str, str] = {}  # SHA-256 of the files that are joined
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / INCOMPLETE).exists():
            (folder / INCOMPLETE).write_text(MARK)
        self._mode = (folder / INCOMPLETE).stat().st_mode  # safetensors makes files that only their owner can read

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(size for tensors in self._parts.values() for _, _, size in tensors.values())

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write tensors as a part, or several of at most `MAX_FILE` bytes, and return the bytes of these files.

        Raises:
            FormatError: The disk is full, or an earlier part has changed.
        """
        self._check_parts()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        if self._checksums is not None:
            self._checksums |= {name: checksum(tensor) for name, tensor in tensors.items()}
        groups = portions({name: tensor.nbytes for name, tensor in tensors.items()})
        self._written += 1
        return sum(self._write_part({name: tensors[name] for name in names}) for names in groups)

    def _write_part(self, tensors: dict[str, Tensor]) -> int:
        """Write one part and return its bytes."""
        path = self.folder / f"part-{len(self._parts) + 1:05d}.safetensors"
        try:
            save_file(tensors, path, {"format": self.kind})
        except (SafetensorError, OSError) as error:
            raise self._unwritten(path, error) from error
        path.chmod(self._mode)
        self._parts[path.name] = _kinds(read_shard_header(path)[1])
        for name, tensor in tensors.items():
            self._crcs[name] = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._dates[path.name] = size_and_date(path)
        return path.stat().st_size

    def _unwritten(self, path: Path, error: Exception) -> FormatError:
        return FormatError(
            f"{path} could not be written ({error}). Free some space and repeat the command. The folder is marked "
            f"{INCOMPLETE} and does not load."
        )

    def _check_parts(self) -> None:
        """Refuse parts that have changed; those of the same size and date are not read.

        Raises:
            FormatError: A part is missing or has changed.
        """
        for part, before in self._dates.items():
            if (now := size_and_date(self.folder / part)) != before:
                self._read(self.folder / part, self._parts[part])
                self._dates[part] = now

    def state(self) -> dict[str, Any]:
        """Return the state of the writer as JSON, for `resume`, after flushing all parts to disk.

        Raises:
            FormatError: A part has changed.
        """
        self._check_parts()
        for part in self._dates.keys() - self._kept:
            flush(self.folder / part)
        flush(self.folder)  # the folder lists the parts
        self._kept = set(self._parts)
        return {"written": self._written, "parts": self._parts, "crcs": self._crcs, "checksums": self._checksums}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state` of another writer; files that do not belong to it are deleted.

        Raises:
            FormatError: A part is missing or has changed.
        """
        self._written, self._crcs, self._checksums = int(state["written"]), dict(state["crcs"]), state["checksums"]
        self._parts = {
            part: {name: (dtype, shape, size) for name, (dtype, shape, size) in tensors.items()}
            for part, tensors in state["parts"].items()
        }
        self._kept, files = set(self._parts), files_of(self._parts)
        for file, parts in files.items():
            if (path := self.folder / file).is_file():  # its parts were joined before the run was stopped
                self._digests[file] = self._read(path, self._tensors_of(parts))
                continue
            for part in parts:
                self._read(self.folder / part, self._parts[part])
                self._dates[part] = size_and_date(self.folder / part)
        for path in self.folder.glob("*.safetensors*"):
            if path.name not in self._parts and path.name not in files:
                path.unlink()

    def join(self) -> int:
        """Join the parts, unless that was done, and return the bytes of the files.

        Raises:
            FormatError: The disk is full, a part has changed, or `write` was called too few times.
        """
        if self.total is not None and self._written != self.total:
            raise FormatError(f"{self.folder}: {self._written} shards were written, expected {self.total}.")
        files = files_of(self._parts)
        for file, parts in files.items():
            paths = [self.folder / part for part in parts]
            if file not in self._digests:
                self._digests[file] = self._joined(self.folder / file, paths)
            flush(self.folder)
            for path in paths:
                path.unlink(missing_ok=True)
        self._dates = {}
        return sum((self.folder / file).stat().st_size for file in files)

    def _joined(self, path: Path, parts: Sequence[Path]) -> str:
        """Join parts to a file and return its SHA-256."""
        tensors = self._tensors_of(part.name for part in parts)
        if len(parts) > 1:
            return self._copied(path, parts, tensors)
        digest = self._read(parts[0], tensors)
        parts[0].rename(path)
        return digest

    def _tensors_of(self, parts: Iterable[str]) -> dict[str, Kind]:
        return {name: kind for part in parts for name, kind in self._parts[part].items()}

    def _copied(self, path: Path, parts: Sequence[Path], tensors: Mapping[str, Kind]) -> str:
        """Write a file with the tensors of parts and return its SHA-256."""
        begins = {part: self._begins(part, self._parts[part.name]) for part in parts}
        places = {name: (part, begin) for part in parts for name, begin in begins[part].items()}
        pieces = (self._pieces(name, *places[name], tensors[name][2]) for name in file_order(tensors))
        digest, copy = hashlib.sha256(), path.with_name(f"{path.name}.part")
        try:
            with copy.open("wb") as file:
                for piece in chain([shard_header(tensors, self.kind)], chain.from_iterable(pieces)):
                    digest.update(piece)
                    file.write(piece)
            copy.chmod(self._mode)
            flush(copy)
            os.replace(copy, path)
        except OSError as error:
            raise self._unwritten(path, error) from error
        finally:
            copy.unlink(missing_ok=True)  # after an error its space is needed
        return digest.hexdigest()

    def _read(self, path: Path, tensors: Mapping[str, Kind]) -> str:
        """Compare a file with the tensors that were written to it; return its SHA-256.

        Raises:
            FormatError: The file is missing or has changed.
        """
        begins = self._begins(path, tensors)
        digest = hashlib.sha256(read_shard_header(path)[0])
        for name in sorted(begins, key=lambda name: begins[name]):
            for piece in self._pieces(name, path, begins[name], tensors[name][2]):
                digest.update(piece)
        return digest.hexdigest()

    def _begins(self, path: Path, tensors: Mapping[str, Kind]) -> dict[str, int]:
        """Return the position of every tensor in a file, which must hold these tensors and no others."""
        try:
            header, found = read_shard_header(path)
        except ModelError as error:
            raise self._changed(path) from error
        if _kinds(found) != tensors:
            raise self._changed(path)
        return {name: len(header) + about["data_offsets"][0] for name, about in found.items()}

    def _pieces(self, name: str, path: Path, begin: int, rest: int) -> Iterator[bytes]:
        """Yield the bytes of a tensor in a file in pieces, and compare them with its checksum."""
        crc = 0
        with path.open("rb") as file:
            file.seek(begin)
            while rest and (piece := file.read(min(PIECE, rest))):
                crc, rest = zlib.crc32(piece, crc), rest - len(piece)
                yield piece
        if rest or crc != self._crcs[name]:
            raise self._changed(path)

    def _changed(self, path: Path) -> FormatError:
        """Return the error for a file that another program changed or deleted."""
        fault = "has changed since it was written" if path.is_file() else "is missing, although it was written"
        again = path.name in self._parts and path.name not in self._kept  # the journal does not need it
        remedy = "Repeat the command, which makes it again" if again else "Start again with --overwrite"
        return FormatError(f"{path} {fault}, by another program or a fault of the disk. {remedy}.")

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file and of the index, after `join`."""
        index = self._index(self._parts)
        return self._digests | ({} if index is None else {INDEX: hashlib.sha256(index.encode()).hexdigest()})

    def _index(self, parts: Mapping[str, Mapping[str, Kind]]) -> str | None:
        """Return the index of parts, or None where there is a single file, which needs none."""
        return _index_of(parts, self._checksums)

    def size_with(self, *blocks: Mapping[str, Kind]) -> int:
        """Return the bytes of all files and of the index, if these tensors were written last."""
        parts = _with_parts(self._parts, blocks)
        return _bytes_of(parts, self.kind) + len((self._index(parts) or "").encode())

    def finish(self) -> None:
        """Join the parts, write the index and remove the mark. Call it last, after all other files are written."""
        self.join()
        if (index := self._index(self._parts)) is not None:
            (self.folder / INDEX).write_text(index)
        flush_all(self.folder)  # else a power cut could leave empty files without the mark
        (self.folder / INCOMPLETE).unlink(missing_ok=True)


def size_of_files(blocks: Iterable[Mapping[str, Kind]], *, checksums: bool, kind: str) -> int:
    """Return the bytes of the files and of the index of a folder in which these tensors are written block by block."""
    parts = _with_parts({}, blocks)
    return _bytes_of(parts, kind) + len((_index_of(parts, {} if checksums else None) or "").encode())


def _with_parts(
    parts: Mapping[str, Mapping[str, Kind]], blocks: Iterable[Mapping[str, Kind]]
) -> dict[str, Mapping[str, Kind]]:
    """Return parts followed by those of more blocks."""
    more = dict(parts)
    for block in blocks:
        for names in portions({name: size for name, (_, _, size) in block.items()}):
            more[f"{len(more)}"] = {name: block[name] for name in names}
    return more


def _bytes_of(parts: Mapping[str, Mapping[str, Kind]], kind: str) -> int:
    """Return the bytes of the files that parts are joined to."""
    files = ({name: each for part in group for name, each in parts[part].items()} for group in files_of(parts).values())
    return sum(shard_size(tensors, kind) for tensors in files)


def _index_of(parts: Mapping[str, Mapping[str, Kind]], checksums: Mapping[str, str] | None) -> str | None:
    """Return the index of parts, or None where there is a single file, which needs none."""
    files = files_of(parts)
    if len(files) == 1 and checksums is None:
        return None
    names = {name: file for file, group in files.items() for part in group for name in parts[part]}
    if checksums is not None:
        checksums = dict.fromkeys(names, 8 * "0") | dict(checksums)
    return index_text(names, checksums, sum(size for part in parts.values() for _, _, size in part.values()))


def _kinds(header: Mapping[str, Any]) -> dict[str, Kind]:
    """Return dtype, shape and bytes of the tensors in a header."""
    kinds = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        kinds[name] = about["dtype"], about["shape"], end - begin
    return kinds
