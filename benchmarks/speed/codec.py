"""How fast codes are coded, beside copying memory, and how near the coded size is to the entropies.

    python benchmarks/speed/codec.py [--side 4096] [--repeats 7]

One core, one run, in turns: every repeat times a copy of 64 MiB and then each part of the codec, and the figures are
medians of the repeats' ratios, so that they hold on a busy machine. "1/n" is n times the time that copying as many bytes as
there are weights takes. Sizes: columns whose spread is log-uniform in 0.3 ... 8, against the plug-in entropy of the codes given the
stored classes, and that of each column with Miller and Madow's correction, (symbols - 1) / (2 ln 2 rows).
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import blob as blob_file
from nearplane.coding import chunk, header_bits, layout, payload, tans
from nearplane.coding.bit_stream import read_rice
from nearplane.coding.blob import Contents, decode, decode_packed, encode, size
from nearplane.coding.layout import Header
from nearplane.coding.scales import Scales, stored_base
from nearplane.theory.huffman import coded_bytes, estimated_size


def main() -> None:
    """Print a table of speeds and a table of sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    side = arguments.side
    print(f"Speeds at {side} x {side}, millions of weights a second on one core, and against copying memory\n")
    print(
        "| codes | bits | copy, GB/s | decode: coder | decode to packed | decode to int32 | encode: coder | encode: all | size() |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    cases = {
        "pairs, one spread, 2 bits": np.full(side, 2.0**-0.05),
        "pairs, one spread, 3 bits": np.full(side, 2.0**0.95),
        "bytes, one spread, 4 bits": np.full(side, 2.0**1.95),
        "both, spreads 0.3 ... 8": spreads(side),
    }
    for name, spread in cases.items():
        print(f"| {name} | {speeds(matrix(spread, None), arguments.repeats)} |", flush=True)
    print(f"\nSizes at {side} x {side}, bits per weight\n")
    print("| codes | coder | coded | entropy given classes | above it | of columns | above it | size() off by |")
    print("|---|---|---|---|---|---|---|---|")
    for name, freedom in (("gaussian", None), ("student t5", 5)):
        contents = matrix(spreads(side), freedom)
        classes = entropy_of_classes(contents)
        corrected = mean_entropy(contents.codes.T) + miller_madow(contents.codes)
        for coder in ("tans", "one huffman code"):
            count = len(encode(contents, threads=1)) if coder == "tans" else coded_bytes(contents.codes)
            bits = 8 * count / contents.codes.size
            foretold = (size(contents) if coder == "tans" else estimated_size(contents.codes)).bytes / count - 1
            print(
                f"| {name} | {coder} | {bits:.4f} | {classes:.4f} | {bits / classes - 1:+.2%} "
                f"| {corrected:.4f} | {bits - corrected:+.4f} | {foretold:+.3%} |",
                flush=True,
            )


def spreads(side: int) -> NDArray[np.float64]:
    """Return log-uniform standard deviations in 0.3 ... 8."""
    return np.exp(np.random.default_rng(0).uniform(math.log(0.3), math.log(8), side))


def matrix(spread: NDArray[np.float64], freedom: int | None) -> Contents:
    """Return a square matrix of rounded noise, its columns' exponents as water-filling leaves them."""
    rng, side = np.random.default_rng(1), len(spread)
    codes = np.empty((side, side), np.int32)
    for i in range(side):
        noise = (
            rng.standard_normal(side) if freedom is None else rng.standard_t(freedom, side) * math.sqrt(1 - 2 / freedom)
        )
        codes[i] = np.rint(noise * spread)
    scales = Scales(
        base=stored_base(0.01),
        columns=np.round(-8 * np.log2(spread)).astype(np.int32),
        column_resolution=8,
        rows=np.zeros(side, np.int32),
        row_resolution=1,
    )
    return Contents(codes=codes, scales=scales)


def mean_entropy(parts: Iterable[NDArray[np.int32]]) -> float:
    """Return the plug-in entropy of codes, each part a source of its own, in bits per weight."""
    total, size = 0.0, 0
    for part in parts:
        counts = np.unique(part, return_counts=True)[1]
        total, size = total + float(counts @ (math.log2(part.size) - np.log2(counts))), size + part.size
    return total / size


def entropy_of_classes(contents: Contents) -> float:
    """Return the plug-in entropy of codes given the classes of columns and rows that are stored, in bits per weight."""
    header = header_bits.read_header(encode(contents, threads=1), "matrix")[0]
    spreads = header.spread_of(header.column_levels()[None, :], header.row_levels[:, None])  # (out, in)
    return mean_entropy(contents.codes[spreads == spread] for spread in np.unique(spreads))


def miller_madow(codes: NDArray[np.int32]) -> float:
    """Return what is added to the plug-in entropy of the columns, in bits per weight."""
    return sum(len(np.unique(column)) - 1 for column in codes.T) / (2 * math.log(2) * codes.size)


def speeds(contents: Contents, repeats: int) -> str:
    """Return the cells of a row of the first table."""
    blob = encode(contents, threads=1)
    choices = blob_file._choices(contents)
    source = np.random.default_rng(2).integers(0, 256, 1 << 26, dtype=np.uint8)
    target = np.empty_like(source)
    parts: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, source),
        "decoder": decoder(blob),
        "packed": lambda: decode_packed(blob, threads=1),
        "codes": lambda: decode(blob, threads=1),
        "encoder": encoder(contents, choices.header, choices.layout),
        "encode": lambda: encode(contents, threads=1),
        "size": lambda: size(contents),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats + 1):
        for name, part in parts.items():
            start = time.thread_time()
            part()
            times[name].append(time.thread_time() - start)
    weights = contents.codes.size
    copied = [len(source) / t for t in times["copy"][1:]]  # bytes a second; the first repeat warms up
    cells = [f"{8 * len(blob) / weights:.2f}", f"{statistics.median(copied) / 1e9:.1f}"]
    for name in list(parts)[1:]:
        speed = [weights / t for t in times[name][1:]]
        ratio = statistics.median(c / s for c, s in zip(copied, speed, strict=True))
        cells.append(f"{statistics.median(speed) / 1e6:.0f} (1/{ratio:.1f})")
    return " | ".join(cells)


def decoder(blob: NDArray[np.uint8]) -> Callable[[], object]:
    """Return what runs the lanes of all chunks into one buffer, after everything around them was read."""
    header, arrangement, bits = header_bits.read_header(blob, "matrix")
    edges = layout.chunk_edges(arrangement.total)
    starts, _ = payload._directory(bits, len(edges) - 1)
    entries = tans.build(layout.frequencies(header, arrangement))[0]
    symbols = np.empty(arrangement.total, np.uint8)
    chunks = []
    for n, (begin, end) in enumerate(itertools.pairwise(edges)):
        data = np.concatenate([blob[starts[n] : starts[n + 1]], np.zeros(tans.PADDING_BYTES, np.uint8)])
        lanes = tans.Lanes(np.empty(tans.LANES, np.int64), np.empty(tans.LANES, np.int64))
        at, count, parameter = chunk._read_count(data[: -tans.PADDING_BYTES])
        at = read_rice(data[: -tans.PADDING_BYTES], at, parameter, np.empty(count, np.int64))
        _, first = chunk._read_lanes(data[: -tans.PADDING_BYTES], (at + 7) // 8, lanes)
        segments = chunk.segments(begin, end, arrangement.cells)
        chunks.append((data, first, lanes, segments, entries, symbols[begin:end]))

    def run() -> None:
        for each in chunks:
            assert tans.decode_lanes(*each)

    return run


def encoder(contents: Contents, header: Header, arrangement: layout.Layout) -> Callable[[], object]:
    """Return what codes all chunks from codes, once the encoder has chosen."""
    tables = layout.frequencies(header, arrangement)
    return lambda: payload.encode_chunks(arrangement, tables, contents.codes, 1)


if __name__ == "__main__":
    main()
