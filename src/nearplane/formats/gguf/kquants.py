"""Bytes of the k-quants of GGUF: blocks of 256 weights with short integers for the steps of their groups.

This file also holds the fields of blocks of any type, and the packing of runs of bits into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Fields(NamedTuple):
    """The numbers in blocks.

    Args:
        codes: (blocks, columns) uint8 codes; the smallest is 0.
        d: (blocks, 2) bytes of the step.
        dmin: (blocks, 2) bytes of the offset; (blocks, 0) if the type has none.
        sc: (blocks, groups) int16 multiples of the step.
        m: (blocks, groups) int16 multiples of the offset; ignored if the type has none.
    """

    codes: Tensor
    d: Tensor
    dmin: Tensor
    sc: Tensor
    m: Tensor


def pack_q2_k(f: Fields) -> Tensor:
    """Return (blocks, 84) bytes: 16 of 4-bit sc and m, 64 of codes, d, dmin."""
    sc, m = f.sc.to(torch.uint8), f.m.to(torch.uint8)
    return torch.cat([sc | m << 4, _packed(f.codes, 2), f.d, f.dmin], 1)


def unpack_q2_k(raw: Tensor) -> Fields:
    """Return the fields of (blocks, 84) bytes."""
    scales, qs, d, dmin = raw.split([16, 64, 2, 2], 1)
    return Fields(codes=_unpacked(qs, 2), d=d, dmin=dmin, sc=(scales & 15).short(), m=(scales >> 4).short())


def pack_q3_k(f: Fields) -> Tensor:
    """Return (blocks, 110) bytes: 32 of third bits, 64 of two lower bits, 12 of 6-bit sc + 32, d."""
    sc = (f.sc + 32).to(torch.uint8)  # (blocks, 16)
    low = sc[:, :8] & 15 | (sc[:, 8:] & 15) << 4
    high = in_bytes((sc >> 4).view(-1, 4, 4), 2)  # byte j holds the bits of groups j, j + 4, j + 8, j + 12
    third = in_bytes((f.codes >> 2).view(-1, 8, 32), 1)
    return torch.cat([third, _packed(f.codes & 3, 2), low, high, f.d], 1)


def unpack_q3_k(raw: Tensor) -> Fields:
    """Return the fields of (blocks, 110) bytes."""
    third, qs, low, high, d = raw.split([32, 64, 8, 4, 2], 1)
    codes = _unpacked(qs, 2) | split(third, 1).reshape(-1, 256) << 2
    sc = split(low, 4).reshape(-1, 16) | split(high, 2).reshape(-1, 16) << 4
    return Fields(codes=codes, d=d, dmin=d[:, :0], sc=sc.short() - 32, m=d[:, :0])


def pack_q4_k(f: Fields) -> Tensor:
    """Return (blocks, 144) bytes: d, dmin, 12 of 6-bit sc and m, 128 of codes."""
    return torch.cat([f.d, f.dmin, _sixes(f), _packed(f.codes, 4)], 1)


def unpack_q4_k(raw: Tensor) -> Fields:
    """Return the fields of (blocks, 144) bytes."""
    d, dmin, scales, qs = raw.split([2, 2, 12, 128], 1)
    sc, m = _of_sixes(scales)
    return Fields(codes=_unpacked(qs, 4), d=d, dmin=dmin, sc=sc, m=m)


def pack_q5_k(f: Fields) -> Tensor:
    """Return (blocks, 176) bytes: d, dmin, 12 of 6-bit sc and m, 32 of fifth bits, 128 of four lower bits."""
    fifth = in_bytes((f.codes >> 4).view(-1, 8, 32), 1)
    return torch.cat([f.d, f.dmin, _sixes(f), fifth, _packed(f.codes & 15, 4)], 1)


def unpack_q5_k(raw: Tensor) -> Fields:
    """Return the fields of (blocks, 176) bytes."""
    d, dmin, scales, fifth, qs = raw.split([2, 2, 12, 32, 128], 1)
    sc, m = _of_sixes(scales)
    return Fields(codes=_unpacked(qs, 4) | split(fifth, 1).reshape(-1, 256) << 4, d=d, dmin=dmin, sc=sc, m=m)


def pack_q6_k(f: Fields) -> Tensor:
    """Return (blocks, 210) bytes: 128 of four lower bits, 64 of two upper bits, 16 signed sc, d."""
    low = in_bytes((f.codes & 15).view(-1, 2, 64), 4)  # the first 64 of 128 codes in the lower halves
    return torch.cat([low.view(-1, 128), _packed(f.codes >> 4, 2), f.sc.to(torch.int8).view(torch.uint8), f.d], 1)


def unpack_q6_k(raw: Tensor) -> Fields:
    """Return the fields of (blocks, 210) bytes."""
    ql, qh, scales, d = raw.split([128, 64, 16, 2], 1)
    codes = split(ql.reshape(-1, 64), 4).reshape(-1, 256) | _unpacked(qh, 2) << 4
    return Fields(codes=codes, d=d, dmin=d[:, :0], sc=scales.contiguous().view(torch.int8).short(), m=d[:, :0])


def pack_iq4_xs(f: Fields) -> Tensor:
    """Return (blocks, 136) bytes: d, 2 of the upper two bits of sc + 32, 4 of its lower four bits, 128 of codes."""
    sc = (f.sc + 32).to(torch.uint8)  # (blocks, 8)
    high, low = in_bytes((sc >> 4).view(-1, 2, 4).mT, 2), in_bytes((sc & 15).view(-1, 4, 2).mT, 4)
    codes = in_bytes(f.codes.reshape(-1, 2, 16), 4)  # of 32 columns, the first 16 in the lower halves
    return torch.cat([f.d, high, low, codes.view(-1, 128)], 1)


def unpack_iq4_xs(raw: Tensor) -> Fields:
    """Return the fields of (blocks, 136) bytes."""
    d, high, low, qs = raw.split([2, 2, 4, 128], 1)
    sc = split(low, 4).mT.reshape(-1, 8) | split(high, 2).mT.reshape(-1, 8) << 4
    codes = split(qs.reshape(-1, 16), 4).reshape(-1, 256)
    return Fields(codes=codes, d=d, dmin=d[:, :0], sc=sc.short() - 32, m=d[:, :0])


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return (blocks, 32 * bits) bytes; the codes in one byte are 32 columns apart, the first in the lowest bits."""
    return in_bytes(codes.reshape(-1, 8 // bits, 32), bits).view(-1, 32 * bits)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    return split(packed.reshape(-1, 32), bits).reshape(-1, 256)


def _sixes(f: Fields) -> Tensor:
    """Return (blocks, 12) bytes of eight sc and eight m of six bits.

    Four bytes hold the first four sc in their lower six bits and, above them, the upper two bits of the last four sc;
    four bytes do the same for m; the last four bytes hold the lower four bits of the last four sc and m.
    """
    sc, m = f.sc.to(torch.uint8), f.m.to(torch.uint8)
    upper = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (sc, m)]
    return torch.cat([*upper, sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)


def _of_sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    first, second, lower = packed.split([4, 4, 4], 1)
    sc = torch.cat([first & 63, lower & 15 | first >> 6 << 4], 1)
    m = torch.cat([second & 63, lower >> 4 | second >> 6 << 4], 1)
    return sc.short(), m.short()


def in_bytes(parts: Tensor, bits: int) -> Tensor:
    """Pack (n, 8 / bits, k) uint8 runs of `bits` bits into (n, k) bytes, the first run in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=parts.device)[:, None]
    return (parts << shifts).sum(1, dtype=torch.uint8)


def split(raw: Tensor, bits: int) -> Tensor:
    """Unpack (n, k) bytes into (n, 8 / bits, k) runs of `bits` bits, the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)[:, None]
    return raw[:, None] >> shifts & (1 << bits) - 1


class Layout(NamedTuple):
    """Functions that convert fields to the bytes of blocks, and back."""

    pack: Callable[[Fields], Tensor]
    unpack: Callable[[Tensor], Fields]


KQUANTS: Mapping[str, Layout] = {
    "q2_k": Layout(pack_q2_k, unpack_q2_k),
    "q3_k": Layout(pack_q3_k, unpack_q3_k),
    "q4_k": Layout(pack_q4_k, unpack_q4_k),
    "q5_k": Layout(pack_q5_k, unpack_q5_k),
    "q6_k": Layout(pack_q6_k, unpack_q6_k),
    "iq4_xs": Layout(pack_iq4_xs, unpack_iq4_xs),
}
