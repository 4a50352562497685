"""Transcripts with their sound, as one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Spoken(Tensor):
    """Transcripts, (windows, seqlen) int64 token ids, with their sound.

    Most operations treat it as a tensor of token ids and return a plain tensor. Indexing, splitting, iteration and `to`
    keep the sound of each window.

    Attributes:
        sound: (windows, ..) float32 output of the model's feature extractor; for Whisper (windows, mel bins, frames).
    """

    sound: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of Parameter

    @classmethod
    def of(cls, tokens: Tensor, sound: Tensor) -> Spoken:
        """Combine token ids with the sound of the same windows; no memory is copied."""
        spoken = tokens.as_subclass(cls)
        spoken.sound = sound
        return spoken

    def __getitem__(self, which: Any) -> Tensor:
        """Return some windows with their sound; for two indices, plain token ids."""
        ids = super().__getitem__(which)
        return ids if isinstance(which, tuple) else Spoken.of(ids, self.sound[which])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the windows, (seqlen,) each."""
        return (self[i] for i in range(len(self)))

    def split(self, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Return the windows in parts, with their sound."""
        assert dim == 0, "windows are not cut"
        return tuple(map(Spoken.of, torch.split(self.as_subclass(Tensor), size), torch.split(self.sound, size)))

    def to(self, *place: Any, **how: Any) -> Tensor:
        """Return the windows on another device; the sound stays float32."""
        ids = super().to(*place, **how)
        return Spoken.of(ids, self.sound.to(ids.device))


def cut_windows(windows: Tensor, seqlen: int) -> Tensor:
    """Return windows cut into shorter ones of at most `seqlen` tokens; transcripts with sound are not cut."""
    if isinstance(windows, Spoken) or windows.shape[1] <= seqlen:
        return windows
    return windows[:, : windows.shape[1] // seqlen * seqlen].reshape(-1, seqlen)
