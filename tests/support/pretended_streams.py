"""Streams of a pretended GPU: work in two streams is unordered, unless one waits for the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Stream:
    """A queue of operations on a card, as `torch.cuda.Stream`.

    Args:
        card: Index of the card.
    """

    def __init__(self, card: int) -> None:
        self.card, self.done = card, 0
        self.seen: dict[Stream, int] = {}  # operations of other streams that this one comes after

    def wait_stream(self, other: Stream) -> None:
        """Let what is asked from now on come after all that the other stream was asked so far."""
        for stream, done in [*other.seen.items(), (other, other.done)]:
            self.seen[stream] = max(done, self.seen.get(stream, 0))

    def comes_after(self, other: Stream, done: int) -> bool:
        """Return whether what is asked now comes after an operation of another stream."""
        return other is self or self.seen.get(other, 0) >= done


class Streams:
    """The streams of one thread's operations, and which of them wrote each storage last."""

    def __init__(self, cards: int) -> None:
        self.defaults = [Stream(card) for card in range(cards)]
        self.current = list(self.defaults)
        self.several = False  # with one stream a card nothing can be unordered
        self.written: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Stream, int]] = weakref.WeakKeyDictionary()

    def made(self, card: int) -> Stream:
        """Return a new stream."""
        self.several = True
        return Stream(card)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """Ask what is asked inside of this stream."""
        before, self.current[stream.card] = self.current[stream.card], stream
        try:
            yield
        finally:
            self.current[stream.card] = before

    def order(self, name: str, card: int, reads: Sequence[torch.UntypedStorage], writes: Sequence[Any]) -> None:
        """Note an operation in the current stream.

        Raises:
            RuntimeError: Another stream wrote what it reads, and was not waited for.
        """
        now = self.current[card]
        for storage in reads:
            last = self.written.get(storage)
            if last is not None and not now.comes_after(*last):
                raise RuntimeError(f"{name} reads what another stream writes. Call wait_stream before.")
        now.done += 1
        for storage in writes:
            self.written[storage] = now, now.done
