"""What an encoder chooses is near the information of a matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coded_matrices import contents_of, gaussian, total_entropy
from nearplane.coding.blob import encode
from nearplane.coding.header_bits import read_header

SMALL = [(32, 64), (64, 64), (128, 128), (352, 128)]


@pytest.mark.parametrize(("out", "width"), SMALL)
@pytest.mark.parametrize("bits", [1.0, 2.0, 3.0, 4.0])
def test_a_small_matrix_takes_little_more_than_its_information(out: int, width: int, bits: float) -> None:
    """The bound: -log2 of the true probabilities, the entropies of the exponents, 56 bytes, and 0.02 bit per weight.

    Of the 56 bytes 38 say where eight lanes begin and end.
    """
    contents, spread = gaussian(out, width, bits, rows=0.3)
    columns = width * math.log2(4 * math.sqrt(2 * math.pi * math.e))
    rows = out * math.log2(0.3 * 4 * math.sqrt(2 * math.pi * math.e))  # at most: the encoder may leave them out
    least = ideal_bits(contents.codes, spread) + columns + rows
    assert 8 * len(encode(contents)) < least + 8 * 56 + 0.02 * out * width


def ideal_bits(codes: np.ndarray, spread: np.ndarray) -> float:
    """Return -log2 of the probabilities of rounded Gaussians."""
    low, high = (codes - 0.5) / spread, (codes + 0.5) / spread
    upper = np.vectorize(math.erfc)
    swap = low > 0  # far tails: the difference of the small ones
    a, b = np.where(swap, low, -high) / math.sqrt(2), np.where(swap, high, -low) / math.sqrt(2)
    return float(-np.log2((upper(a) - upper(b)) / 2).sum())


@pytest.mark.parametrize("freedom", [None, 5])
def test_coded_bytes_are_near_the_entropies(freedom: int | None) -> None:
    """At 1024 x 1024 side information weighs four times (columns) and sixteen times (tables) what it does at 4096 x 4096."""
    rng = np.random.default_rng(1)
    spread = np.exp(rng.uniform(math.log(0.3), math.log(8), 1024))
    noise = rng.standard_normal((1024, 1024)) if freedom is None else rng.standard_t(5, (1024, 1024)) * math.sqrt(0.6)
    exponents = np.round(-8 * np.log2(spread)).astype(np.int32)
    contents = contents_of(np.rint(noise * spread).astype(np.int64), columns=exponents)
    blob = encode(contents)
    bits = 8 * len(blob) / contents.codes.size
    header = read_header(blob, "")[0]
    spreads = header.spread_of(header.column_levels()[None, :], header.row_levels[:, None])  # (out, in)
    classes = sum(total_entropy(contents.codes[spreads == s]) for s in np.unique(spreads)) / contents.codes.size
    columns = sum(total_entropy(column) for column in contents.codes.T) / contents.codes.size
    assert columns <= classes < bits < classes * 1.011
    symbols = sum(len(np.unique(column)) - 1 for column in contents.codes.T)
    miller_madow = symbols / (2 * math.log(2) * contents.codes.size)
    assert bits < columns + miller_madow + 0.025
