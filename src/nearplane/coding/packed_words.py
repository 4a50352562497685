"""Packing of small integers in 32-bit words: the dense little-endian bit stream of GPTQ and compressed-tensors.

Code `i` of a row takes the bits `i*bits ... (i+1)*bits - 1` of the row's stream, and word `r` holds the bits
`32*r ... 32*r + 31`, low bits first. So 32 codes fill `bits` words exactly, and codes straddle words only where `bits`
does not divide 32 (3, 5, 6, 7).

Eight codes take `bits` whole bytes: they are collected in a 64-bit integer, whose low `bits` bytes are copied. This
requires a little-endian machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = range(2, 9)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned integers along the last axis; the last word of a row is padded with zero bits.

    Args:
        codes: (..., n) codes of any integer dtype, in 0 ... 2^bits - 1.
        bits: Bits per code, 2 ... 8.

    Returns:
        (..., ceil(n*bits / 32)) int32 words.

    Raises:
        ValueError: `bits` or a code is outside its range.
    """
    _check(bits)
    if codes.numel():
        low, high = torch.stack(codes.aminmax()).tolist()  # a device is waited for once
        if low < 0 or high >= 2**bits:
            raise ValueError(f"The codes must lie in 0 ... {2**bits - 1}, found {low} ... {high}.")
    n = codes.shape[-1]
    blocks = -(-n // 32)
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, 32 * blocks - n))
    eights = torch.zeros(*codes.shape[:-1], 4 * blocks, dtype=torch.int64, device=codes.device)
    for j in range(8):
        eights |= codes[..., j::8].to(torch.int64) << (bits * j)
    stream = eights.unsqueeze(-1).view(torch.uint8)[..., :bits]  # (..., 4*blocks, bits) bytes
    words = stream.reshape(*codes.shape[:-1], 4 * blocks * bits).view(torch.int32)
    return words[..., : words_of(n, bits)].contiguous()


def unpack(words: Tensor, bits: int, n: int) -> Tensor:
    """Read `n` integers from every row of packed words: the inverse of `pack`.

    Args:
        words: (..., ceil(n*bits / 32)) int32 words.
        bits: Bits per code, 2 ... 8.
        n: Number of codes per row.

    Returns:
        (..., n) uint8 codes in 0 ... 2^bits - 1.

    Raises:
        ValueError: `bits` is outside its range, or the words are not int32 or not `words_of(n, bits)` per row.
    """
    _check(bits)
    if words.dtype != torch.int32 or words.shape[-1] != words_of(n, bits):
        raise ValueError(
            f"{n} codes of {bits} bits take {words_of(n, bits)} words of torch.int32, "
            f"found {words.shape[-1]} of {words.dtype}."
        )
    blocks = -(-n // 32)
    words = torch.nn.functional.pad(words, (0, blocks * bits - words.shape[-1])).contiguous()
    stream = words.view(torch.uint8).view(*words.shape[:-1], 4 * blocks, bits)
    eights = torch.nn.functional.pad(stream, (0, 8 - bits)).view(torch.int64).squeeze(-1)  # (..., 4*blocks)
    codes = torch.empty(*words.shape[:-1], 32 * blocks, dtype=torch.uint8, device=words.device)
    for j in range(8):
        codes[..., j::8] = (eights >> (bits * j)) & (2**bits - 1)
    return codes[..., :n].contiguous()


def unpack_whole(words: Tensor, bits: int, n: int) -> Tensor:
    """Read `n` integers from every row of words that hold whole codes, as compressed-tensors before 0.18 packs them.

    A word holds 32 // bits codes, the first in its lowest bits; where `bits` divides 32 that is the dense stream.

    Args:
        words: (..., ceil(n / (32 // bits))) int32 words.
        bits: Bits per code, 2 ... 8.
        n: Number of codes per row.

    Returns:
        (..., n) uint8 codes in 0 ... 2^bits - 1.
    """
    places = bits * torch.arange(32 // bits, dtype=torch.int32, device=words.device)
    codes: Tensor = (words.unsqueeze(-1) >> places) & (2**bits - 1)
    return codes.flatten(-2)[..., :n].to(torch.uint8)


def words_of(n: int, bits: int) -> int:
    """Return the number of 32-bit words that `n` codes take."""
    return -(-n * bits // 32)


def whole_words_of(n: int, bits: int) -> int:
    """Return the number of 32-bit words that `n` codes take if none straddles two; see `unpack_whole`."""
    return -(-n // (32 // bits))


def _check(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"Only codes of {BITS[0]} to {BITS[-1]} bits can be packed, found {bits}.")
