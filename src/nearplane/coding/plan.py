"""What the encoder decides: levels of columns and rows, the family's member, stored tables, pairs. All by total bits.

Works on histograms of |code| per column, so that it costs about as much as counting. A decoder needs none of this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nearplane.coding import huffman, layout, model
from nearplane.coding.side import BitWriter, array_bits, zigzag

ESCAPES_IN_PAIRS = 2e-4  # share of codes outside the nibble up to which a group is coded in pairs
_SAMPLE = 384  # columns that the family's member is chosen on
_NEAR = 6  # corrections tried on either side
_SLOPES = (4, 3, 5, 2, 6, 1, 7, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A header and the counts that it was chosen for."""

    header: layout.Header
    layout: layout.Layout
    counts: dict[int, NDArray[np.int64]]  # spread -> (256,) codes by symbol, beyond 127 at the escape
    shares: dict[int, float]  # spread -> share of its codes in pair groups


@njit(cache=True, nogil=True)
def _histogram(codes: NDArray[np.int32], classes: NDArray[np.int64], top: int, counts: NDArray[np.int32]) -> None:
    """Count codes by row class, column and symbol; counts (classes, in, 2 top + 2), the last beyond +-top."""
    for i in range(codes.shape[0]):
        into = counts[classes[i]]
        for j in range(codes.shape[1]):
            code = np.int64(codes[i, j]) + top
            into[j, code if 0 <= code <= 2 * top else 2 * top + 1] += 1


@njit(cache=True, nogil=True)
def _weighed(codes: NDArray[np.int32], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weighted sums of min(|code|, 127) over rows (out,)."""
    sums = np.empty(codes.shape[0])
    for i in range(codes.shape[0]):
        total = 0.0
        for j in range(codes.shape[1]):
            total += weights[j] * min(abs(np.int64(codes[i, j])), 127)
        sums[i] = total
    return sums


class _Counts:
    """Histograms of a matrix by row class, and what tables would cost its columns."""

    def __init__(self, codes: NDArray[np.int32], row_levels: NDArray[np.int32]) -> None:
        largest = max(-int(codes.min()), int(codes.max()))
        self.top = min(model.LARGEST, largest)
        self.levels, classes = np.unique(row_levels, return_inverse=True)
        self.signed = np.zeros((len(self.levels), codes.shape[1], 2 * self.top + 2), np.int32)
        _histogram(codes, classes.reshape(-1), self.top, self.signed)
        top = self.top
        folded = np.zeros((*self.signed.shape[:2], top + 2), np.float32)
        folded[..., : top + 1] = self.signed[..., top : 2 * top + 1]
        folded[..., 1 : top + 1] += self.signed[..., :top][..., ::-1]
        folded[..., top + 1] = self.signed[..., 2 * top + 1]
        self.folded = folded

    def costs(self, mixture: int, row_step: int, pick: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.float32]:
        """Return the bits of columns at every spread of row level 0: (columns, spreads)."""
        table = model.family_costs()[mixture]
        table = np.concatenate([table[:, : self.top + 1], table[:, -1:]], 1).T  # (top + 2, spreads)
        total = None
        for level, folded in zip(self.levels, self.folded, strict=True):
            shifted = np.clip(np.arange(model.SPREADS) + int(level) * row_step, 0, model.SPREADS - 1)
            cost = (folded[pick] @ table)[:, shifted]
            total = cost if total is None else total + cost
        assert total is not None
        return total

    def by_spread(self, spreads: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return the counts by symbol of every spread; spreads (in, classes)."""
        found = {}
        for spread in np.unique(spreads):
            total = np.zeros(self.signed.shape[2], np.int64)
            for c in range(len(self.levels)):
                total += self.signed[c][spreads[:, c] == spread].sum(0, dtype=np.int64)
            symbols = np.zeros(256, np.int64)
            symbols[128 - self.top : 129 + self.top] = total[:-1]
            symbols[0] += total[-1]
            found[int(spread)] = symbols
        return found


def make_plan(
    codes: NDArray[np.int32],
    columns: NDArray[np.int32],
    column_resolution: int,
    *,
    coder: str,
    classes: bool,
    rest: dict[str, object],
) -> Plan:
    """Choose the header of a matrix.

    Args:
        codes: (out, in).
        columns: (in,) exponents on a ladder of `column_resolution` steps per octave.
        classes: whether columns and rows may have levels; without, one table serves the matrix.
        rest: the header's fields that are given: base, rows, row_resolution.
    """
    out, width = codes.shape
    header = layout.Header(
        coder=coder,
        shape=(out, width),
        columns=columns,
        column_resolution=column_resolution,
        corrections=np.zeros(width, np.int32),
        row_levels=np.zeros(out, np.int32),
        **rest,  # type: ignore[arg-type]
    )
    counts = _Counts(codes, header.row_levels)
    header, bits = _levels_of_columns(header, counts, classes)
    if classes:
        guess = _levels_of_rows(header, codes)
        if guess is not None:
            other = _Counts(codes, guess.row_levels)
            tried, tried_bits = _levels_of_columns(guess, other, classes)
            if tried_bits + array_bits(guess.row_levels) + 2 < bits + 4:
                header, counts = tried, other
    if (header.chunked or coder == "zstd") and coder != "huffman":
        header = _choose_pairs(header, counts)
    arrangement = layout.lay_out(header)
    spreads = header.spread_of(header.column_levels()[:, None], counts.levels[None, :])
    found = counts.by_spread(spreads)
    shares = _shares_of_pairs(header, arrangement, spreads, counts)
    if coder != "zstd":
        header = replace(header, stored=_stored_tables(header, found, shares))
    return Plan(header=header, layout=arrangement, counts=found, shares=shares)


def _levels_of_columns(header: layout.Header, counts: _Counts, classes: bool) -> tuple[layout.Header, float]:
    """Choose the family's member, the slope, and the columns' levels; return the header and its bits."""
    width = header.shape[1]
    row_step = 16 // header.row_level_resolution
    pick = np.unique(np.linspace(0, width - 1, min(width, _SAMPLE)).round().astype(np.int64))
    flat = classes and header.columns.min() == header.columns.max()
    slopes = (0,) if flat or not classes else _SLOPES
    header, spread = _member(header, counts, pick, slopes, row_step)
    cost = counts.costs(header.mixture, row_step)
    if not classes:
        totals = cost.sum(0, dtype=np.float64)
        best = int(totals.argmin())
        return replace(header, spread=best, slope=0), float(totals[best])
    header, bits = _corrected(header, cost, spread)
    if header.corrections.any():  # the family's member once more: part of the tails was columns at a wrong level
        sample = header.column_levels()[pick] * (16 // header.level_resolution)
        mixture, _ = _best_mixture(counts, pick, row_step, header.spread + sample, range(header.mixture + 1))
        if mixture != header.mixture:
            again = replace(header, mixture=mixture, corrections=np.zeros(width, np.int32))
            again, again_bits = _corrected(again, counts.costs(mixture, row_step), header.spread)
            if again_bits < bits:
                return again, again_bits
    return header, bits


def _member(
    header: layout.Header, counts: _Counts, pick: NDArray[np.int64], slopes: tuple[int, ...], row_step: int
) -> tuple[layout.Header, int]:
    """Choose slope, spread and mixture on a sample of columns, without corrections."""
    cost = counts.costs(2, row_step, pick)
    best: tuple[float, int, int] | None = None
    for slope in slopes:
        levels = _predicted(header, slope)[pick] * 2  # at 8 levels per octave
        free = int(np.median(cost.argmin(1) - levels))
        totals = _totals(cost, levels, np.arange(free - 10, free + 11))
        at = int(totals.argmin())
        if best is None or totals[at] < best[0]:
            best = (float(totals[at]), slope, free - 10 + at)
    assert best is not None
    _, slope, spread = best
    levels = _predicted(header, slope)[pick] * 2
    mixture, spread = _best_mixture(counts, pick, row_step, spread + levels, range(model.SHAPES), spread)
    return replace(header, mixture=mixture, slope=slope), spread


def _predicted(header: layout.Header, slope: int) -> NDArray[np.int64]:
    return np.clip(layout.predict(header.columns, header.column_resolution, slope, 8), -layout.LEVEL, layout.LEVEL)


def _best_mixture(
    counts: _Counts,
    pick: NDArray[np.int64],
    row_step: int,
    spreads: NDArray[np.int64],
    mixtures: range,
    spread: int = 0,
) -> tuple[int, int]:
    """Return the mixture, of those given, and the spread that are cheapest for columns at the given spreads."""
    best: dict[int, tuple[float, int]] = {}

    def total(mixture: int) -> float:
        if mixture not in mixtures:
            return float("inf")
        if mixture not in best:
            totals = _totals(counts.costs(mixture, row_step, pick), spreads, np.arange(-6, 7))
            best[mixture] = (float(totals.min()), int(totals.argmin()) - 6)
        return best[mixture][0]

    at = min((0, 2, 4, 7, 11), key=total)
    while True:
        following = min((at, at - 1, at + 1), key=total)
        if following == at:
            return at, spread + best[at][1]
        at = following


def _totals(cost: NDArray[np.float32], spreads: NDArray[np.int64], shifts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bits of all columns with their spreads shifted by each of the shifts."""
    at = np.clip(spreads[:, None] + shifts[None, :], 0, model.SPREADS - 1)
    return np.take_along_axis(cost, at, 1).sum(0, dtype=np.float64)


def _corrected(header: layout.Header, cost: NDArray[np.float32], spread: int) -> tuple[layout.Header, float]:
    """Choose levels per octave, spread and corrections for the columns; return the header and its bits."""
    width = header.shape[1]
    best: tuple[float, layout.Header] | None = None
    for resolution in (8, 4, 2, 1):
        step = 16 // resolution
        predicted = layout.predict(header.columns, header.column_resolution, header.slope, resolution)
        levels = np.clip(predicted, -layout.LEVEL, layout.LEVEL)
        totals = _totals(cost, step * levels, np.arange(spread - 3, spread + 4))
        shift = int(np.clip(spread - 3 + int(totals.argmin()), 0, model.SPREADS - 1))
        corrections = np.zeros(width, np.int32)
        bits = float(_totals(cost, step * levels, np.array([shift]))[0]) + 4
        if best is None or bits < best[0]:
            best = (bits, replace(header, level_resolution=resolution, spread=shift, corrections=corrections))
        tried = np.arange(-_NEAR, _NEAR + 1)
        wanted = np.clip(predicted[:, None] + tried[None, :], -layout.LEVEL, layout.LEVEL)
        spreads = np.clip(shift + step * wanted, 0, model.SPREADS - 1)
        each = np.take_along_axis(cost, spreads, 1)
        for parameter in (0, 1, 2):
            rice = 1 + parameter + (zigzag(tried) >> parameter)
            chosen = (each + rice[None, :]).argmin(1)
            corrections = tried[chosen].astype(np.int32)
            bits = float(np.take_along_axis(each, chosen[:, None], 1).sum(dtype=np.float64)) + array_bits(corrections)
            if bits < best[0]:
                best = (bits, replace(header, level_resolution=resolution, spread=shift, corrections=corrections))
    assert best is not None
    return best[1], best[0]


def _levels_of_rows(header: layout.Header, codes: NDArray[np.int32]) -> layout.Header | None:
    """Guess levels of rows from the weighted sums of |code|, or None where they would not pay.

    The weights make the sum as good an estimate of a row's spread as its columns allow; the gain of a level is that of
    Gaussians nearby, 0.72 * information * shift^2 bits.
    """
    mean, variance = model.family_moments()
    slope = np.gradient(mean)  # per sixteenth of an octave
    spreads = header.spread_of(header.column_levels(), 0)
    weights = slope[spreads] / np.maximum(variance[spreads], 1e-3)
    information = float((weights * slope[spreads]).sum())
    shifts = np.arange(-64, 65)
    count = np.bincount(spreads, minlength=model.SPREADS)
    used = np.flatnonzero(count)
    per = count[used] * (slope[used] / np.maximum(variance[used], 1e-3))
    expected = (per[:, None] * mean[np.clip(used[:, None] + shifts[None, :], 0, model.SPREADS - 1)]).sum(0)
    shift = np.interp(_weighed(codes, weights), np.maximum.accumulate(expected), shifts)
    best: tuple[float, layout.Header] | None = None
    gained = 0.72 * information
    for resolution in (1, 2, 4):
        step = 16 // resolution
        tried = np.arange(-layout.ROW_LEVEL, layout.ROW_LEVEL + 1)
        for parameter in (0, 1, 2):
            rice = 1 + parameter + (zigzag(tried) >> parameter)
            each = gained * (shift[:, None] - step * tried[None, :]) ** 2 + rice[None, :]
            levels = tried[each.argmin(1)].astype(np.int32)
            bits = float(each.min(1).sum())
            if levels.any() and (best is None or bits < best[0]):
                best = (bits, replace(header, row_level_resolution=resolution, row_levels=levels))
    if best is None or best[0] > gained * float((shift**2).sum()):
        return None
    return best[1]


def _choose_pairs(header: layout.Header, counts: _Counts) -> layout.Header:
    """Choose the groups that are coded in pairs and make their widths even by moving single columns up a level."""
    levels = header.column_levels()
    top = counts.top
    outside = counts.signed.sum(0, dtype=np.int64)  # (in, symbols)
    total = outside.sum(1)
    outside = total - outside[:, max(0, top - 7) : top + 8][:, : 2 * top + 1].sum(1) if top > 7 else outside[:, -1]
    pairs = 0
    found = np.unique(levels)
    for level in found:
        here = levels == level
        if outside[here].sum() > ESCAPES_IN_PAIRS * total[here].sum():
            break
        pairs += 1
    corrections = header.corrections.copy()
    for n, level in enumerate(found[:pairs]):
        here = np.flatnonzero(levels == level)
        if len(here) % 2 and n + 1 < len(found):
            column = here[int((outside[here] * 0 + np.arange(len(here))).argmax())]
            corrections[column] += int(found[n + 1] - level)
            levels[column] = found[n + 1]
            if len(here) == 1:
                return _choose_pairs(replace(header, corrections=corrections), counts)
    return replace(header, pairs=pairs, corrections=corrections)


def _shares_of_pairs(
    header: layout.Header, arrangement: layout.Layout, spreads: NDArray[np.int64], counts: _Counts
) -> dict[int, float]:
    """Return of every spread which share of its codes stands in pairs."""
    paired = np.zeros(header.shape[1], bool)
    for start, stop, pairs in zip(arrangement.starts, arrangement.stops, arrangement.pairs, strict=True):
        paired[arrangement.column_order[start:stop]] = pairs
    weight = counts.signed.sum(2, dtype=np.int64).T  # (in, classes)
    return {
        int(spread): float((weight * paired[:, None])[spreads == spread].sum() / weight[spreads == spread].sum())
        for spread in np.unique(spreads)
    }


def _stored_tables(
    header: layout.Header, counts: dict[int, NDArray[np.int64]], shares: dict[int, float]
) -> dict[int, NDArray[np.uint16]]:
    """Return the tables that pay for themselves."""
    found: dict[int, NDArray[np.uint16]] = {}
    saved = 0.0
    for spread, count in counts.items():
        reference = model.parametric(spread, header.mixture)
        kept = count.copy()
        if shares[spread] == 0.0:
            rare = (count << 14) < count.sum()
            rare[128] = False
            kept[model.ESCAPE] += kept[1:][rare[1:]].sum()
            kept[1:][rare[1:]] = 0
        table = model.normalise(kept)
        out = BitWriter()
        layout.write_table(out, table, reference)
        gain = table_bits(count, reference) - table_bits(count, table) - out.count - 1
        if gain > 0:
            found[spread] = table
            saved += gain
    return found if saved > len(counts) else {}


def table_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> float:
    """Return the bits of symbols with the given counts (256,), with about what the list of escapes takes."""
    escaped = int(count[table == 0].sum()) + int(count[0])
    used = table > 0
    used[0] = False
    bits = float(count[used] @ (12 - np.log2(table[used].astype(np.float64))))
    if escaped:
        escape = 12 - np.log2(float(table[0])) if table[0] else 64.0
        magnitude = np.maximum(np.abs(np.arange(256) - 128), 1)
        magnitude[0] = 256
        listed = count * (table == 0)
        listed[0] = count[0]
        bits += escaped * escape + float(listed @ (4 + 2 * np.log2(magnitude)))
    return bits


def payload_bits(plan: Plan) -> float:
    """Return the bits of codes and escapes, and of the chunks around them; pairs as if neighbours were independent."""
    header = plan.header
    bits = 0.0
    for spread, count in plan.counts.items():
        table = header.stored.get(spread)
        if table is None:
            table = model.parametric(spread, header.mixture)
        share = plan.shares[spread]
        if header.coder == "huffman":
            table = huffman.frequencies(table)
        if share < 1:
            bits += (1 - share) * table_bits(count, table)
        if share > 0:
            bits += share * _paired_bits(count, model.paired(table))
    if not header.chunked:
        return bits + 12 + 1
    chunks = len(layout.chunk_edges(plan.layout.total)) - 1
    around = (
        7 + 16 if header.coder == "zstd" else 7 + 1 + 8 * 2 + 7 * 2 + 8 * 0.5
    )  # directory, escapes, words, lengths, ends
    return bits + 8 * chunks * around


def _paired_bits(count: NDArray[np.int64], table: NDArray[np.uint16]) -> float:
    """Return the bits of codes with the given counts (256,) when independent ones are coded two by two."""
    total = int(count.sum())
    magnitude = np.maximum(np.abs(np.arange(256) - 128), 1)
    magnitude[0] = 256
    listed = 4 + 2 * np.log2(magnitude)
    near = slice(121, 136)
    nibble = np.zeros(16)
    nibble[1:] = count[near]
    nibble[0] = total - nibble.sum()
    list_bits = np.zeros(16)
    list_bits[1:] = listed[near]
    far = count.astype(np.float64).copy()
    far[near] = 0
    list_bits[0] = (far @ listed) / far.sum() if far.sum() else 0
    weight = nibble[:, None] * nibble[None, :] / total / 2  # [high, low] pairs
    frequency = table.reshape(16, 16).astype(np.float64)
    escape = 12 - np.log2(frequency[0, 0]) + list_bits[:, None] + list_bits[None, :]
    with np.errstate(divide="ignore"):
        direct = 12 - np.log2(frequency)
    direct[0, :] += list_bits[0]
    direct[:, 0] += list_bits[0]
    return float((weight * np.where(frequency > 0, direct, escape)).sum())
