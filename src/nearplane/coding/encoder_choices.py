"""Choices of the encoder: the table of each column and row, the tables to store, and the groups coded in pairs.

Each choice minimizes the total number of bits. Choices are made on histograms of |code| per column, for large matrices
of a fixed sample of rows, so that they take little time beside coding. A decoder needs none of this.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearplane.coding import frequency_tables
from nearplane.coding.bit_stream import BitWriter, array_bits, varint, zigzag
from nearplane.coding.cost import Counts, list_bits, paired_stream_bits, sample, stream_bits, table_bits
from nearplane.coding.header_bits import write_table
from nearplane.coding.layout import (
    MAX_COLUMN_LEVEL,
    MAX_ROW_LEVEL,
    SPREADS_PER_OCTAVE,
    Header,
    Layout,
    chunk_edges,
    clipped,
    lay_out,
)
from nearplane.compiled import compiled

MAX_ESCAPE_SHARE_IN_PAIRS = 2e-4  # largest share of codes outside a nibble in groups coded in pairs
MIXTURE_SAMPLE_COLUMNS = 384  # columns from which the shape of the tables is chosen
ROW_LEVEL_SAMPLE_COLUMNS = 1024  # approximate number of columns from which levels of rows are guessed
# corrections of a column's level to try
CANDIDATE_CORRECTIONS = np.array([*range(-6, 7), -8, 8, -11, 11, -15, 15, -20, 20, -27, 27, -36, 36])
CANDIDATE_SLOPES = (4, 3, 5, 2, 6, 1, 7, 0)
GUESSED_SHAPE = 2  # of the tables by which slopes are compared
CANDIDATE_SHAPES = (0, 2, 4, 7, 11)  # from the best of which neighbours are tried
CANDIDATE_RESOLUTIONS = (8, 4, 2, 1)  # levels of columns per octave
ROW_RESOLUTIONS = (1, 2, 4)  # levels of rows per octave
RICE_PARAMETERS = (0, 1, 2)  # of corrections, which are small
SLOPE_REACH, SHAPE_REACH, SPREAD_REACH = 10, 6, 3  # spreads that are tried on each side of the guess
SHIFTS = np.arange(-64, 65)  # of a row's spread from its table, four octaves each way
GAUSSIAN_GAIN = 0.72  # bits, about 1 / (2 ln 2), that a step of spread costs with one unit of information
MIN_VARIANCE = 1e-3  # of |code| where tables have nearly all of it at 0


class Corrections(NamedTuple):
    """Candidate corrections of a level, and the approximate bits to store each."""

    values: NDArray[np.int64]  # (candidates,)
    bits: NDArray[np.float64]  # (candidates,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A header, its layout, and the sample from which they were chosen."""

    header: Header
    layout: Layout
    sample: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of the codes of a whole matrix, by the spread of the table that codes them."""

    counts: dict[int, NDArray[np.int64]]  # spread -> (256,) codes by symbol, beyond 127 at the escape
    shares: dict[int, float]  # spread -> share of its codes in pair groups
    beyond: NDArray[np.int64]  # codes beyond 127


@compiled()
def _row_sums(codes: NDArray[np.int32], pick: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weighted sums of min(|code|, 127) over some columns (out,)."""
    sums = np.empty(codes.shape[0])
    for i in range(codes.shape[0]):
        total, row = 0.0, codes[i]
        for n in range(len(pick)):
            total += weights[n] * min(abs(np.int64(row[np.uint64(pick[n])])), 127)
        sums[i] = total
    return sums


@compiled()
def _total_bits(
    cost: NDArray[np.float32], levels: NDArray[np.int64], step: int, first: int, count: int
) -> NDArray[np.float64]:
    """Return the bits of all columns at the spreads first + i + step * level, i < count."""
    out = np.zeros(count)
    last = cost.shape[1] - 1
    for j in range(len(levels)):
        for i in range(count):
            out[i] += cost[j, min(max(first + i + step * levels[j], 0), last)]
    return out


@compiled()
def _best_corrections(
    cost: NDArray[np.float32], predicted: NDArray[np.int64], shift: int, step: int, limit: int, tried: Corrections
) -> tuple[NDArray[np.int32], float]:
    """Return the correction with the fewest bits for every row of `cost`, and the cost without storing corrections."""
    last = cost.shape[1] - 1
    corrections = np.empty(len(predicted), np.int32)
    total = 0.0
    for j in range(len(predicted)):
        best_total, best_bits = 1e30, 0.0
        for n in range(len(tried.values)):
            level = min(max(predicted[j] + tried.values[n], -limit), limit)
            bits = cost[j, min(max(shift + step * level, 0), last)]
            if bits + tried.bits[n] < best_total:
                best_total, best_bits = bits + tried.bits[n], bits
                corrections[j] = tried.values[n]
        total += best_bits
    return corrections, total


def choose(header: Header, codes: NDArray[np.int32]) -> Choices:
    """Complete a header, which has scales, shape and zero levels, by the choice of tables for codes (out, in)."""
    out, width = codes.shape
    counts = Counts(codes, header.row_levels, sample(out, width))
    header, bits = _choose_column_levels(header, counts)
    guess = _guess_row_levels(header, codes)
    if guess is not None:
        guess_counts = Counts(codes, guess.row_levels, counts.rows)
        guessed, guessed_bits = _choose_column_levels(guess, guess_counts)
        if guessed_bits + array_bits(guess.row_levels) + 2 < bits + 4:
            header, counts = guessed, guess_counts
    header = _choose_pairs(header, counts)
    arrangement = lay_out(header)
    spreads = header.spread_of(header.column_levels()[:, None], counts.levels[None, :])
    shares = _shares_of_pairs(header, arrangement, spreads, counts)
    sampled = len(counts.rows) < out
    header = replace(header, stored=stored_tables(header, counts.by_spread(spreads), shares, sampled))
    return Choices(header=header, layout=arrangement, sample=counts)


def tally(choices: Choices, codes: NDArray[np.int32]) -> Tally:
    """Count all codes of the matrix (out, in) for which the choices were made."""
    header, counts = choices.header, choices.sample
    if len(counts.rows) < len(codes):
        counts = Counts(codes, header.row_levels, np.arange(len(codes)))
    spreads = header.spread_of(header.column_levels()[:, None], counts.levels[None, :])
    far = codes[(codes < -127) | (codes > 127)] if counts.signed[:, :, -1].any() else codes[:0, 0]
    shares = _shares_of_pairs(header, choices.layout, spreads, counts)
    return Tally(counts=counts.by_spread(spreads), shares=shares, beyond=far.astype(np.int64))


def _choose_column_levels(header: Header, counts: Counts) -> tuple[Header, float]:
    """Choose shape and spread of the tables, slope and column levels; return the header and its bits."""
    width = header.shape[1]
    row_step = SPREADS_PER_OCTAVE // header.row_level_resolution
    pick = sampled_columns(width)
    slopes = (0,) if np.ptp(header.scales.columns) == 0 else CANDIDATE_SLOPES
    header, spread = member(header, counts, pick, slopes, row_step)
    cost = counts.costs(header.mixture, row_step)
    header, bits = _correct(header, cost, spread, counts.min_gain)
    if header.corrections.any():  # choose the shape again: a part of the tails came from columns at a wrong level
        sample = header.column_levels()[pick] * (SPREADS_PER_OCTAVE // header.level_resolution)
        mixture, _ = _best_mixture(counts, pick, row_step, header.spread + sample, range(header.mixture + 1))
        if mixture != header.mixture:
            other = replace(header, mixture=mixture, corrections=np.zeros(width, np.int32))
            other, other_bits = _correct(other, counts.costs(mixture, row_step), header.spread, counts.min_gain)
            if other_bits < bits:
                return other, other_bits
    return header, bits


def sampled_columns(width: int) -> NDArray[np.int64]:
    """Return the columns from which the shape of the tables is chosen."""
    return np.unique(np.linspace(0, width - 1, min(width, MIXTURE_SAMPLE_COLUMNS)).round().astype(np.int64))


def member(
    header: Header, counts: Counts, pick: NDArray[np.int64], slopes: tuple[int, ...], row_step: int
) -> tuple[Header, int]:
    """Choose slope, spread and shape of the tables from a sample of columns, without corrections of levels."""
    cost = counts.costs(GUESSED_SHAPE, row_step, pick)
    cheapest = cost.argmin(1)
    candidates = []
    for slope in slopes:
        levels = clipped(header.predicted(slope, 8))[pick]
        center = int(np.median(cheapest - 2 * levels))
        totals = _total_bits(cost, levels, 2, center - SLOPE_REACH, 2 * SLOPE_REACH + 1)
        best = int(totals.argmin())
        candidates.append((float(totals[best]), slope, center - SLOPE_REACH + best))
    _, slope, spread = min(candidates, key=itemgetter(0))  # ties: the first
    levels = 2 * clipped(header.predicted(slope, 8))[pick]
    mixture, shift = _best_mixture(counts, pick, row_step, spread + levels, range(frequency_tables.SHAPES))
    return replace(header, mixture=mixture, slope=slope), spread + shift


def _best_mixture(
    counts: Counts, pick: NDArray[np.int64], row_step: int, spreads: NDArray[np.int64], mixtures: range
) -> tuple[int, int]:
    """Return the shape among `mixtures` and the shift of the given spreads that need the fewest bits."""
    best: dict[int, tuple[float, int]] = {}

    def total(mixture: int) -> float:
        if mixture not in mixtures:
            return float("inf")
        if mixture not in best:
            totals = _total_bits(counts.costs(mixture, row_step, pick), spreads, 1, -SHAPE_REACH, 2 * SHAPE_REACH + 1)
            best[mixture] = (float(totals.min()), int(totals.argmin()) - SHAPE_REACH)
        return best[mixture][0]

    chosen = min(CANDIDATE_SHAPES, key=total)
    while True:
        neighbour = min((chosen, chosen - 1, chosen + 1), key=total)
        if neighbour == chosen:
            return chosen, best[chosen][1]
        chosen = neighbour


def _correct(header: Header, cost: NDArray[np.float32], spread: int, min_gain: float) -> tuple[Header, float]:
    """Choose levels per octave, spread and corrections for the columns; return the header and its bits.

    A correction must gain `min_gain` bits more than it takes, because gains on a sample are partly chance.
    """
    width = header.shape[1]
    zeros = np.zeros(width, np.int32)
    options: list[tuple[float, Header]] = []
    for resolution in CANDIDATE_RESOLUTIONS:
        step = SPREADS_PER_OCTAVE // resolution
        predicted = header.predicted(header.slope, resolution)
        levels = clipped(predicted)
        totals = _total_bits(cost, levels, step, spread - SPREAD_REACH, 2 * SPREAD_REACH + 1)
        shift = int(np.clip(spread - SPREAD_REACH + int(totals.argmin()), 0, frequency_tables.SPREADS - 1))
        bits = float(_total_bits(cost, levels, step, shift, 1)[0]) + 4
        options.append((bits, replace(header, level_resolution=resolution, spread=shift, corrections=zeros)))
        for parameter in RICE_PARAMETERS:
            rice = _rice_bits(CANDIDATE_CORRECTIONS, parameter) + np.where(CANDIDATE_CORRECTIONS, min_gain, 0.0)
            tried = Corrections(CANDIDATE_CORRECTIONS, rice)
            corrections, bits = _best_corrections(cost, predicted, shift, step, MAX_COLUMN_LEVEL, tried)
            bits += array_bits(corrections)
            options.append((bits, replace(header, level_resolution=resolution, spread=shift, corrections=corrections)))
    bits, header = min(options, key=itemgetter(0))
    return header, bits


def _rice_bits(values: NDArray[np.int64], parameter: int) -> NDArray[np.float64]:
    """Return the approximate bits of the Rice codes of single integers."""
    quotients: NDArray[np.int64] = np.minimum(zigzag(values) >> parameter, 32)
    return np.float64(1 + parameter) + quotients.astype(np.float64)


def _guess_row_levels(header: Header, codes: NDArray[np.int32]) -> Header | None:
    """Return a header with row levels guessed from weighted sums of |code|, or None if levels would not save bits.

    The weights give the best estimate of a row's spread from its columns; the gain of a level is approximated by that
    of Gaussians, `GAUSSIAN_GAIN * information * shift^2` bits.
    """
    mean, variance = frequency_tables.family_moments()
    slope = np.gradient(mean)  # per sixteenth of an octave
    spreads = header.spread_of(header.column_levels(), 0)
    weights = slope[spreads] / np.maximum(variance[spreads], MIN_VARIANCE)
    information = float((weights * slope[spreads]).sum())
    width = len(spreads)
    pick = np.arange(width)
    if width > ROW_LEVEL_SAMPLE_COLUMNS:  # sixteen neighbouring columns fill a cache line
        starts = np.linspace(0, width - 16, ROW_LEVEL_SAMPLE_COLUMNS // 16).astype(np.int64)
        pick = (starts[:, None] + np.arange(16)).reshape(-1)
    spreads = spreads[pick]
    count = np.bincount(spreads, minlength=frequency_tables.SPREADS)
    used = np.flatnonzero(count)
    w = count[used] * (slope[used] / np.maximum(variance[used], MIN_VARIANCE))
    expected = (w[:, None] * mean[np.clip(used[:, None] + SHIFTS[None, :], 0, frequency_tables.SPREADS - 1)]).sum(0)
    shift = np.interp(_row_sums(codes, pick, weights[pick]), np.maximum.accumulate(expected), SHIFTS)
    candidates: list[tuple[float, Header]] = []
    gain = GAUSSIAN_GAIN * information
    tried, level = np.arange(-MAX_ROW_LEVEL, MAX_ROW_LEVEL + 1), np.zeros(len(shift), np.int64)
    for resolution in ROW_RESOLUTIONS:
        cost = (gain * (shift[:, None] - SPREADS_PER_OCTAVE // resolution * tried[None, :]) ** 2).astype(np.float32)
        for parameter in RICE_PARAMETERS:
            corrections = Corrections(tried, _rice_bits(tried, parameter))
            levels, bits = _best_corrections(cost, level, MAX_ROW_LEVEL, 1, MAX_ROW_LEVEL, corrections)
            bits += array_bits(levels)
            if levels.any():
                candidates.append((bits, replace(header, row_level_resolution=resolution, row_levels=levels)))
    bits, header = min(candidates, key=itemgetter(0), default=(np.inf, header))
    return None if bits > gain * float((shift**2).sum()) else header


def _choose_pairs(header: Header, counts: Counts) -> Header:
    """Choose the groups coded in pairs, and make their widths even by moving single columns up a level."""
    levels = header.column_levels()
    top = counts.top
    outside = counts.signed.sum(0, dtype=np.int64)  # (in, symbols)
    total = outside.sum(1)
    outside = total - outside[:, max(0, top - 7) : top + 8][:, : 2 * top + 1].sum(1) if top > 7 else outside[:, -1]
    distinct_levels = np.unique(levels)
    pairs = 0
    while pairs < len(distinct_levels):
        members = levels == distinct_levels[pairs]
        if outside[members].sum() > MAX_ESCAPE_SHARE_IN_PAIRS * total[members].sum():
            break
        pairs += 1
    predicted = header.predicted(header.slope, header.level_resolution)
    corrections = header.corrections.copy()
    for level, above in itertools.pairwise(distinct_levels[: pairs + 1]):
        members = np.flatnonzero(levels == level)
        if len(members) % 2:
            corrections[members[-1]] = above - predicted[members[-1]]
            levels[members[-1]] = above
    pairs = len(np.unique(levels[levels <= distinct_levels[pairs - 1]])) if pairs else 0
    return replace(header, pairs=pairs, corrections=corrections)


def _shares_of_pairs(
    header: Header, arrangement: Layout, spreads: NDArray[np.int64], counts: Counts
) -> dict[int, float]:
    """Return the share of codes in pairs for every spread."""
    paired = np.zeros(header.shape[1], bool)
    for start, stop, pairs in zip(*arrangement.groups[1:], strict=True):
        paired[arrangement.orders.columns[start:stop]] = pairs
    weight = counts.signed.sum(2, dtype=np.int64).T  # (in, classes)
    total = np.bincount(spreads.reshape(-1), weight.reshape(-1), frequency_tables.SPREADS)
    within = np.bincount(spreads.reshape(-1), (weight * paired[:, None]).reshape(-1), frequency_tables.SPREADS)
    return {int(spread): float(within[spread] / total[spread]) for spread in np.flatnonzero(total)}


def stored_tables(
    header: Header, counts: dict[int, NDArray[np.int64]], shares: dict[int, float], sampled: bool
) -> dict[int, NDArray[np.uint16]]:
    """Return the tables that save more bits than they take; `sampled` means that counts cover only some rows."""
    tables: dict[int, NDArray[np.uint16]] = {}
    saved = 0.0
    for spread, count in counts.items():
        reference = frequency_tables.parametric(spread, header.mixture)
        coded = count.copy()
        if shares[spread] == 0.0:
            rare = (count << 14) < count.sum()
            rare[128] = False
            coded[frequency_tables.ESCAPE] += coded[1:][rare[1:]].sum()
            coded[1:][rare[1:]] = 0
        if sampled:  # other rows may have codes that the sample lacks
            coded[frequency_tables.ESCAPE] = max(1, coded[frequency_tables.ESCAPE])
        table = frequency_tables.normalise(coded)
        out = BitWriter()
        write_table(out, table, reference)
        gain = table_bits(count, reference) - table_bits(count, table) - out.count - 1
        if gain > 0:
            tables[spread] = table
            saved += gain
    return tables if saved > len(counts) else {}


def payload_bits(choices: Choices, tally: Tally) -> float:
    """Return the bits of codes, escapes and chunk overhead; pairs are taken as independent codes."""
    header = choices.header
    bits = 0.0
    listed = np.zeros(256)
    for spread, count in tally.counts.items():
        table, share = header.table(spread), tally.shares[spread]
        if share < 1:
            part_bits, part_listed = stream_bits(count, table)
            bits += (1 - share) * part_bits
            listed += (1 - share) * part_listed
        if share > 0:
            part_bits, part_listed = paired_stream_bits(count, frequency_tables.paired(table))
            bits += share * part_bits
            listed += share * part_listed
    bits += list_bits(listed, tally.beyond)
    chunks = len(chunk_edges(choices.layout.total)) - 1
    lane_bytes = bits / 8 / chunks  # of one chunk
    lengths = len(varint(int(lane_bytes))) + 7 * len(varint(int(lane_bytes / 8)))
    overhead = lengths + 4 + 1 + 8 * 2 + 8 * 0.5  # also checksum, count of escapes, words, ends of lanes
    return bits + 8 * chunks * overhead
