"""Chunks of a payload are where its directory says."""

from __future__ import annotations

import numpy as np
import pytest

from coded_matrices import gaussian
from nearplane.coding import header_bits, layout, payload
from nearplane.coding.blob import decode, encode
from nearplane.errors import FormatError


def test_chunks_in_another_order_are_refused_and_named() -> None:
    blob = encode(gaussian(512, 900, 2.0)[0])
    _, arrangement, bits = header_bits.read_header(blob, "")
    starts, _ = payload._directory(bits, len(layout.chunk_edges(arrangement.total)) - 1)
    assert len(starts) >= 3
    first, second, third = starts[:3]
    bad = np.concatenate([blob[:first], blob[second:third], blob[first:second], blob[third:]])
    with pytest.raises(FormatError, match="layer 7, chunk 0"):
        decode(bad, name="layer 7", threads=1)
