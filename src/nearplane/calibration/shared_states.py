"""What blocks compute for later blocks beside hidden states: keys and values (Gemma 4), chosen tokens (DSA), a router's states."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.recorder import HANDED, Call, Handed, mapped, tensors_within


class SharedStates(dict[Any, Any]):
    """What blocks leave for later ones: copies, as a pass frees what it has made once it has used it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        with torch._C.DisableTorchFunction():  # hooks that count what a pass makes must not see these copies
            copies = mapped(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, value)
            super().__setitem__(key, copies)

    def hand_on(self, block: str, output: Any, handed: Collection[str]) -> None:
        """Keep what a block returns after the hidden states, if the next block takes it."""
        for place, each in enumerate(tensors_within(output[1:]) if isinstance(output, tuple) else ()):
            if (key := HANDED.format(block, place)) in handed:
                self[key] = (each,)

    def drop_handed(self, *, but: str) -> None:
        """Drop what blocks have handed on, but for one of them."""
        mark, kept = HANDED.format("", ""), HANDED.format(but, "")
        for key in [key for key in self if mark in key and not key.startswith(kept)]:
            del self[key]


def with_shared(call: Call, states: SharedStates) -> Call:
    """Return a call with these states in place of those of the network, and with what blocks handed on where it takes that."""
    # transformers' KVSharingDict is a UserDict
    names = [name for name, value in call.kwargs.items() if isinstance(value, UserDict)]
    if names:
        call = replace(call, kwargs=call.kwargs | dict.fromkeys(names, states))

    def given(each: Any) -> Any:
        return states[each.key][0] if isinstance(each, Handed) else each

    return replace(call, args=mapped(given, call.args), kwargs=mapped(given, call.kwargs))


def has_place_for_shared(call: Call) -> bool:
    """Return whether a network gives its blocks a place for keys and values that later ones may use."""
    return any(isinstance(value, UserDict) for value in call.kwargs.values())
