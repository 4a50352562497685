"""Windows of calibration text by what is measured on them before the first layer: few, as they are enough."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.models.model import Model

log = logging.getLogger("nearplane")
PART_TOKENS, PART_WINDOWS = 2048, 4  # at least, on which errors are estimated, and a choice is measured
TOKENS_PER_INPUT = 3  # for second moments of a layer, at least `PART_TOKENS` and `PART_WINDOWS`
BATCH_TOKENS, BATCH_IMAGES = 4096, 8  # of a forward pass
IMAGES = 64  # windows of networks that see no text


class Parts(NamedTuple):
    """Windows by what is measured on them.

    Args:
        gradients: Of which some pass backwards.
        moments: For second moments of inputs.
        errors: On which errors of layers are estimated.
        last: On which a choice is measured.
    """

    gradients: Tensor
    moments: Tensor
    errors: Tensor
    last: Tensor


class Extent(NamedTuple):
    """Amount of work before a choice of bits.

    Args:
        seen: Tokens whose hidden states are kept, of which those of a batch pass a block at a time.
        batch: Tokens of a forward pass.
        scored: Tokens on which errors are measured, which are some of those seen.
        points: Roundings of each layer that are estimated.
        compared: Tokens on which the network with a choice is measured afterwards; 0: it is not.
    """

    seen: int
    batch: int
    scored: int
    points: int
    compared: int = 0

    @classmethod
    def of(cls, parts: Parts, *, points: int, compares: bool = False) -> Extent:
        """Return the extent of estimating roundings of each layer on these windows, and of measuring a choice on two texts."""
        length = parts.errors.shape[1]
        scored = parts.errors.numel()
        batch = min(windows_at_once(parts.errors), max(len(parts.moments), len(parts.errors))) * length
        compared = (scored + parts.last.numel()) * compares
        return cls(parts.moments.numel() + scored, batch, scored, points, compared)

    @property
    def of_the_choice(self) -> Extent:
        """The extent of measuring the network with a choice, on two texts in one pass."""
        batch = max(self.batch, min(BATCH_TOKENS, self.compared))
        return self._replace(seen=self.seen - self.scored + self.compared, batch=batch, scored=self.compared)


def windows_at_once(tokens: Tensor) -> int:
    """Return the number of windows of a forward pass."""
    return max(1, BATCH_TOKENS // tokens.shape[1]) if tokens.dim() == 2 else BATCH_IMAGES


def parts_of(model: Model, fitted: Tensor, extra: Tensor | None = None, *, warns: bool = True) -> Parts:
    """Return the windows that each figure is measured on, which are not the same if there are enough.

    Args:
        model: The model to quantize.
        fitted: (windows, seqlen) calibration windows.
        extra: Windows on which a choice is measured if there are too few of the others.
        warns: Whether it is said that there are too few.
    """
    tokens = fitted.shape[1] if fitted.dim() == 2 else 1
    widest = max(layer.shape[1] for layer in model.block_layers)
    few, enough = (
        max(-(-count // tokens), PART_WINDOWS) if fitted.dim() == 2 else IMAGES
        for count in (PART_TOKENS, max(TOKENS_PER_INPUT * widest, PART_TOKENS))
    )
    each = min(few, len(fitted) // 8)  # two parts that take at most a quarter of the windows, in turn
    if not each:
        if warns:
            log.warning(
                "The text is short: errors are measured on windows that layers are fitted to. Use more --samples."
            )
        return Parts(fitted, fitted[:enough], fitted[:few], fitted[-few:] if extra is None else extra[:few])
    places = torch.linspace(0, len(fitted) - 1, 2 * each).long()
    rest = torch.ones(len(fitted), dtype=torch.bool)
    rest[places] = False
    left = fitted[rest]
    moments = left[torch.linspace(0, len(left) - 1, min(enough, len(left))).long()]
    return Parts(left, moments, fitted[places[::2]], fitted[places[1::2]])
