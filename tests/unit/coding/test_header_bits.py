"""What a header says is refused before memory is taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from coded_matrices import gaussian
from nearplane.coding.blob import decode, encode
from nearplane.errors import FormatError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.__setitem__(0, 0x30 | b[0]), "version 3"),
        (lambda b: b.__setitem__(0, 0x21), "coder 1"),
        (lambda b: b.__setitem__(0, 0x25), "coder 5"),
    ],
)
def test_a_version_or_coder_of_the_future_is_named(change: object, message: str) -> None:
    blob = encode(gaussian(24, 40, 2.0, rows=0.5)[0])
    change(blob)  # type: ignore[operator]
    with pytest.raises(FormatError, match=message):
        decode(blob)


def test_a_shape_that_so_few_bytes_cannot_hold_is_refused_before_memory_is_taken() -> None:
    head = bytes([0x20]) + bytes([255, 255, 255, 127]) * 2
    blob = np.frombuffer(head + bytes(100), np.uint8)
    with pytest.raises(FormatError, match="too many for"):
        decode(blob)
