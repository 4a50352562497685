"""Linear layer with the decoded integers of an entropy-coded matrix on the CPU, a width to each column; see `words_linear.py`.

    y = row_scale * (codes @ (column_scale * x)) + bias

The width of a column is the one at which its codes and patches take least; a patch is a code that does not fit in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nearplane.coding.packed_matrix import PackedMatrix
from nearplane.compiled import compiled
from nearplane.loading import product_coded
from nearplane.loading.product_coded import FIELDS, NARROW, WIDTHS, Addressed, Codes
from nearplane.loading.product_cpu import BLOCK
from nearplane.loading.words_linear import WordsLinear

Bytes = npt.NDArray[np.int8]
Counts = npt.NDArray[np.int64]

PATCH_COST = 48  # bits that a patch counts in the choice of a width: it takes 40, and time
WHOLE = tuple(32 // bits for bits in WIDTHS)  # fields of a word that have its own width
TWO = WIDTHS.index(2) + 1


class CodedLinear(WordsLinear):
    """Layer of an entropy-coded matrix, without a bias.

    Args:
        packed: The decoded matrix, on the CPU.
        dtype: Dtype of `weight`.

    Attributes:
        addressed: What `product_coded` reads; its tensors are buffers.
    """

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__(packed.shape, dtype)
        out, width = packed.shape
        codes, above = np.zeros((-(-out // BLOCK), width, BLOCK), np.int8), np.zeros((width, 9), np.int64)
        groups = np.array(packed.groups, np.int64).reshape(-1, 5)
        _unpack(np.asarray(packed.codes), groups, np.argsort(packed.orders.rows), codes)
        rows, at = packed.patches.rows, np.argsort(packed.orders.columns)[packed.patches.columns]
        patched = codes[rows // BLOCK, at, rows % BLOCK] + packed.patches.delta
        codes[rows // BLOCK, at, rows % BLOCK] = 0
        _count(codes, above)
        self._addressed: Addressed | None = None
        places, self._counts = places_of(widths_of(above, out))
        bits = np.zeros(width, np.int64)
        _bits_of(places, np.array(self._counts), bits)
        words = np.zeros((len(codes), sum(self._counts), BLOCK), np.int32)
        _pack(codes, places, np.array(self._counts), bits, words)
        words[-1, :, out - BLOCK * len(codes) + BLOCK :] = 0
        found = np.empty((above[np.arange(width), bits].sum(), 2), np.int64)
        outside = np.empty(len(found), np.int8)
        _find(codes, bits, found, outside)
        rows, at = np.concatenate([rows, found[:, 0]]), np.concatenate([at, found[:, 1]])
        patched = np.concatenate([patched, outside])
        columns = packed.orders.columns[at]
        order = np.lexsort((rows, columns, rows // BLOCK))
        rows, columns, patched = rows[order], columns[order], patched[order]
        short = bool((np.abs(patched) < 2**15).all())
        steps = np.zeros(len(words) * BLOCK, np.float32)
        steps[:out] = packed.scales.row_scale
        arrays = {
            "words": words,
            "columns": _numbers(np.where(places < 0, -1, packed.orders.columns[places]), width),
            "column_scale": packed.scales.column_scale.view(np.int32),
            "row_scale": steps.view(np.int32).reshape(-1, BLOCK),
            "patch_start": np.searchsorted(rows // BLOCK, np.arange(len(words) + 1)).astype(np.int32),
            "patch_outputs": (rows % BLOCK).astype(np.uint8),
            "patch_columns": _numbers(columns, width),
            "patch_codes": patched.astype(np.int16) if short else patched.astype(np.float32).view(np.int32),
        }
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)), persistent=False)

    @property
    def addressed(self) -> Addressed:
        """The codes on the CPU, and where they lie."""
        if (addressed := self._addressed) is None or not addressed.holds(self._buffers["row_scale"]):
            words, *others = (self.get_buffer(name).cpu() for name in Codes._fields if name != "counts")
            codes = Codes(words, self._counts, *others)
            addressed = self._addressed = Addressed(codes, codes.numbers())
        return addressed

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have: their tensors lie elsewhere."""
        return {**self.__dict__, "_addressed": None}

    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, outputs) with the codes."""
        return product_coded.product(x.contiguous(), self.addressed)

    def strips(self) -> Iterator[Tensor]:
        """Yield decoded (in, outputs) values."""
        addressed, count = self.addressed, torch.get_num_threads()
        for firsts in torch.arange(0, len(addressed.codes.words) * BLOCK, BLOCK, device="cpu").split(count):
            yield product_coded.values(addressed, firsts, BLOCK)

    def rows(self, wanted: Tensor) -> Tensor:
        """Return the float32 values (rows, in) of some (rows,) outputs, such as the embeddings of tokens.

        Raises:
            IndexError: There is no such output.
        """
        outputs = wanted.cpu().long().contiguous()
        if len(outputs) and not 0 <= int(outputs.min()) <= int(outputs.max()) < self.out_features:
            low, high = int(outputs.min()), int(outputs.max())
            raise IndexError(f"rows {low} to {high} are asked for of a matrix of {self.out_features} rows")
        return product_coded.values(self.addressed, outputs, 1).T.contiguous()


def widths_of(above: Counts, out: int) -> Counts:
    """Return the width of each column, the place in `WIDTHS` counted from 1; 0: no bits, whose codes other than 0 are patches.

    The sum of the bits of words and of `PATCH_COST` for each patch is made small: first by each column alone, then by
    columns that move to fields that cost nothing, or out of a word that few of them would begin.

    Args:
        above: (in, 9) number of codes of a column that need more than 0, 1 ... 8 bits.
        out: Number of rows.
    """
    bits = np.array([0, *(32 / fields for fields in WHOLE)]) * out
    outside = above[:, (0, *WIDTHS)]
    costs = bits + PATCH_COST * outside
    chosen: Counts = costs.argmin(1)
    # fields of 2 bits beside others cost nothing: columns take them that lose least by it; these make fewer such words
    gain = np.where(chosen > TWO, costs.min(1) - PATCH_COST * outside[:, TWO], 0)
    free = max(0, fields_beside(chosen) - int((chosen == TWO).sum()))
    moved = np.argsort(-gain, kind="stable")[: free * 9 // 10]
    chosen[moved[gain[moved] > 0]] = TWO
    used = np.unique(chosen[chosen > 0])
    for narrow, wide in itertools.pairwise(used):
        there = np.flatnonzero(chosen == narrow)
        left = max(0, len(there) - (fields_beside(chosen) if narrow == TWO else 0)) % (fields := WHOLE[narrow - 1])
        more = costs[there, wide] - costs[there, narrow]
        moved = np.argsort(more, kind="stable")[:left]
        if more[moved].sum() < (fields - left) * bits[narrow]:
            chosen[there[moved]] = wide
    return chosen


def fields_beside(chosen: Counts) -> int:
    """Return the number of fields of 2 bits in words of columns with other widths; see `widths_of`."""
    words = (-(-int((chosen == n + 1).sum()) // whole) for n, whole in enumerate(WHOLE))
    return sum(count for count, fields, whole in zip(words, FIELDS, WHOLE, strict=True) if fields > whole)


def places_of(chosen: Counts) -> tuple[Counts, tuple[int, ...]]:
    """Return (places,) the column of each field, -1 where there is none, and the number of words in each of `WIDTHS`."""
    columns = [np.flatnonzero(chosen == n + 1) for n in range(len(WIDTHS))]
    beside, columns[TWO - 1] = np.split(columns[TWO - 1], [fields_beside(chosen)])
    places, counts = list[Counts](), list[int]()
    for part, fields, whole in zip(columns, FIELDS, WHOLE, strict=True):
        counts.append(count := -(-len(part) // whole))
        filled = np.full((count, fields), -1)
        filled[:, :whole].flat[: len(part)] = part
        if fields > whole:
            now, beside = np.split(beside, [count])
            filled[: len(now), whole] = now
        places.append(filled.reshape(-1))
    return np.concatenate(places), tuple(counts)


def _numbers(columns: npt.NDArray[np.integer], width: int) -> npt.NDArray[np.integer]:
    """Return numbers of columns as `Codes` has them; 16 bits are seen as signed, as torch does not pickle others."""
    return columns.astype(np.uint16).view(np.int16) if width <= NARROW else columns.astype(np.int32)


@compiled(error_model="numpy")
def _unpack(packed: npt.NDArray[np.uint8], groups: Counts, order: Counts, codes: Bytes) -> None:  # pragma: no cover
    """Write the codes of every row: (blocks, in, BLOCK)."""
    for row in range(len(order)):
        line = codes[row // BLOCK, :, row % BLOCK]
        for group in range(len(groups)):
            start, stop, nibbles, first, width = groups[group]
            part = packed[first + order[row] * width : first + (order[row] + 1) * width]
            if nibbles:
                for j in range((stop - start) // 2):
                    line[start + 2 * j] = np.int8(part[j] & 15) - np.int8(8)
                    line[start + 2 * j + 1] = np.int8(part[j] >> 4) - np.int8(8)
                if (stop - start) % 2:
                    line[stop - 1] = np.int8(part[width - 1] & 15) - np.int8(8)
            else:
                for j in range(width):
                    line[start + j] = np.int8(part[j])


@compiled(error_model="numpy")
def _count(codes: Bytes, above: Counts) -> None:  # pragma: no cover
    """Add to (in, 9) how many codes of each column need more than 0, 1 ... 7 bits; -1 needs 1, -2 and 1 need 2."""
    sums = np.zeros((8, BLOCK), np.uint8)  # of 255 blocks at most
    for column in range(codes.shape[1]):
        for first in range(0, len(codes), 255):
            sums[:] = 0
            for block in range(first, min(first + 255, len(codes))):
                part = codes[block, column]
                for bits in range(8):
                    low, high = np.int8(-(1 << bits >> 1)), np.int8((1 << bits) - 1 >> 1)
                    for k in range(BLOCK):
                        sums[bits, k] += (part[k] < low) | (part[k] > high)
            for bits in range(8):
                above[column, bits] += sums[bits].sum()


@compiled(error_model="numpy")
def _bits_of(places: Counts, counts: Counts, bits: Counts) -> None:  # pragma: no cover
    """Write the bits of each column that has a field."""
    place = 0
    for n in range(len(WIDTHS)):
        for _ in range(counts[n]):
            for i in range(FIELDS[n]):
                if places[place] >= 0:
                    bits[places[place]] = min(WIDTHS[n], 32 - WIDTHS[n] * i)
                place += 1


@compiled(error_model="numpy")
def _pack(
    codes: Bytes, places: Counts, counts: Counts, bits: Counts, words: npt.NDArray[np.int32]
) -> None:  # pragma: no cover
    """Write the words of codes; a code that does not fit counts 0."""
    for block in range(len(codes)):
        place, j = 0, 0
        for n in range(len(WIDTHS)):
            for _ in range(counts[n]):
                word = words[block, j]
                for i in range(FIELDS[n]):
                    column, shift = places[place], np.int32(WIDTHS[n] * i)
                    offset = np.int32(0 if i == FIELDS[n] - 1 else 1 << WIDTHS[n] - 1)
                    if column >= 0:
                        part, high = codes[block, column], np.int32((1 << bits[column]) - 1 >> 1)
                        for k in range(BLOCK):
                            code = np.int32(part[k])
                            fits = -high - 1 <= code <= high
                            word[k] |= ((code if fits else np.int32(0)) + offset) << shift
                    else:
                        for k in range(BLOCK):
                            word[k] |= offset << shift
                    place += 1
                j += 1


@compiled(error_model="numpy")
def _find(codes: Bytes, bits: Counts, found: Counts, outside: Bytes) -> None:  # pragma: no cover
    """Write (patches, 2) rows and columns of codes that do not fit, and these codes."""
    patch = 0
    for block in range(len(codes)):
        for column in range(codes.shape[1]):
            part, some = codes[block, column], False
            low, high = np.int8(-(1 << bits[column] >> 1)), np.int8((1 << bits[column]) - 1 >> 1)
            for k in range(BLOCK):
                some |= (part[k] < low) | (part[k] > high)
            for k in range(BLOCK if some else 0):
                if part[k] < low or part[k] > high:
                    found[patch, 0], found[patch, 1], outside[patch] = block * BLOCK + k, column, part[k]
                    patch += 1
