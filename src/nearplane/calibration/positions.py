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

import torch
from torch import Tensor

from nearplane.calibration.rows import Rows

EQUAL = 0.2  # share of the weight that is equal for all positions; docs/log.md has the measurements


def octaves(length: int) -> list[slice]:
    """Return the octaves of the positions in a window of `length` tokens: the first, the second, the next two, four, eight, ..

    The last one has what is left, at least half of all positions before it.
    """
    ends = [0, *(2**k for k in range(length.bit_length()) if 3 * 2**k <= 2 * length), length]
    return [slice(a, b) for a, b in pairwise(ends)]


def weights_of(squares: Tensor, length: int) -> tuple[float, ...]:
    """Return the weight of each octave, 1 on average over all positions.

    Args:
        squares: (octaves,) sums of squared gradients.
        length: Number of tokens in a window.
    """
    sizes = torch.tensor([part.stop - part.start for part in octaves(length)])
    sums = squares.double().cpu()
    relative = sums / sizes * (length / sums.sum()) if bool(sums.sum() > 0) else torch.ones_like(sums)
    return tuple(EQUAL + (1 - EQUAL) * each for each in relative.tolist())


def exponents_of(weights: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the binary exponents of the factors of rows in each octave, from the weights of layers that share an input."""
    if not weights or len({*map(len, weights)}) > 1:
        return ()
    means = [math.fsum(each) / len(each) for each in zip(*weights, strict=True)]
    found = tuple(round(math.log2(each) / 2) for each in means)
    return found if any(found) else ()


def scaled(rows: Rows, exponents: Sequence[int], windows: int) -> Rows:
    """Return rows of a batch of so many windows, each times the factor of its position."""
    length = len(rows.X_hat) // windows
    factors = torch.cat(
        [
            torch.full((part.stop - part.start,), 2.0**exponent)
            for part, exponent in zip(octaves(length), exponents, strict=True)
        ]
    )
    factor = factors.repeat(windows)[:, None].to(rows.X_hat.device)

    def times(x: Tensor) -> Tensor:
        # float16 has too few exponents
        return x * factor.to(x.dtype) if x.dtype != torch.float16 else x.float() * factor

    residual = {name: times(each) for name, each in rows.residual.items()}
    return replace(rows, X_hat=times(rows.X_hat), X=None if rows.X is None else times(rows.X), residual=residual)
