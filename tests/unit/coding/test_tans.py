"""The coder by itself: exact for any tables and segments, near the entropy, and near an independent range coder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearplane.coding import frequency_tables, tans


def problem(seed: int, segments: int, most: int) -> tuple[np.ndarray, tans.Segments, np.ndarray]:
    """Return frequencies, segments, and symbols drawn from their tables."""
    rng = np.random.default_rng(seed)
    frequencies = np.stack(
        [
            frequency_tables.normalise(rng.integers(0, 2 ** rng.integers(1, 20), 256) * (rng.random(256) < 0.3))
            for _ in range(3)
        ]
    )
    frequencies[frequencies.sum(1) == 0, 7] = 4096
    counts, which = rng.integers(0, most, segments), rng.integers(0, 3, segments)
    parts = [rng.choice(256, n, p=frequencies[t] / 4096) for n, t in zip(counts, which, strict=True)]
    drawn = np.concatenate(parts).astype(np.uint8)
    return frequencies, tans.Segments(counts.astype(np.int64), which.astype(np.int64)), drawn


def one_segment(symbols: np.ndarray) -> tans.Segments:
    """Return a single segment for all symbols."""
    return tans.Segments(np.array([len(symbols)]), np.array([0]))


def room() -> tans.Lanes:
    """Return lanes to be filled in."""
    return tans.Lanes(np.empty(tans.LANES, np.int64), np.empty(tans.LANES, np.int64))


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([2, 40, 300]))
def test_lanes_decode_to_what_was_encoded(seed: int, segments: int, most: int) -> None:
    frequencies, parts, symbols = problem(seed, segments, most)
    entries, encoder = tans.build(frequencies)
    out = np.empty(2 * len(symbols) + 16 * tans.LANES, np.uint8)
    lanes = room()
    end = tans.encode(symbols, parts, encoder, out, lanes)
    assert end == lanes.lengths.sum()
    data = np.concatenate([out[:end], np.zeros(tans.PADDING_BYTES, np.uint8)])
    found = np.empty_like(symbols)
    assert tans.decode_lanes(data, 0, lanes, parts, entries, found)
    assert np.array_equal(found, symbols)


@given(st.integers(0, 2**32))
def test_any_bytes_decode_within_their_buffers(seed: int) -> None:
    """Guard bytes on both sides of the output stay as they were, whatever is read."""
    frequencies, parts, symbols = problem(seed, 4, 200)
    entries = tans.build(frequencies)[0]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, int(rng.integers(0, 200)) + tans.PADDING_BYTES, dtype=np.uint8)
    lanes = tans.Lanes(rng.integers(0, 40, tans.LANES), rng.integers(0, 1 << 15, tans.LANES))
    guarded = np.full(len(symbols) + 128, 77, np.uint8)
    tans.decode_lanes(data, 0, lanes, parts, entries, guarded[64:-64])
    assert (guarded[:64] == 77).all()
    assert (guarded[-64:] == 77).all()


def test_a_stream_takes_a_thousandth_more_than_its_information() -> None:
    rng = np.random.default_rng(0)
    for spread in (30, 48, 64, 90):
        frequencies = frequency_tables.parametric(spread, 0)[None]
        p = frequencies[0] / 4096
        symbols = rng.choice(256, 100_000, p=p).astype(np.uint8)
        encoder = tans.build(frequencies)[1]
        out = np.empty(2 * len(symbols) + 128, np.uint8)
        end = tans.encode(symbols, one_segment(symbols), encoder, out, room())
        information = -np.log2(p[symbols]).sum() / 8
        assert information < end < information * 1.002 + 8


def test_an_independent_range_coder_needs_as_many_bytes() -> None:
    constriction = pytest.importorskip("constriction")
    rng = np.random.default_rng(0)
    table = frequency_tables.parametric(60, 2)
    symbols = rng.choice(256, 50_000, p=table / 4096)
    categorical = constriction.stream.model.Categorical(table[table > 0] / 4096, perfect=False)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse((np.cumsum(table > 0) - 1)[symbols].astype(np.int32), categorical)
    encoder = tans.build(table[None])[1]
    out = np.empty(2 * len(symbols) + 16 * tans.LANES, np.uint8)
    end = tans.encode(symbols.astype(np.uint8), one_segment(symbols), encoder, out, room())
    assert end == pytest.approx(4 * len(coder.get_compressed()), rel=0.002)
