"""Weights from trained positions of codes and trained steps, rounded as the file holds them; gradients pass straight through.

One operation decodes a matrix, instead of one after the other that autograd would keep: a backward pass needs a byte a weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def through(rounded: Tensor, exact: Tensor) -> Tensor:
    """Return exactly `rounded`, with the gradient of `exact`."""
    return rounded + (exact - exact.detach())


class Codes(NamedTuple):
    """Codes of a matrix with limits, and what they mean.

    Args:
        start: (out, in) codes minus the lowest, uint8.
        low, high: Lowest and highest code.
        step: Unit of trained positions in codes.
        zero: (out, groups) code of the value 0, for codes that are integers.
        levels, gaps: (codes,) value of each code in steps, and mean distance from its neighbours; None: codes are integers.
    """

    start: Tensor
    low: int
    high: int
    step: float
    zero: Tensor | None = None
    levels: Tensor | None = None
    gaps: Tensor | None = None

    def rounded(self, v: Tensor | None) -> Tensor:
        """Return (out, in) codes minus the lowest, uint8, at trained positions (out, in)."""
        if v is None:
            return self.start
        return torch.add(self.start, v, alpha=self.step).round_().clamp_(0, self.high - self.low).to(torch.uint8)

    def positions(self, codes: Tensor, groups: int) -> Tensor:
        """Return (out, groups, size) values of codes minus the lowest, in steps, float32."""
        parts = codes.view(len(codes), groups, -1)
        if self.levels is not None:
            return self.levels[parts.int()]
        positions = parts.float()
        if self.low:
            positions += self.low
        return positions if self.zero is None else positions.sub_(self.zero[:, :, None])


class _Decoded(torch.autograd.Function):
    """`steps * positions` of codes, (out, in)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor | None, steps: Tensor, codes: Codes) -> Tensor:
        rounded = codes.rounded(v)
        ctx.save_for_backward(rounded, steps)
        ctx.codes = codes
        return codes.positions(rounded, steps.shape[1]).mul_(steps[:, :, None]).view(rounded.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (rounded, steps), codes = gradients, ctx.saved_tensors, ctx.codes
        parts, of_codes, of_steps = gradient.view(*steps.shape, -1), None, None
        if ctx.needs_input_grad[1]:
            of_steps = codes.positions(rounded, steps.shape[1]).mul_(parts).sum(2)
        if ctx.needs_input_grad[0]:
            of_codes = parts * (codes.step * steps)[:, :, None]
            if codes.gaps is not None:
                of_codes.mul_(codes.gaps[rounded.int()].view(of_codes.shape))
            of_codes = of_codes.view(gradient.shape)
        return of_codes, of_steps, None


def decoded(v: Tensor | None, steps: Tensor, codes: Codes) -> Tensor:
    """Return (out, in) `steps * positions`, exactly as a file decodes.

    Args:
        v: (out, in) trained positions of codes; None: codes are not trained.
        steps: (out, groups) steps as stored, of groups of equally many neighbours.
        codes: The codes.
    """
    values: Tensor = _Decoded.apply(v, steps, codes)  # type: ignore[no-untyped-call]
    return values
