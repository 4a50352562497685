"""Rounding of a layer's inputs to few bits and back, as runtimes do it before they multiply; bit for bit as compressed-tensors.

A step comes from the largest magnitude of a token, or of a group of its neighbouring inputs. Everything is computed in the
dtype of the inputs, except with a global scale, which is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.number_formats import E2M1, E4M3, InputRounding

LARGEST = {"int8": 127.5, "fp8": E4M3[-1], "fp4": E2M1[-1]}  # what the largest magnitude is mapped to
SMALLEST_BLOCK = 0.125  # what replaces a step of 0 in E4M3


def rounded(x: Tensor, how: InputRounding, global_scale: float | None = None) -> Tensor:
    """Return inputs (..., in) rounded to the numbers that the runtime multiplies, in their dtype.

    Args:
        x: Inputs; what is not the last dimension are tokens.
        how: The numbers, and what shares a step.
        global_scale: Number by which steps are divided, see `shared_grid.divisor_of`; needed if `how.global_scale`.
    """
    parts = x if how.group is None else x.unflatten(-1, (-1, how.group))
    step = _steps(parts.abs().amax(-1, keepdim=True), how, global_scale)
    return (_nearest(parts / step, how).to(step.dtype) * step).view_as(x).to(x.dtype)


def _steps(peak: Tensor, how: InputRounding, global_scale: float | None) -> Tensor:
    """Return the step of each token or group from its largest magnitude."""
    if how.steps == "float8_e8m0fnu":
        return _power_of_two(peak, how)
    step = peak / LARGEST[how.name]
    if not how.global_scale:
        return torch.where(step == 0, torch.finfo(step.dtype).eps, step)
    assert global_scale is not None, "the global scale is measured before"
    divisor = torch.tensor([global_scale], dtype=torch.float32, device=peak.device)
    block = (divisor * step).clamp(-E4M3[-1], E4M3[-1]).to(torch.float8_e4m3fn).float()
    return torch.where(block == 0, SMALLEST_BLOCK, block) / divisor


def _power_of_two(peak: Tensor, how: InputRounding) -> Tensor:
    """Return 2^(e - 2) or 2^(e - 8) for a peak of about 2^e, to which magnitudes from 1.75 * 2^(e - 1) on are rounded up."""
    mantissa, exponent = torch.frexp(peak)  # mantissa in 0.5 ... 1
    exponent = exponent - 1 + (mantissa >= 0.875).int() - (2 if how.bits == 4 else 8)
    exponent = torch.where(peak == 0, -127, exponent).clamp(-127, 128)
    return torch.pow(2.0, exponent.float()).to(peak.dtype)


def _nearest(x: Tensor, how: InputRounding) -> Tensor:
    """Return the nearest numbers, of two the even one; what lies outside becomes the outermost number."""
    match how.name:
        case "int8":
            return x.clamp(-128, 127).round()
        case "fp8":
            return x.clamp(-E4M3[-1], E4M3[-1]).to(torch.float8_e4m3fn).to(x.dtype)
        case _:
            size = x.abs()
            spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
            return (x / spacing).round().mul_(spacing).clamp_(-E2M1[-1], E2M1[-1])
