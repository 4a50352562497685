"""Token ids with the sound in which they are said: what networks that write down speech (Whisper) are calibrated on.

Knows tensors alone; which networks hear is what `headless.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Spoken(Tensor):
    """What is said, (windows, seqlen) int64 token ids, and how it sounds.

    To all that counts, looks up or compares tokens it is a tensor of token ids, and what comes of that is a plain tensor. Windows
    that are taken, split off, gone through or moved to a device take their sound along.

    Attributes:
        sound: (windows, ..) float32, as the model's feature extractor makes it: of Whisper (windows, mel bins, frames).
    """

    sound: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of Parameter

    @classmethod
    def of(cls, tokens: Tensor, sound: Tensor) -> Spoken:
        """Join token ids with the sound of as many windows; no memory is copied."""
        found = tokens.as_subclass(cls)
        found.sound = sound
        return found

    def __getitem__(self, which: Any) -> Tensor:
        """Return some windows with their sound; by two indices, plain token ids."""
        ids = super().__getitem__(which)
        return ids if isinstance(which, tuple) else Spoken.of(ids, self.sound[which])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield window after window, (seqlen,) each."""
        return (self[i] for i in range(len(self)))

    def split(self, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Return the windows in parts."""
        assert dim == 0, "windows are not cut"
        return tuple(map(Spoken.of, torch.split(self.as_subclass(Tensor), size), torch.split(self.sound, size)))

    def to(self, *place: Any, **how: Any) -> Tensor:
        """Return them on another device; their sound stays float32."""
        ids = super().to(*place, **how)
        return Spoken.of(ids, self.sound.to(ids.device))


def joined(parts: list[Tensor]) -> Tensor:
    """Return windows one behind the other, with their sound if they have one."""
    ids, sounds = torch.cat(parts), [part.sound for part in parts if isinstance(part, Spoken)]
    return Spoken.of(ids, torch.cat(sounds)) if sounds else ids


def cut(windows: Tensor, seqlen: int) -> Tensor:
    """Return windows cut into shorter ones of at most `seqlen` tokens; what is said in a sound stays whole."""
    if isinstance(windows, Spoken) or windows.shape[1] <= seqlen:
        return windows
    return windows[:, : windows.shape[1] // seqlen * seqlen].reshape(-1, seqlen)
