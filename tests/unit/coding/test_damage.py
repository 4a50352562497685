"""Damaged bytes: always a FormatError that names the matrix, or what was encoded; never a crash, never memory beyond the header.

Checksums would hide most of the decoder from a fuzzer, so half of the corruptions come with checksums made right again.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from coded_matrices import codes_of, contents_of, gaussian, mended
from nearplane.coding import layout
from nearplane.coding.blob import Contents, decode, decode_packed, encode
from nearplane.errors import FormatError

ROUNDS = 2400 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 240
LARGE = gaussian(300, 500, 3.2, rows=0.4, freedom=4)[0]
BLOBS = {
    "small": encode(gaussian(24, 40, 2.0, rows=0.5)[0]),
    "escapes": encode(gaussian(24, 40, 8.5)[0]),
    "large": encode(LARGE),
    "zero": encode(contents_of(np.zeros((2, 3), np.int64))),
}


def damaged(blob: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Flip, overwrite, cut, repeat, swap or append bytes; headers are hit as often as all else."""
    blob = blob.copy()
    reach = len(blob) if rng.random() < 0.5 else min(len(blob), 64)
    kind = rng.integers(6)
    at = int(rng.integers(reach))
    if kind == 0:
        blob[at] ^= 1 << rng.integers(8)
    elif kind == 1:
        blob[at : at + 8] = rng.integers(0, 256, len(blob[at : at + 8]))
    elif kind == 2:
        blob = blob[: int(rng.integers(len(blob)))]
    elif kind == 3:
        blob = np.concatenate([blob, rng.integers(0, 256, int(rng.integers(1, 40)), dtype=np.uint8)])
    elif kind == 4:
        other = int(rng.integers(len(blob)))
        length = min(16, len(blob) - max(at, other))
        blob[at : at + length], blob[other : other + length] = (
            blob[other : other + length].copy(),
            blob[at : at + length].copy(),
        )
    else:
        blob[at : at + 8] = 255
    return blob


@pytest.mark.parametrize("name", BLOBS)
def test_damage_is_refused_and_nothing_else_is_decoded(name: str) -> None:
    blob = BLOBS[name]
    rng = np.random.default_rng(sum(name.encode()) + (os.getpid() if ROUNDS > 240 else 0))
    for _ in range(ROUNDS // len(BLOBS)):
        bad = damaged(blob, rng)
        if np.array_equal(bad, blob):
            continue
        with pytest.raises(FormatError, match="layer 7"):
            decode(bad, name="layer 7")


@pytest.mark.parametrize("name", BLOBS)
def test_damage_with_right_checksums_is_refused_or_decodes_to_some_matrix(name: str) -> None:
    rng = np.random.default_rng(sum(name.encode()) + 1 + (os.getpid() if ROUNDS > 240 else 0))
    refused = decoded = 0
    for _ in range(ROUNDS // len(BLOBS)):
        bad = mended(damaged(BLOBS[name], rng))
        try:
            found = decode(bad, name="layer 7")
        except FormatError as error:
            refused += "layer 7" in str(error)
            continue
        decoded += 1
        assert isinstance(found, Contents)
        assert found.codes.size <= layout.MAX_WEIGHTS_PER_BYTE * len(bad)
        assert np.array_equal(codes_of(decode_packed(bad)), found.codes)
    assert refused > 0
    assert refused + decoded == ROUNDS // len(BLOBS)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_single_bit_of_a_small_matrix_is_covered(step: int) -> None:
    """By day every seventh, which is one of every byte."""
    blob = BLOBS["small"]
    for bit in range(0, 8 * len(blob), step):
        bad = blob.copy()
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FormatError):
            decode(bad)


def test_every_truncation_is_refused() -> None:
    for length in range(len(BLOBS["small"])):
        with pytest.raises(FormatError):
            decode(BLOBS["small"][:length])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.__setitem__(0, 0x30 | b[0]), "version 3"),
        (lambda b: b.__setitem__(0, 0x21), "coder 1"),
        (lambda b: b.__setitem__(0, 0x25), "coder 5"),
    ],
)
def test_a_version_or_coder_of_the_future_is_named(change: object, message: str) -> None:
    blob = BLOBS["small"].copy()
    change(blob)  # type: ignore[operator]
    with pytest.raises(FormatError, match=message):
        decode(blob)


def test_a_shape_that_so_few_bytes_cannot_hold_is_refused_before_memory_is_taken() -> None:
    head = bytes([0x20]) + bytes([255, 255, 255, 127]) * 2
    blob = np.frombuffer(head + bytes(100), np.uint8)
    with pytest.raises(FormatError, match="too many for"):
        decode(blob)


def test_something_else_than_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        decode(np.zeros(100, np.int8))  # type: ignore[arg-type]
