"""List of tensors of a GPU whose contents lie in pinned memory of the host: hidden states between blocks."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any

import torch
from torch import Tensor


def pinned_bytes(size: int) -> int:
    """Return the bytes of the host that a pinned tensor of so many bytes takes: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length()


class StatesOnHost(MutableSequence[Tensor]):
    """List of tensors of one GPU, in pinned memory of the host.

    Every access sends the item to the GPU, equal to the bit; the tensor belongs to the caller. With each item the next one
    is sent as well, beside the computation, as the list is mostly read in order. So up to two items are on the GPU.

    Args:
        states: The first items.
    """

    def __init__(self, states: Iterable[Tensor] = ()) -> None:
        self._items: list[Tensor] = []  # in pinned memory
        self._copies: CopyStream | None = None  # of the device of the items
        self._next: tuple[int, Tensor] | None = None  # the item after the last one that was read, on its way
        self.extend(states)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        index, copies = range(len(self._items))[index], self._copies
        assert copies is not None, "an item has a device"
        sent = self._next[1] if self._next is not None and self._next[0] == index else copies.send(self._items[index])
        self._next, state = None, copies.arrived(sent)
        if index + 1 < len(self._items):
            self._next = index + 1, copies.send(self._items[index + 1])
        return state

    def __setitem__(self, index: Any, state: Any) -> None:
        index = range(len(self._items))[index]
        if self._next is not None and self._next[0] == index:
            self._next = None  # the item that is on its way changes
        self._items[index] = self._kept(state, self._items[index])

    def __delitem__(self, index: Any) -> None:
        self._next = None
        del self._items[index]

    def insert(self, index: int, value: Tensor) -> None:
        """Insert a tensor before item number `index`."""
        self._next = None
        self._items.insert(index, self._kept(value, None))

    def _kept(self, state: Tensor, old: Tensor | None) -> Tensor:
        """Copy a tensor to the host, into the memory of the item that it replaces if it has the same form."""
        self._copies = self._copies or CopyStream(state.device)
        if old is None or (old.shape, old.dtype) != (state.shape, state.dtype):
            old = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
        return old.copy_(state.detach(), non_blocking=True)


class CopyStream:
    """Copies from pinned memory of the host to a GPU, in a stream of their own beside its computation.

    Args:
        place: The GPU.
    """

    def __init__(self, place: torch.device) -> None:
        self._place, self._runtime = place, torch.get_device_module(place)
        self._stream = self._runtime.Stream(place)

    def send(self, x: Tensor) -> Tensor:
        """Begin to copy a tensor to the GPU, after all work that the GPU was given so far."""
        self._stream.wait_stream(self._runtime.current_stream(self._place))
        with self._runtime.stream(self._stream):
            return x.to(self._place, non_blocking=True)

    def arrived(self, x: Tensor) -> Tensor:
        """Return a sent tensor for computation, which waits for it on the GPU."""
        current = self._runtime.current_stream(self._place)
        current.wait_stream(self._stream)
        x.record_stream(current)  # its memory is not reused before the computation has read it
        return x
