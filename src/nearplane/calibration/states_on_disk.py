"""List of tensors whose contents lie in one file instead of memory: hidden states between blocks."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable, MutableSequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearplane.errors import FormatError

Keep = Callable[[Iterable[Tensor]], MutableSequence[Tensor]]
"""Function that makes a list of hidden states: `list`, `StatesOnHost`, or `StatesOnDisk` with its folder."""


class _Entry(NamedTuple):
    """Position and form of a tensor in the file."""

    offset: int
    size: int  # bytes
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class StatesOnDisk(MutableSequence[Tensor]):
    """List of tensors in one nameless temporary file, which vanishes with the list, however the program ends.

    Every access reads the item anew, equal to the bit, with the same dtype, shape and device. Its memory is contiguous
    and belongs to the caller: changing it does not change the list. The list keeps no reference to the tensors that
    were put in. Bytes are read and written, not mapped, so they do not count as memory of the process. An item that
    replaces another of the same size reuses its offset in the file.

    Args:
        folder: Folder of the file; None: the system's folder for temporary files, which must not lie in memory.
        states: The first items.

    Raises:
        FormatError: The folder cannot be written to; later, when an item is put in, the disk is full.
    """

    def __init__(self, folder: Path | None = None, states: Iterable[Tensor] = ()) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._items: list[_Entry] = []
        self._free: dict[int, list[int]] = {}  # {size in bytes: offsets of free places of this size}
        self._end = 0
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - lives as long as the list
        except OSError as error:
            raise self._refused(error) from error
        self.close = weakref.finalize(self, self._file.close)
        """Delete the file. Any later access raises ValueError."""
        try:
            self.extend(states)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._read(self._items[index])

    def __setitem__(self, index: Any, state: Any) -> None:
        self._release(self._items[index])
        self._items[index] = self._write(state)

    def __delitem__(self, index: Any) -> None:
        self._release(self._items.pop(index))

    def insert(self, index: int, value: Tensor) -> None:
        """Insert a tensor before item number `index`."""
        self._items.insert(index, self._write(value))

    def _release(self, entry: _Entry) -> None:
        self._free.setdefault(entry.size, []).append(entry.offset)

    def _write(self, state: Tensor) -> _Entry:
        remaining = _bytes(state.detach().cpu()).numpy().data
        size, free = len(remaining), self._free.get(len(remaining))
        offset = free.pop() if free else self._end
        self._end = max(self._end, offset + size)
        try:
            self._file.seek(offset)
            while len(remaining):
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            raise self._refused(error) from error
        return _Entry(offset, size, state.shape, state.dtype, state.device)

    def _read(self, entry: _Entry) -> Tensor:
        state = torch.empty(entry.shape, dtype=entry.dtype)
        remaining = _bytes(state).numpy().data
        self._file.seek(entry.offset)
        while len(remaining):
            if not (count := self._file.readinto(remaining)):
                raise FormatError(
                    f"The file of hidden states in {self.folder} is truncated. Repeat the command with another folder (TMPDIR)."
                )
            remaining = remaining[count:]
        return state.to(entry.device)

    def _refused(self, error: OSError) -> FormatError:
        return FormatError(
            f"Hidden states could not be written to {self.folder} ({error}). Free some space or choose another folder (TMPDIR), "
            f"and repeat the command."
        )


def _bytes(state: Tensor) -> Tensor:
    """Return the bytes of a tensor; of a contiguous one without a copy."""
    return state.contiguous().reshape(-1).view(torch.uint8)
