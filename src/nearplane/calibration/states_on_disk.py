"""Hidden states kept in a file instead of memory: a list of tensors. Knows tensors and one file; not what they mean."""

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
"""Makes a list of hidden states: `list`, or one whose contents lie in a file."""


class _Kept(NamedTuple):
    """Where the bytes of a tensor begin, and what they are."""

    place: int
    size: int  # bytes
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class StatesOnDisk(MutableSequence[Tensor]):
    """A list of tensors whose contents lie in one file without a name, which is gone when the list is, however the program ends.

    An item is read anew each time: dtype, shape, device and every bit are those of what was put in, its memory is contiguous and
    the caller's own, so that changing it does not change the list. What was put in is let go. Items go in and out one at a time.
    Bytes are read and written, not mapped: they do not count as memory of the process. Items that replace others of the same size
    take their room in the file.

    Args:
        folder: where the file lies; None: the system's folder for temporary files, which must not be memory itself.
        states: what to begin with, one after the other.

    Raises:
        FormatError: the folder cannot be written to; later, when items are put in, the disk is full.
    """

    def __init__(self, folder: Path | None = None, states: Iterable[Tensor] = ()) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._items: list[_Kept] = []
        self._free: dict[int, list[int]] = {}  # {bytes: places of so many that hold nothing}
        self._end = 0
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - lives as long as the list
        except OSError as error:
            raise self._refused(error) from error
        self.close = weakref.finalize(self, self._file.close)
        """Delete the file. What is put in or taken out afterwards is a ValueError."""
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
        self._items[index] = self._written(state)

    def __delitem__(self, index: Any) -> None:
        self._release(self._items.pop(index))

    def insert(self, index: int, value: Tensor) -> None:
        """Put a tensor before that of this number."""
        self._items.insert(index, self._written(value))

    def _release(self, kept: _Kept) -> None:
        self._free.setdefault(kept.size, []).append(kept.place)

    def _written(self, state: Tensor) -> _Kept:
        left = _bytes(state.detach().cpu()).numpy().data
        size, free = len(left), self._free.get(len(left))
        place = free.pop() if free else self._end
        self._end = max(self._end, place + size)
        try:
            self._file.seek(place)
            while len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._refused(error) from error
        return _Kept(place, size, state.shape, state.dtype, state.device)

    def _read(self, kept: _Kept) -> Tensor:
        state = torch.empty(kept.shape, dtype=kept.dtype)
        left = _bytes(state).numpy().data
        self._file.seek(kept.place)
        while len(left):
            if not (count := self._file.readinto(left)):
                raise FormatError(
                    f"The file of hidden states in {self.folder} is shorter than it was written. Run again with another folder."
                )
            left = left[count:]
        return state.to(kept.device)

    def _refused(self, error: OSError) -> FormatError:
        return FormatError(
            f"Hidden states could not be kept in {self.folder} ({error}). Free some space or choose another folder "
            f"(TMPDIR), and run again."
        )


def _bytes(state: Tensor) -> Tensor:
    """Return the bytes of a tensor, in its own memory where that is contiguous."""
    return state.contiguous().reshape(-1).view(torch.uint8)
