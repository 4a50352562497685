"""Decoding of coded matrices on the device that will hold them, looked up by its type.

The CPU reads headers, checksums, lists of escapes and the starts of lanes. The device decodes the lanes of many matrices
by one launch, and the CPU then waits once for what it has to know: faults, and places of escapes. Devices without a
decoder, and CUDA where Triton is not installed, get what the CPU has decoded: the same integers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.coding.blob import Coded, streams_of
from nearplane.coding.chunk import ESCAPE_COUNT_WRONG, STREAM_END_WRONG, Patches
from nearplane.coding.layout import Header, Layout
from nearplane.coding.packed_matrix import PackedMatrix, column_groups, column_table
from nearplane.coding.payload import damage

# coded bytes of the matrices that one launch decodes, which take memory a second time meanwhile
MAX_BATCH_BYTES = 1 << 28


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from nearplane.coding import decode_triton

    return decode_triton


DECODERS: dict[str, Callable[[], ModuleType | None]] = {"cuda": _triton}


def decoder_of(device: torch.device) -> ModuleType | None:
    """Return the module that decodes on a device, as `decode_triton` does; None: the CPU decodes for it."""
    return DECODERS.get(device.type, lambda: None)()


class Blob(NamedTuple):
    """Bytes of a coded matrix.

    Args:
        coded: (bytes,) uint8, on any device.
        name: Name of the matrix for messages.
    """

    coded: Tensor
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A matrix whose symbols lie on a device.

    Args:
        header, layout: What the blob says of it.
        symbols: (symbols,) uint8 on the device, in the order of the layout; part of the symbols of its batch.
        outside: (groups,) whether codes of a group of bytes exceed -8 ... 7.
        patches: Corrections of escaped codes.
        decoder: Kernels of the device.
    """

    header: Header
    layout: Layout
    symbols: Tensor
    outside: NDArray[np.bool_]
    patches: Patches
    decoder: ModuleType

    def packed(self) -> PackedMatrix:
        """Return the matrix in the form of a runtime, its codes on the device: what `blob.decode_packed` returns."""
        repacked = ~self.layout.groups.pairs & ~self.outside
        groups, offsets, out = column_groups(self.layout, repacked), self.layout.groups.offsets, self.header.shape[0]
        table = np.array(
            [
                (offset, (end - offset) // out, group.first_byte, group.row_bytes, group.row_bytes * out, packed)
                for (offset, end), group, packed in zip(itertools.pairwise(offsets), groups, repacked, strict=True)
            ],
            np.int64,
        )
        codes = self.symbols.new_empty(int(table[:, 4].sum()))
        self.decoder.pack(self.symbols, torch.from_numpy(table).to(codes.device), int(table[:, 4].max()), codes)
        orders, scales = self.layout.orders, self.header.scales
        return PackedMatrix(orders=orders, codes=codes, groups=groups, patches=self.patches, scales=scales)

    def codes(self) -> Tensor:
        """Return (out, in) int32 codes on the device: those that `blob.decode` returns."""
        (row_order, column_order), device = self.layout.orders, self.symbols.device
        groups = column_groups(self.layout, np.zeros_like(self.outside))
        columns = torch.from_numpy(column_table(groups, column_order)).to(device)
        places = torch.from_numpy(np.argsort(row_order)).to(device)
        codes = self.symbols.new_empty(self.header.shape, dtype=torch.int32)
        self.decoder.unpack(self.symbols, places, columns, codes)
        if len(self.patches.delta):
            rows, patched, delta = (torch.from_numpy(part.astype(np.int64)).to(device) for part in self.patches)
            codes[rows, patched] += delta.to(torch.int32)
        return codes


def decoded(blobs: Iterable[Blob], device: torch.device) -> Iterator[Decoded]:
    """Decode any number of matrices on a device that has a decoder, batch by batch. See `decode_all`."""
    batch: list[Blob] = []
    size = 0
    for blob in blobs:
        if size + blob.coded.numel() > MAX_BATCH_BYTES and batch:
            results, batch, size = decode_all(batch, device), [], 0
            yield from results
        batch.append(blob)
        size += blob.coded.numel()
    if batch:
        yield from decode_all(batch, device)


def decode_all(blobs: Sequence[Blob], device: torch.device) -> list[Decoded]:
    """Decode several matrices on a device that has a decoder.

    Raises:
        FormatError: The bytes of one are damaged, truncated, or of another version of the format.
    """
    decoder = decoder_of(device)
    if decoder is None:
        raise ValueError(f"{device} has no decoder; ask decoder_of before.")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parsed = list(pool.map(lambda blob: streams_of(blob.coded.cpu().numpy(), blob.name), blobs))
    sizes = [blob.coded.numel() for blob in blobs]
    padding = torch.zeros(-sum(sizes) % 4, dtype=torch.uint8, device=device)
    coded = torch.cat([*(blob.coded.to(device) for blob in blobs), padding])
    plan = _planned(parsed, sizes)
    parts = [table.reshape(-1) for table in (plan.chunks, plan.lanes, plan.segments)]
    tables = torch.from_numpy(np.concatenate(parts)).to(device).split([len(part) for part in parts])
    entries = torch.from_numpy(plan.entries.view(np.int32)).to(device)
    symbols = torch.empty(sum(each.layout.total for each in parsed), dtype=torch.uint8, device=device)
    ends = [len(plan.chunks), len(plan.chunks), sum(plan.groups), sum(plan.escapes)]
    found = torch.zeros(sum(ends), dtype=torch.int32, device=device)
    decoder.decode(coded, *tables, entries, symbols, *found.split(ends))
    wrong, escaped, outside, escapes = np.split(found.cpu().numpy(), np.cumsum(ends)[:-1])
    results, chunk, group, escape, symbol = [], 0, 0, 0, 0
    for each, blob, groups, listed in zip(parsed, blobs, plan.groups, plan.escapes, strict=True):
        chunks = slice(chunk, chunk + len(each.streams.heads.counts))
        patches = _patches(each, blob.name, wrong[chunks], escaped[chunks], escapes[escape : escape + listed])
        results.append(
            Decoded(
                decoder=decoder,
                header=each.header,
                layout=each.layout,
                symbols=symbols[symbol : symbol + each.layout.total],
                outside=outside[group : group + groups] != 0,
                patches=patches,
            )
        )
        chunk, group, escape, symbol = chunks.stop, group + groups, escape + listed, symbol + each.layout.total
    return results


class _Plan(NamedTuple):
    """Arguments of `decode_triton.decode` for all matrices of a batch, and how many groups and escapes each of them has."""

    chunks: NDArray[np.int64]
    lanes: NDArray[np.int64]
    segments: NDArray[np.int64]
    entries: NDArray[np.uint32]  # (tables, 4096) each different table once
    groups: list[int]
    escapes: list[int]


def _planned(parsed: Sequence[Coded], sizes: Sequence[int]) -> _Plan:
    """Return the tables of a batch; `sizes` are the bytes of the blobs, one behind the other."""
    chunks, lanes, segments, groups, escapes = [], [], [], [0], [0]
    byte = symbol = segment = 0
    number_of: dict[bytes, int] = {}  # of each different table
    for (_, layout, (edges, heads, entries)), size in zip(parsed, sizes, strict=True):
        (cell_edges, cell_tables), pairs = layout.cells, layout.groups.pairs
        numbers = np.array([number_of.setdefault(table.tobytes(), len(number_of)) for table in entries])
        cuts = np.union1d(cell_edges, edges)  # every segment lies between two of them
        cell = np.searchsorted(cell_edges, cuts[:-1], side="right") - 1
        group = cell * len(pairs) // len(cell_tables)
        segments.append(np.stack([np.diff(cuts), numbers[cell_tables[cell]], sum(groups) + group, pairs[group]], 1))
        first = segment + np.searchsorted(cuts, edges)
        listed = sum(escapes) + np.cumsum(heads.counts) - heads.counts
        chunks.append(np.stack([symbol + edges[:-1], first[:-1], first[1:], listed, heads.counts], 1))
        begin = byte + heads.firsts[:, None] + np.cumsum(heads.lengths, 1) - heads.lengths
        lanes.append(np.stack([begin, heads.lengths, heads.words], 2))
        groups.append(len(pairs))
        escapes.append(len(heads.values))
        byte, symbol, segment = byte + size, symbol + layout.total, segment + len(cell)
    tables = [np.concatenate(part).astype(np.int64) for part in (chunks, lanes, segments)]
    different = np.frombuffer(bytearray().join(number_of), np.uint32).reshape(-1, 4096)
    return _Plan(tables[0], tables[1], tables[2], different, groups[1:], escapes[1:])


def _patches(
    coded: Coded, name: str, wrong: NDArray[np.int32], escaped: NDArray[np.int32], escapes: NDArray[np.int32]
) -> Patches:
    """Assign the values of the lists to the escapes of a matrix; see `chunk.resolve`.

    Raises:
        FormatError: A lane does not end where its symbols do, or a chunk has other escapes than its list.
    """
    (edges, heads, _), (offsets, starts, stops, pairs) = coded.streams, coded.layout.groups
    # of each entry of a list, and of each place for a symbol
    chunk = np.repeat(np.arange(len(heads.counts)), heads.counts)
    number = np.arange(len(chunk)) - (np.cumsum(heads.counts) - heads.counts)[chunk]
    written = number < escaped[chunk]
    place, byte = edges[chunk[written]] + (escapes[written] >> 8), escapes[written] & 255
    paired = pairs[np.searchsorted(offsets, place, side="right") - 1]
    halves = np.concatenate([2 * place[~paired | (byte & 15 == 0)], 2 * place[paired & (byte < 16)] + 1])
    halves.sort()  # in the order of the traversal, low nibbles first
    place, half = halves >> 1, halves & 1
    counts = np.bincount(np.searchsorted(edges, place, side="right") - 1, minlength=len(heads.counts))
    miscounted = (counts != heads.counts) | (escaped > heads.counts)
    for damaged in np.flatnonzero((wrong != 0) | miscounted)[:1]:
        fault = STREAM_END_WRONG if wrong[damaged] else ESCAPE_COUNT_WRONG
        raise damage(fault, name, int(damaged), len(wrong))
    group = np.searchsorted(offsets, place, side="right") - 1
    paired, width = pairs[group], stops[group] - starts[group]
    row, symbol = np.divmod(place - offsets[group], np.where(paired, (width + 1) // 2, width))
    column = np.where(paired, 2 * symbol + half, symbol)
    delta = heads.values - np.where(paired, -8, -128)
    kept = column < width  # all but what fills odd groups
    row_order, column_order = coded.layout.orders
    columns = column_order[(starts[group] + column)[kept]]
    return Patches(row_order[row[kept]], columns, delta[kept])
