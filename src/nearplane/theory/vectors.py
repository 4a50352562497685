"""Two textbook ways to quantize a vector: by its largest magnitude, and by its range with a zero point."""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.lattice.grid import Codebook


def absmax_codes(w: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantize a vector by its largest magnitude: codes `round(high w / max|w|)`, and the step."""
    high = 2 ** (bits - 1) - 1
    scale = _positive(w.abs().amax() / high, w)
    return (w / scale).round().to(torch.int32), scale


def zero_point_codes(w: Tensor, bits: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a vector by its range: signed codes `round(w / scale + zero)`, the step, and the zero point."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = _positive((w.amax() - w.amin()) / (high - low), w)
    zero = -(w.amin() / scale).round() + low
    return Codebook(low=low, high=high).nearest(w / scale + zero).to(torch.int32), scale, zero


def _positive(scale: Tensor, w: Tensor) -> Tensor:
    """Return the step; for a vector without range, a step that represents its value exactly."""
    level = w.abs().amax()
    return torch.where(scale == 0, torch.where(level == 0, 1, level), scale)
