"""How a run keeps within a limit of memory: part of its record. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What was chosen so that a run keeps within a limit.

    Args:
        limit: that was given, in bytes.
        foreseen: the most bytes that the run was to take.
        batch: windows that pass through a block at a time; sums of floating-point numbers depend on it.
        room: bytes that activations may take that wait while a stage is solved; stages that take more are passes of their own.
        disk: whether hidden states between blocks lie in a file.
    """

    limit: int
    foreseen: int
    batch: int
    room: int
    disk: bool = False
