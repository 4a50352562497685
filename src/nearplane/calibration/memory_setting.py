"""How much memory a walk through the network may use: windows at a time, activations that wait, hidden states on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nearplane.calibration.one_forward import room_for_pauses
from nearplane.system.device import Device

BATCH_TOKENS, BATCH_WINDOWS = 2048, 8  # of a batch at most: enough rows for products at full speed


def batch_of(seqlen: int) -> int:
    """Return how many windows of so many tokens pass through a block at a time where memory is not limited."""
    return max(1, min(BATCH_WINDOWS, BATCH_TOKENS // seqlen))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Where a walk computes, and what trades time for memory. Only `batch` changes the bytes of a checkpoint, and is in its record.

    Args:
        batch: windows that pass through a block at a time; sums of floating-point numbers depend on it.
        room: bytes that paused activations may take; stages that take more are passes of their own.
        disk: whether hidden states between blocks lie in a file.
        device: where to compute.
        folder: for that file; None: that of the system for temporary files.
        experts: how many experts of a block are solved together at most; so many have their inputs in memory.
    """

    batch: int
    room: int
    device: Device
    disk: bool = False
    folder: Path | None = None
    experts: int = 1

    @classmethod
    def usual(cls, seqlen: int, device: Device, batch: int | None = None) -> MemorySetting:
        """Return the fastest setting; `batch` windows at a time, or where it is None as many as `batch_of` gives."""
        return cls(batch=batch or batch_of(seqlen), room=room_for_pauses(device), device=device)
