"""What keeps entropy-coded matrices at the bytes that they may take while their codes move: a price for every bit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from nearplane.formats.layer_format import LayerFormat
from nearplane.tuning.ladders import TunedLadders

WORTH = 2 * math.log(2)  # of a bit per weight, over KL: where errors are small a bit more makes a quarter of them
GAIN = 2.0  # by how much the logarithm of the price rises in a step for every bit per weight that is too many
AIM = 0.998  # of the bytes that matrices may take: what is foretold between two looks is off by about a thousandth
RANGE = 16.0  # times its first value, or so much of it, is the price at most and at least


class Pressure:
    """Pulls codes towards 0, each by what it costs, harder while the matrices take too much.

    Args:
        matrices: by name.
        most: bytes that all of them may take.
        format: that packs them.
        kl: of the network at the start, nats per token.
    """

    def __init__(self, matrices: Mapping[str, TunedLadders], most: int, format: LayerFormat, kl: float) -> None:
        self._matrices, self.most, self._format = matrices, most, format
        self._weights = sum(each.weights for each in matrices.values())
        self._first = self._price = WORTH * kl / self._weights
        self._allowed = self._foretold()
        self.measure()

    def press(self) -> None:
        """Add to the gradients of codes what their bits cost."""
        over = (self._foretold() - self._allowed) / self._weights
        price = self._price * math.exp(GAIN * over)
        self._price = min(max(price, self._first / RANGE), self._first * RANGE)
        for each in self._matrices.values():
            each.press(self._price)

    def measure(self) -> int:
        """Return the bytes of all matrices, coded in earnest; what is foretold of them is set right by that."""
        size = 0
        for name, each in self._matrices.items():
            packed = self._format.pack(name, each.matrix(), torch.float32)
            size += sum(tensor.nbytes for tensor in packed.values())
        self._allowed = self._foretold() + 8 * (AIM * self.most - size)
        return size

    def standing(self) -> dict[str, float]:
        """Return what decides how it goes on."""
        return {"price": self._price, "allowed": self._allowed}

    def restore(self, standing: Mapping[str, float]) -> None:
        """Go on from there."""
        self._price, self._allowed = standing["price"], standing["allowed"]

    def _foretold(self) -> float:
        return sum(each.bits() for each in self._matrices.values())
