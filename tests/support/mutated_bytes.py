"""Mutations of any bytes: flipped, cut, moved, repeated, overwritten by numbers that a length or an offset might be."""

from __future__ import annotations

import random

HUGE = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(content: bytes, rng: random.Random, head: int = 64) -> tuple[bytes, str, str]:
    """Flip, overwrite, cut, repeat, move or append bytes; the first `head` are hit as often as all else: (bytes, kind, what)."""
    data = bytearray(content)
    reach = len(data) if rng.random() < 0.5 else min(len(data), head)
    at, length = rng.randrange(max(reach, 1)), rng.choice((1, 2, 4, 8, 32, 1000))
    match rng.choice(("flip", "flip", "flip", "value", "cut", "append", "insert", "delete", "repeat", "move", "zeros")):
        case "flip" if data:
            for _ in range(rng.choice((1, 1, 1, 4, 40))):
                data[at] ^= 1 << rng.randrange(8)
                at = rng.randrange(reach)
            return bytes(data), "bits", f"bits flipped, the last at {at}"
        case "value":
            data[at : at + 8] = rng.choice(HUGE).to_bytes(8, "little")
            return bytes(data), "lengths", f"another number at {at}"
        case "cut":
            return (
                bytes(data[: rng.choice((at, len(data) - 1, 0, rng.randrange(len(data) + 1)))]),
                "truncation",
                f"cut at {at}",
            )
        case "append":
            return bytes(data) + rng.randbytes(length), "truncation", f"{length} bytes appended"
        case "insert":
            return (
                bytes(data[:at]) + rng.randbytes(length) + bytes(data[at:]),
                "offsets",
                f"{length} bytes inserted at {at}",
            )
        case "delete":
            return bytes(data[:at] + data[at + length :]), "offsets", f"{length} bytes deleted at {at}"
        case "repeat":
            return bytes(data[: at + length]) + bytes(data[at:]), "offsets", f"{length} bytes repeated at {at}"
        case "move" if data:
            other = rng.randrange(len(data))
            data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
            return bytes(data), "offsets", f"{length} bytes at {at} and {other} exchanged"
    filler = rng.choice((b"\0", b"\xff"))
    data[at : at + length] = filler * len(data[at : at + length])
    return bytes(data), "bits", f"{length} bytes at {at} are {filler!r}"
