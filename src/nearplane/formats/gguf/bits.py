"""What blocks of GGUF are made of: 16-bit floating-point numbers as bytes, and runs of bits in bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.errors import FormatError


class Fields(NamedTuple):
    """The numbers of some blocks.

    Args:
        codes: (blocks, columns) uint8, the smallest code is 0.
        d: (blocks, 2) bytes of the step.
        dmin: (blocks, 2) bytes of the offset; None where the type has none.
        sc: (blocks, groups) int16 multiples of the step.
        m: (blocks, groups) int16 multiples of the offset.
    """

    codes: Tensor
    d: Tensor
    dmin: Tensor | None
    sc: Tensor
    m: Tensor | None


def halves(called: str, numbers: Tensor) -> Tensor:
    """Return numbers (n,) as (n, 2) bytes of 16-bit floating point, the lower first.

    Raises:
        FormatError: one is not exact in it.
    """
    short = numbers.to(torch.float16)
    if not bool((torch.isfinite(short) & (short == numbers)).all()):
        raise FormatError(f"{called} is not exact in float16, which the file stores. Round it before the solve.")
    return short.contiguous().view(torch.uint8).view(-1, 2)


def halves_of(raw: Tensor) -> Tensor:
    """Return (n,) float32 what (n, 2) bytes of 16-bit floating point stand for."""
    return raw.contiguous().view(torch.float16).view(-1).float()


def joined(parts: Tensor, bits: int) -> Tensor:
    """Return (n, k) bytes of runs of `bits` bits (n, 8 / bits, k) uint8, the first run in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=parts.device)[:, None]
    return (parts << shifts).sum(1, dtype=torch.uint8)


def split(raw: Tensor, bits: int) -> Tensor:
    """Return (n, 8 / bits, k) the runs of `bits` bits of bytes (n, k), the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)[:, None]
    return raw[:, None] >> shifts & (1 << bits) - 1
