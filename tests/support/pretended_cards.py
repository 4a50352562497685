"""The cards of a pretended GPU: their memory, and what `torch.get_device_module` says of them."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pretended_streams import Stream, Streams
from traffic import Places, Traffic

KIND = "pretend"


@dataclass(eq=False)
class Card:
    """Memory of one card.

    Args:
        index: Its number, as in `pretend:0`.
        memory: Bytes that it has; may be changed at any time. Tensors beyond it raise torch.OutOfMemoryError.
        live: Bytes of all storages on it now.
        peak: The most bytes so far.
    """

    index: int
    memory: int
    live: int = 0
    peak: int = 0
    sizes: dict[weakref.ref[torch.UntypedStorage], int] = field(default_factory=dict)

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a CPU tensor, which stands for one on this card, for as long as it lives.

        Raises:
            torch.OutOfMemoryError: The card has less memory.
        """
        storage = tensor.untyped_storage()
        before, size = self.sizes.get(weakref.ref(storage), 0), storage.nbytes()
        if size == before:
            return
        if size - before > self.memory - self.live:
            raise torch.OutOfMemoryError(
                f"{KIND} out of memory. Tried to allocate {size - before} bytes. GPU {self.index} has a total capacity "
                f"of {self.memory} bytes of which {max(0, self.memory - self.live)} are free."
            )
        self.sizes[weakref.ref(storage, self._drop)] = size
        self.live += size - before
        self.peak = max(self.peak, self.live)

    def _drop(self, gone: weakref.ref[torch.UntypedStorage]) -> None:
        self.live -= self.sizes.pop(gone)


@dataclass(eq=False)
class Gpu:
    """The pretended cards of a machine, and what was counted on them."""

    cards: tuple[Card, ...]
    places: Places = field(default_factory=Places)
    streams: Streams = field(init=False)
    pinned: weakref.WeakSet[torch.UntypedStorage] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.streams = Streams(len(self.cards))

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What each function of the package caused, by names as `lattice/factor.py factorize`."""
        return self.places.traffic

    @property
    def total(self) -> Traffic:
        """The sum over all functions."""
        return self.of("")

    @property
    def peak(self) -> int:
        """The most bytes that were on the first card."""
        return self.cards[0].peak

    def of(self, start: str) -> Traffic:
        """Return the sum over the functions whose names start so: `lattice/` or `lattice/factor.py factorize`."""
        return sum((found for place, found in self.traffic.items() if place.startswith(start)), Traffic())

    def forget(self) -> None:
        """Begin all counts again, and the peaks from what is live."""
        self.traffic.clear()
        for card in self.cards:
            card.peak = card.live

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor that is marked as pinned."""
        self.pinned.add(tensor.untyped_storage())
        here = self.places.here()
        here.pinned += 1
        here.pinned_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the CPU and in pinned memory."""
        return tensor.device.type == "cpu" and tensor.untyped_storage() in self.pinned


GPU: Gpu | None = None  # of the `pretended()` that is open


def present() -> Gpu:
    """Return the open GPU.

    Raises:
        RuntimeError: None is open.
    """
    if GPU is None:
        raise RuntimeError("No pretended GPU is present. Open one: `with pretended() as gpu:`.")
    return GPU


def here() -> Traffic:
    """Return the traffic of the function that is running."""
    return present().places.here()


def card_of(device: torch.device | int | str | None) -> Card:
    """Return the card of a device.

    Raises:
        RuntimeError: There is none with this index.
    """
    index = device if isinstance(device, int) else (torch.device(device).index if device is not None else 0) or 0
    if index >= len(present().cards):
        raise RuntimeError(f"{KIND} error: invalid device ordinal {index}; there are {len(present().cards)}")
    return present().cards[index]


class Runtime:
    """What `torch.get_device_module` returns, as `torch.cuda` is: memory, names, waiting."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return GPU is not None

    def device_count(self) -> int:
        return len(GPU.cards) if GPU else 0

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: numbers are drawn on the CPU."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_device_name(self, device: Any = None) -> str:
        card_of(device)
        return "Pretended GPU"

    def synchronize(self, device: Any = None) -> None:
        here().synchronizations += 1

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802 (torch's name)
        return present().streams.made(card_of(device).index)

    def current_stream(self, device: Any = None) -> Stream:
        return present().streams.current[card_of(device).index]

    def default_stream(self, device: Any = None) -> Stream:
        return present().streams.defaults[card_of(device).index]

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return present().streams.within(stream)

    def empty_cache(self) -> None:
        """Do nothing: nothing is kept for later tensors."""

    def memory_allocated(self, device: Any = None) -> int:
        return card_of(device).live

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return card_of(device).peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        card_of(device).peak = card_of(device).live

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the bytes that are free, and all bytes."""
        return max(0, card_of(device).memory - card_of(device).live), card_of(device).memory
