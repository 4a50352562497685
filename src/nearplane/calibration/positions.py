"""How much errors count at each position in a window of tokens.

All later tokens attend to the first ones. In many networks most of the attention goes to the very first token, whose keys
and values then carry nearly all of what predictions depend on, while it is one of hundreds in a plain Hessian. So each
octave of positions (the first token, the second, the next two, four, eight, ..) gets a weight: the mean squared gradient of
the log-likelihood with respect to the outputs of the layers, see `sensitivity.py`. A fifth of the weight is equal for all.

Rows of inputs are scaled by the roots of the weights, rounded to powers of two: these are exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.rows import Rows
from nearplane.errors import CalibrationError

EQUAL = 0.2  # share of the weight that is equal for all positions; docs/log.md has the measurements


def octaves(length: int) -> list[slice]:
    """Return the octaves of the positions in a window of `length` tokens: the first, the second, the next two, four, eight, ..

    The last one has what is left, at least half of all positions before it.
    """
    ends = [0, *(2**k for k in range(length.bit_length()) if 3 * 2**k <= 2 * length), length]
    return [slice(a, b) for a, b in pairwise(ends)]


class PositionWeights(NamedTuple):
    """How much errors of a layer count by the octave of their position in a window.

    Args:
        length: Number of tokens of each window that the layer multiplies; 0: not recorded.
        octaves: Weight of each octave, 1 on average over all positions.
    """

    length: int
    octaves: tuple[float, ...]

    @classmethod
    def measured(cls, squares: Tensor, length: int) -> PositionWeights:
        """Return the weights by sums of squared gradients (octaves,)."""
        sizes = torch.tensor([part.stop - part.start for part in octaves(length)])
        sums = squares.double().cpu()
        relative = sums / sizes * (length / sums.sum()) if bool(sums.sum() > 0) else torch.ones_like(sums)
        return cls(length, tuple(EQUAL + (1 - EQUAL) * each for each in relative.tolist()))

    @classmethod
    def recorded(cls, exponents: Sequence[int]) -> PositionWeights:
        """Return weights that give these exponents."""
        return cls(0, tuple(4.0**each for each in exponents))


class RowFactors:
    """Factors of the rows of layers that share an input, by their position in a window.

    Args:
        weights: Weights of these layers, as far as they have some; layers without follow the others.
        tokens: Number of rows of a window in the first batch; 0: rows have no places in windows.

    Attributes:
        exponents: Binary exponent of the factor in each octave; empty: rows stay as they are, because all weights are alike,
            or are of other numbers of tokens, as where a layer runs on something else besides.
    """

    def __init__(self, weights: Sequence[PositionWeights], tokens: int) -> None:
        self.exponents: tuple[int, ...] = ()
        self._factors: dict[int, Tensor] = {}  # by number of windows
        self._tokens, parts = tokens, octaves(tokens) if tokens else []
        if not tokens or any(each.length not in (0, tokens) or len(each.octaves) != len(parts) for each in weights):
            return  # a changed record, too: its exponents then differ from these
        means = [math.fsum(each) / len(each) for each in zip(*(each.octaves for each in weights), strict=True)]
        exponents = tuple(round(math.log2(each) / 2) for each in means)
        self.exponents = exponents if any(exponents) else ()
        sizes = [part.stop - part.start for part in parts]
        self._window = [2.0**exponent for exponent, size in zip(exponents, sizes, strict=False) for _ in range(size)]

    def scaled(self, rows: Rows, windows: int) -> Rows:
        """Return rows of a batch of so many windows, each times the factor of its position.

        Raises:
            CalibrationError: These are not as many rows of each window as in the first batch.
        """
        if not self.exponents:
            return rows
        if len(rows.X_hat) != windows * self._tokens:
            raise CalibrationError(
                f"A layer multiplies {len(rows.X_hat)} rows of {windows} windows, but {self._tokens} of the first one. Use "
                f'positions="equal", by which tokens need no place.'
            )
        if windows not in self._factors:  # sent to a device once
            self._factors[windows] = torch.tensor(self._window * windows)[:, None].to(rows.X_hat.device)
        factors = self._factors[windows]

        def times(x: Tensor) -> Tensor:
            # float16 has too few exponents
            return x * factors.to(x.dtype) if x.dtype != torch.float16 else x.float() * factors

        residual = {name: times(each) for name, each in rows.residual.items()}
        return replace(rows, X_hat=times(rows.X_hat), X=None if rows.X is None else times(rows.X), residual=residual)
