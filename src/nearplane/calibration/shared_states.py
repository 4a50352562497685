"""Keys and values that some blocks compute and later blocks use instead of their own, as in Gemma 4."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.recorder import Call, mapped


class SharedStates(dict[Any, Any]):
    """What blocks leave for later ones: copies, as a pass frees what it has made once it has used it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        with torch._C.DisableTorchFunction():  # what looks at a pass takes no part in it
            super().__setitem__(
                key, mapped(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, value)
            )


def with_shared(call: Call, states: SharedStates) -> Call:
    """Return a call with these states in place of those of the network; the same call if the network has no place for any."""
    names = [
        name for name, value in call.kwargs.items() if isinstance(value, UserDict)
    ]  # transformers' KVSharingDict is one
    return replace(call, kwargs=call.kwargs | dict.fromkeys(names, states)) if names else call
