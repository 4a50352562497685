"""Bytes of the k-quants of GGUF: blocks of 256 weights with short integers for the steps of the groups in them."""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.formats.gguf.bits import Fields, joined, split


def pack_q2_k(f: Fields) -> Tensor:
    """Return (blocks, 84) bytes: 16 of 4-bit sc and m, 64 of codes, d, dmin."""
    sc, m = f.sc.to(torch.uint8), _integers(f.m).to(torch.uint8)
    return torch.cat([sc | m << 4, _twos(f.codes), f.d, _halves(f.dmin)], 1)


def unpack_q2_k(raw: Tensor) -> Fields:
    """Return what (blocks, 84) bytes hold."""
    scales, qs, d, dmin = raw.split([16, 64, 2, 2], 1)
    return Fields(codes=_of_twos(qs), d=d, dmin=dmin, sc=(scales & 15).short(), m=(scales >> 4).short())


def pack_q3_k(f: Fields) -> Tensor:
    """Return (blocks, 110) bytes: 32 of third bits, 64 of two lower bits, 12 of 6-bit sc + 32, d."""
    sc = (f.sc + 32).to(torch.uint8)  # (blocks, 16)
    low = sc[:, :8] & 15 | (sc[:, 8:] & 15) << 4
    high = joined((sc >> 4).view(-1, 4, 4), 2)  # byte j has those of j, j + 4, j + 8, j + 12
    third = joined((f.codes >> 2).view(-1, 8, 32), 1)
    return torch.cat([third, _twos(f.codes & 3), low, high, f.d], 1)


def unpack_q3_k(raw: Tensor) -> Fields:
    """Return what (blocks, 110) bytes hold."""
    third, qs, low, high, d = raw.split([32, 64, 8, 4, 2], 1)
    codes = _of_twos(qs) | split(third, 1).reshape(-1, 256) << 2
    sc = split(low, 4).reshape(-1, 16) | split(high, 2).reshape(-1, 16) << 4
    return Fields(codes=codes, d=d, dmin=None, sc=sc.short() - 32, m=None)


def pack_q4_k(f: Fields) -> Tensor:
    """Return (blocks, 144) bytes: d, dmin, 12 of 6-bit sc and m, 128 of codes."""
    return torch.cat([f.d, _halves(f.dmin), _sixes(f), _fours(f.codes)], 1)


def unpack_q4_k(raw: Tensor) -> Fields:
    """Return what (blocks, 144) bytes hold."""
    d, dmin, scales, qs = raw.split([2, 2, 12, 128], 1)
    sc, m = _of_sixes(scales)
    return Fields(codes=_of_fours(qs), d=d, dmin=dmin, sc=sc, m=m)


def pack_q5_k(f: Fields) -> Tensor:
    """Return (blocks, 176) bytes: d, dmin, 12 of 6-bit sc and m, 32 of fifth bits, 128 of four lower bits."""
    fifth = joined((f.codes >> 4).view(-1, 8, 32), 1)
    return torch.cat([f.d, _halves(f.dmin), _sixes(f), fifth, _fours(f.codes & 15)], 1)


def unpack_q5_k(raw: Tensor) -> Fields:
    """Return what (blocks, 176) bytes hold."""
    d, dmin, scales, fifth, qs = raw.split([2, 2, 12, 32, 128], 1)
    sc, m = _of_sixes(scales)
    return Fields(codes=_of_fours(qs) | split(fifth, 1).reshape(-1, 256) << 4, d=d, dmin=dmin, sc=sc, m=m)


def pack_q6_k(f: Fields) -> Tensor:
    """Return (blocks, 210) bytes: 128 of four lower bits, 64 of two upper bits, 16 signed sc, d."""
    low = joined((f.codes & 15).view(-1, 2, 64), 4)  # of every 128 codes the first 64 in the lower half of 64 bytes
    return torch.cat([low.view(-1, 128), _twos(f.codes >> 4), f.sc.to(torch.int8).view(torch.uint8), f.d], 1)


def unpack_q6_k(raw: Tensor) -> Fields:
    """Return what (blocks, 210) bytes hold."""
    ql, qh, scales, d = raw.split([128, 64, 16, 2], 1)
    codes = split(ql.reshape(-1, 64), 4).reshape(-1, 256) | _of_twos(qh) << 4
    return Fields(codes=codes, d=d, dmin=None, sc=scales.contiguous().view(torch.int8).short(), m=None)


def _twos(codes: Tensor) -> Tensor:
    """Return (blocks, 64) bytes: of every 128 codes of two bits, 32 neighbours after another in 32 bytes."""
    return joined(codes.reshape(-1, 4, 32), 2).view(-1, 64)


def _of_twos(packed: Tensor) -> Tensor:
    return split(packed.reshape(-1, 32), 2).reshape(-1, 256)


def _fours(codes: Tensor) -> Tensor:
    """Return (blocks, 128) bytes: of every 64 codes of four bits, the first 32 in the lower half of 32 bytes."""
    return joined(codes.reshape(-1, 2, 32), 4).view(-1, 128)


def _of_fours(packed: Tensor) -> Tensor:
    return split(packed.reshape(-1, 32), 4).reshape(-1, 256)


def _sixes(f: Fields) -> Tensor:
    """Return (blocks, 12) bytes of eight sc and eight m of six bits.

    Four bytes of sc and four of m have the first four in their lower six bits and the upper two bits of the last four above
    them; four more have the lower four bits of the last four sc and m.
    """
    sc, m = f.sc.to(torch.uint8), _integers(f.m).to(torch.uint8)
    upper = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (sc, m)]
    return torch.cat([*upper, sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)


def _of_sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    first, second, lower = packed.split([4, 4, 4], 1)
    found = []
    for upper, last in ((first, lower & 15), (second, lower >> 4)):
        found.append(torch.cat([upper & 63, last | upper >> 6 << 4], 1).short())
    return found[0], found[1]


def _integers(m: Tensor | None) -> Tensor:
    assert m is not None, "of a type with minima"
    return m


def _halves(dmin: Tensor | None) -> Tensor:
    assert dmin is not None, "of a type with minima"
    return dmin
