"""The symbols of a matrix to bytes and back: one lane in a small blob, chunks of eight lanes in a large one, or zstd frames."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import layout as rules
from nearplane.coding import tans
from nearplane.coding.layout import Header, Layout
from nearplane.coding.side import BitReader, BitWriter, rice_parameter, varint, zigzag
from nearplane.coding.symbols import escape_rare, locate
from nearplane.errors import FormatError, NearplaneError, RecipeError

T = TypeVar("T")
R = TypeVar("R")
Escapes = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # rows, columns (positions), values


def _run(pool: ThreadPoolExecutor | None, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    if pool is None:
        return [function(item) for item in items]
    with pool:
        return list(pool.map(function, items))


def _zstandard(error: type[NearplaneError]) -> Any:
    try:
        import zstandard
    except ImportError as missing:
        raise error(
            "coder zstd needs the package zstandard, which is not installed: pip install 'nearplane[zstd]'"
        ) from missing
    return zstandard


def _compress(symbols: NDArray[np.uint8]) -> bytes:
    zstandard = _zstandard(RecipeError)
    parameters = zstandard.ZstdCompressionParameters(
        strategy=1, min_match=7, hash_log=6, window_log=17, target_length=0, write_content_size=True
    )
    return bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(symbols.tobytes()))


def _decompress(data: NDArray[np.uint8], count: int, where: str) -> NDArray[np.uint8]:
    zstandard = _zstandard(FormatError)
    try:
        claimed = zstandard.get_frame_parameters(data.tobytes()).content_size
        if claimed != count:
            raise FormatError(f"{where}: a zstd frame of {claimed} symbols, expected {count}; the file is damaged")
        found = zstandard.ZstdDecompressor(max_window_size=1 << 20).decompress(
            data.tobytes(), max_output_size=count, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: zstandard cannot read it ({error}); the file is damaged") from error
    return np.frombuffer(bytearray(found), np.uint8)


def _escape(
    symbols: NDArray[np.uint8],
    begin: int,
    counts: NDArray[np.int64],
    which: NDArray[np.int64],
    tables: NDArray[np.uint16] | None,
    layout: Layout,
    codes: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Escape what the tables lack, in place, and return the codes of all escapes in order."""
    if tables is not None:
        at = 0
        for count, table in zip(counts, which, strict=True):
            escape_rare(symbols[at : at + count], tables[table])
            at += int(count)
    found = locate(symbols, begin, layout)
    assert found is not None
    rows, columns = found
    values = np.zeros(len(rows), np.int32)  # the filling of an odd group is 0
    real = columns >= 0
    values[real] = codes[layout.row_order[rows[real]], layout.column_order[columns[real]]]
    return values


def _write_escapes(out: BitWriter, values: NDArray[np.int32]) -> None:
    out.gamma(len(values))
    if len(values):
        wide = values.astype(np.int64)
        parameter = rice_parameter(zigzag(wide))
        out.put(parameter, 4)
        out.rice(wide, parameter)


def _read_escapes(bits: BitReader) -> NDArray[np.int64]:
    count = bits.gamma("escapes")
    return bits.rice(count, bits.take(4, "escapes"), "escapes") if count else np.zeros(0, np.int64)


def _place(symbols: NDArray[np.uint8], begin: int, layout: Layout, values: NDArray[np.int64], where: str) -> Escapes:
    """Give the listed values to the escapes among the symbols."""
    found = locate(symbols, begin, layout, len(values))
    if found is None:
        raise FormatError(
            f"{where}: its symbols do not have the {len(values)} escapes of its list; the file is damaged"
        )
    rows, columns = found
    real = columns >= 0
    return rows[real], columns[real], values[real]


def encode_whole(
    header: BitWriter,
    of: Header,
    layout: Layout,
    tables: NDArray[np.uint16] | None,
    symbols: NDArray[np.uint8],
    codes: NDArray[np.int32],
) -> bytes:
    """Return all bytes of a small matrix after its shape, but for the checksum: header, escapes, one lane or a frame."""
    values = _escape(symbols, 0, layout.counts, layout.which, tables, layout, codes)
    _write_escapes(header, values)
    if tables is None:
        return header.bytes() + _compress(symbols)
    _, widths, offsets, states = tans.build(tables, of.coder == "huffman")
    out = np.empty(2 * len(symbols) + 16, np.uint8)
    lengths, words = np.empty(1, np.int64), np.empty(1, np.int64)
    end = tans.encode(symbols, layout.counts, layout.which, 1, widths, offsets, states, out, lengths, words)
    header.put(int(words[0]) & 4095, 12)
    header.extend(np.unpackbits(out[:end], bitorder="little")[int(words[0]) >> 12 :])
    return header.bytes()


def decode_whole(bits: BitReader, header: Header, layout: Layout) -> tuple[NDArray[np.uint8], *Escapes]:
    """Read what `encode_whole` wrote after the header: symbols, and the rows, columns and values of the escapes."""
    name, data = bits.name, bits.data
    values = _read_escapes(bits)
    if header.coder == "zstd":
        symbols = _decompress(data[(bits.at + 7) // 8 :], layout.total, name)
    else:
        entries = tans.build(rules.tables(header, layout), header.coder == "huffman")[0]
        padded = np.concatenate([data, np.zeros(tans.PADDING, np.uint8)])
        symbols = np.empty(layout.total, np.uint8)
        end = tans.decode_lane(padded, bits.at, layout.counts, layout.which, entries, symbols)
        if (end + 7) // 8 != len(data):
            raise FormatError(f"{name}: its stream does not end where its symbols do; the file is damaged")
    return symbols, *_place(symbols, 0, layout, values, name)


def encode_chunks(
    header: Header,
    layout: Layout,
    tables: NDArray[np.uint16] | None,
    symbols: NDArray[np.uint8],
    codes: NDArray[np.int32],
    pool: ThreadPoolExecutor | None,
) -> list[bytes]:
    """Return the chunks of a large matrix."""
    edges = rules.chunk_edges(layout.total)
    built = None if tables is None else tans.build(tables, header.coder == "huffman")

    def one(chunk: int) -> bytes:
        begin, end = edges[chunk], edges[chunk + 1]
        part = symbols[begin:end]
        counts, which = layout.segments(begin, end)
        escapes = BitWriter()
        _write_escapes(escapes, _escape(part, begin, counts, which, tables, layout, codes))
        if built is None:
            return escapes.bytes() + _compress(part)
        out = np.empty(2 * len(part) + 16 * tans.LANES, np.uint8)
        lengths, words = np.empty(tans.LANES, np.int64), np.empty(tans.LANES, np.int64)
        size = tans.encode(part, counts, which, tans.LANES, *built[1:], out, lengths, words)
        lanes = words.astype("<u2").tobytes() + b"".join(varint(int(length)) for length in lengths[:-1])
        return escapes.bytes() + lanes + out[:size].tobytes()

    return _run(pool, one, range(len(edges) - 1))


def compressed_bytes(header: Header, layout: Layout, symbols: NDArray[np.uint8], codes: NDArray[np.int32]) -> int:
    """Return the bytes of frames and escapes, and of the directory of a large matrix."""
    if header.chunked:
        return sum(len(chunk) + 7 for chunk in encode_chunks(header, layout, None, symbols, codes, None))
    return len(encode_whole(BitWriter(), header, layout, None, symbols, codes))


def decode_chunks(
    bits: BitReader, header: Header, layout: Layout, pool: ThreadPoolExecutor | None
) -> tuple[NDArray[np.uint8], *Escapes]:
    """Read the directory and the chunks behind a header; the same as `decode_whole`."""
    blob, name = bits.data, bits.name
    edges = rules.chunk_edges(layout.total)
    chunks = len(edges) - 1
    starts, checksums = _directory(bits, chunks)
    coded = header.coder != "zstd"
    entries = tans.build(rules.tables(header, layout), header.coder == "huffman")[0] if coded else None
    symbols = np.empty(layout.total, np.uint8)

    def one(chunk: int) -> Escapes:
        where = f"{name}, chunk {chunk} of {chunks}"
        data = blob[starts[chunk] : starts[chunk + 1]]
        if zlib.crc32(data) != checksums[chunk]:
            raise FormatError(
                f"{where}: the checksum of its {len(data)} bytes is wrong; the file is damaged, get it again"
            )
        begin, end = edges[chunk], edges[chunk + 1]
        reader = BitReader(data, 0, where)
        values = _read_escapes(reader)
        reader.at = (reader.at + 7) // 8 * 8
        if entries is None:
            symbols[begin:end] = _decompress(data[reader.at // 8 :], end - begin, where)
        else:
            words, lengths, first = _lanes(reader)
            source = blob[starts[chunk] :]
            if len(source) < len(data) + tans.PADDING:
                source = np.concatenate([data, np.zeros(tans.PADDING, np.uint8)])
            counts, which = layout.segments(begin, end)
            if not tans.decode_lanes(source, first, lengths, words, counts, which, entries, symbols[begin:end]):
                raise FormatError(f"{where}: a stream does not end where its symbols do; the file is damaged")
        return _place(symbols[begin:end], begin, layout, values, where)

    parts = _run(pool, one, range(chunks))
    rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    return symbols, rows, columns, values


def _directory(bits: BitReader, chunks: int) -> tuple[list[int], list[int]]:
    """Return where the chunks start, and the end, and their checksums."""
    blob, name = bits.data, bits.name
    bits.at = (bits.at + 7) // 8 * 8
    lengths, checksums = [], []
    for _ in range(chunks):
        lengths.append(bits.varint("directory"))
        checksums.append(bits.take(32, "directory"))
    head = bits.at // 8
    if zlib.crc32(blob[:head]) != bits.take(32, "directory"):
        raise FormatError(f"{name}: the checksum of its header is wrong; the file is damaged, get it again")
    starts = [head + 4]
    for length in lengths:
        starts.append(starts[-1] + length)
    if starts[-1] != len(blob):
        raise FormatError(
            f"{name}: its chunks take {starts[-1]} bytes, it has {len(blob)}; the file is cut short or damaged"
        )
    return starts, checksums


def _lanes(bits: BitReader) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the words and lengths of the lanes of a chunk, and the byte where the first one starts."""
    head = bits.at // 8 + 2 * tans.LANES
    if head > len(bits.data):
        raise bits.truncated("lanes")
    words = bits.data[bits.at // 8 : head].copy().view("<u2").astype(np.int64)
    bits.at = 8 * head
    lengths = [bits.varint("lanes") for _ in range(tans.LANES - 1)]
    first = bits.at // 8
    rest = len(bits.data) - first - sum(lengths)
    if rest < 0 or int(words.max()) >> 15:
        raise FormatError(f"{bits.name}: its lanes are longer than its {len(bits.data)} bytes; the file is damaged")
    return words, np.array([*lengths, rest], np.int64), first
