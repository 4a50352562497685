"""Upper bound of the memory of a run, computed from shapes alone, without measuring or allocating.

    bound = ALLOCATOR_FACTOR * (resident memory at the start + maximum of live bytes)

A run on a GPU has two bounds: of the GPU's memory, and of the host's, which holds what is read, written and moved aside. On the
CPU both are one. Live bytes are counted part by part: hidden states, waiting activations and second moments of `calibration/`, the
solve in `matrix/`, and `estimates.py` and `divergences.py` before the first layer. Changes there must be made here too;
`benchmarks/speed/memory_bound.py` compares the bound with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nearplane.calibration.extra_divergence import COMPARED_LOGITS as EXTRA_LOGITS
from nearplane.calibration.one_forward import MemorySetting, paused_bytes
from nearplane.calibration.sensitivity import backward_batch
from nearplane.calibration.states_on_host import pinned_bytes
from nearplane.lattice import kernels, kernels_torch
from nearplane.lattice.bounds import BLOCK_COLUMNS
from nearplane.planning.divergences import COMPARED_LOGITS as CHOICE_LOGITS
from nearplane.planning.parts import Extent
from nearplane.planning.shapes import SINGLE, Blocks, Group, Shapes
from nearplane.recipe.thresholds import MAX_CERTIFIED_INPUTS

ALLOCATOR_FACTOR = 1.3  # factor for memory that allocators keep between live tensors, and for buffers of libraries
DOUBLE = 8  # bytes of a float64 number
EXTRA_ROWS = 1024  # rows of extra windows that are kept for a layer
CERTIFIED_ROWS, CERTIFIED_BYTES = 256, 110  # rows that a certificate measures at a time, bytes per weight of these rows
CORRECTED_BYTES = 20  # per weight while its target is corrected: W, lost outputs twice, the correction, the target
BEAM_COLUMNS = 128  # that a beam sweeps together; a kernel of CUDA sweeps 256 and takes a third of the memory of `GPU`
LOGITS_COPIES = 6  # of the logits of a backward pass: logits, probabilities, gradients, each with a temporary
COMPARED_COPIES = 5  # of logits when predictions are compared: both log-probabilities, exp, difference, product
PART_COPIES = 3  # of the input of a layer on a GPU: three parts in 16 bits of its difference, and what is left of it
ROUNDING_COPIES = 5  # of the input of a layer, while it is rounded
READ_BLOCKS = 2  # blocks in memory of a GPU's host: the one that is sent, and the next one
PACKED_BYTES = 16  # per weight of a layer, while its codes are packed and compared on a GPU's host
SENT_STATES = 2  # batches of each network's hidden states on a GPU while the others lie on its host: one used, one sent
# copies of attention's weights (heads, seqlen, seqlen) in a backward pass on a GPU, see `repeatable_backward`
SCORE_COPIES = 4
BACKWARD_COPIES = 6  # of a forward pass's largest activations, which a backward pass keeps


Place = Literal["host", "device"]
"""Memory that a bound is for: of the CPU, or of the GPU that computes."""


class Costs(NamedTuple):
    """Memory of kernels: those compiled for the CPU; on a GPU the torch forms, which take more than those of CUDA.

    Args:
        solved: Bytes per weight in a solve: W, target, values, codes, errors, candidate codes or steps, and sums.
        beam: Maximum for the targets of a beam, their copies and their codes.
        swept: Bytes per candidate and weight of the columns that a beam sweeps together, in addition; their codes do not
            lie beside the targets yet.
    """

    solved: int
    beam: int
    swept: int


CPU = Costs(solved=36, beam=128 << 20, swept=0)
GPU = Costs(solved=60, beam=kernels_torch.BEAM_BYTES, swept=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Upper bound of a run's memory with a setting.

    Args:
        setting: Measures that save memory.
        place: Memory that is bounded.
        live: Maximum of live bytes, without those at the start.
        bytes: The bound.
        while_: Activity in which it is reached.
    """

    setting: MemorySetting
    place: Place = "host"
    live: int = 0
    bytes: int
    while_: str


class Moment(NamedTuple):
    """Bytes that are live during an activity, in addition to those at the start: where the run computes, and on the host."""

    while_: str
    computing: int
    host: int = 0


def bound(shapes: Shapes, setting: MemorySetting, resident: int, place: Place = "host") -> Bound:
    """Return an upper bound of the memory of a run.

    Args:
        shapes: Shapes of the model, the text and the recipe.
        setting: Measures that save memory.
        resident: Bytes at the start: of the process with its libraries loaded, or on the device.
        place: Memory that is bounded. A run on the CPU has everything on the host.
    """
    on_cpu, bounds = setting.device.on_cpu, []
    for while_, computing, host in _moments(shapes, setting):
        here = computing * (on_cpu or place == "device") + host * (place == "host")
        bounds.append((here, while_))
    live, while_ = max(bounds, key=lambda moment: moment[0])
    most = round(ALLOCATOR_FACTOR * (resident + live))
    return Bound(setting=setting, place=place, live=live, bytes=most, while_=while_)


def waits(shapes: Shapes, kind: Blocks, setting: MemorySetting) -> list[int]:
    """Return the waiting bytes at each stage of a block at which passes pause, which are the first stages."""
    waiting_bytes: list[int] = []
    for stage, group in enumerate(kind.groups if kind.pauses else ()):
        last = stage == len(kind.groups) - 1 and group.experts == 1
        before = kind.groups[stage - 1].held if stage else shapes.state
        needed = shapes.most_windows(setting.batch) * paused_bytes(
            group.held, before, shapes.state, shapes.streams, last=last
        )
        if needed > setting.room:
            break
        waiting_bytes.append(needed)
    return waiting_bytes


def _moments(shapes: Shapes, setting: MemorySetting) -> Iterator[Moment]:
    """Yield the activities of a run."""
    states, aside = _states(shapes, setting)
    embedding = 4 * setting.batch * shapes.state + shapes.number * shapes.embeddings
    yield Moment("embedding the tokens", states + embedding, aside)
    yield Moment(
        "copying tensors that are not quantized", shapes.streams * states, shapes.streams * aside + shapes.ends
    )
    yield from _before_the_first_layer(shapes, setting)
    if shapes.extra and shapes.vocabulary:
        head = shapes.number * (shapes.embeddings + shapes.hidden * shapes.vocabulary)
        logits = max(shapes.vocabulary, min(EXTRA_LOGITS, shapes.seqlen * shapes.vocabulary))
        compared = COMPARED_COPIES * SINGLE * logits
        yield Moment(
            "comparing predictions on the extra windows",
            shapes.streams * states + head + compared,
            shapes.streams * aside,
        )
    if shapes.streams == 1 and shapes.extra and shapes.vocabulary:
        block = max(shapes.number * kind.weights + setting.batch * kind.most_alive for kind in shapes.blocks)
        read = 0 if setting.device.on_cpu else READ_BLOCKS * shapes.number * max(kind.weights for kind in shapes.blocks)
        yield Moment(
            "running the original on the extra windows",
            states + shapes.extra * shapes.state + max(block, embedding),
            aside + shapes.extra * shapes.state + read,
        )
    for kind in shapes.blocks:
        moved = shapes.streams * aside
        if not setting.device.on_cpu:
            largest = max((_largest(group) for group in kind.groups), default=0)
            moved += READ_BLOCKS * shapes.number * kind.weights + PACKED_BYTES * largest
        for moment in _in_a_block(shapes, kind, setting):
            yield moment._replace(host=moved)


def _states(shapes: Shapes, setting: MemorySetting) -> tuple[int, int]:
    """Return the bytes of one network's hidden states where the run computes, and those moved aside to the host."""
    windows = shapes.most_windows(setting.batch)
    beside = windows * shapes.beside  # stays where the run computes
    if setting.states == "device":
        return windows * shapes.state + beside, 0
    if setting.states == "host":
        pinned = -(-windows // setting.batch) * pinned_bytes(setting.batch * shapes.state)
        return SENT_STATES * setting.batch * shapes.state + beside, pinned
    return setting.batch * shapes.state + beside, 0


def _before_the_first_layer(shapes: Shapes, setting: MemorySetting) -> Iterator[Moment]:
    on_cpu = setting.device.on_cpu
    costs, span = (CPU, kernels.CPU.span) if on_cpu else (GPU, kernels.GPU.span)
    width, window = SINGLE * shapes.hidden, shapes.seqlen
    head = SINGLE * (shapes.embeddings + shapes.hidden * shapes.vocabulary)
    block = SINGLE * max(kind.weights for kind in shapes.blocks)
    alive = max(kind.most_alive for kind in shapes.blocks) / window  # bytes per token
    if shapes.backward:
        gradients = 2 * width * shapes.backward
        logits = shapes.predicted * shapes.vocabulary
        yield Moment("measuring gradients", gradients + LOGITS_COPIES * SINGLE * logits + head)
        batch = backward_batch(window)
        kept = round(BACKWARD_COPIES * alive * min(shapes.backward, batch * window))
        kept += 0 if on_cpu else SCORE_COPIES * SINGLE * batch * shapes.heads * window**2
        yield Moment("measuring gradients", block + gradients + kept)
    for choosing in _choices(shapes):
        groups = [group for kind in shapes.blocks for group in kind.groups]
        solved = costs.solved if shapes.beam == 1 else CPU.solved  # no steps are searched for entropy-coded weights
        outputs = max(out for group in groups for out, _ in group.layers)
        scored = (3 * SINGLE + 2 * DOUBLE) * choosing.scored * outputs
        sums = solving = 0
        for kind in shapes.blocks:
            left = 0  # sums of the groups that are not solved yet, the last of which is solved last
            for group in reversed(kind.groups):
                left += DOUBLE * group.inputs * (group.inputs + min(span, group.inputs))
                solve = 2 * DOUBLE * group.inputs**2 + solved * _largest(group)
                solving = max(solving, left + max(solve, scored))
            sums = max(sums, left)
        inputs = max(sum(group.inputs for group in kind.groups) for kind in shapes.blocks)  # of all layers of a block
        running = round(alive * choosing.batch * SINGLE / shapes.number) + SINGLE * choosing.batch * inputs
        rows = SINGLE * choosing.scored * inputs  # of all layers of a block, on which errors are measured
        rows += choosing.seen // window * max(max(group.routed) for group in groups)
        rows += shapes.rounded * choosing.points * SINGLE * choosing.scored * max(group.inputs for group in groups)
        states, moved = _states_before_a_choice(shapes, choosing, setting)
        read = 0 if on_cpu else READ_BLOCKS * shapes.number * max(kind.weights for kind in shapes.blocks)
        needed = block + states + rows + max(running + sums, solving)
        if not choosing.compared:
            yield Moment("measuring what errors cost", needed, moved + read)
            continue
        # the rounded network's hidden states, and the values of a block's layers, which are written when all are solved
        beside, aside = _states_before_a_choice(shapes, choosing._replace(seen=choosing.compared), setting)
        yield Moment("measuring a choice", needed + block + beside, moved + aside + read)
        both = width * choosing.compared * (2 if setting.states == "device" else 3)  # joined one after the other
        logits = max(min(CHOICE_LOGITS, choosing.compared * shapes.vocabulary), shapes.predicted * shapes.vocabulary)
        compared = COMPARED_COPIES * SINGLE * logits
        yield Moment("measuring a choice", states + beside + both + head + compared, moved + aside)


def _choices(shapes: Shapes) -> Iterator[Extent]:
    """Yield the passes before a choice: the one of estimates, and the one that measures what was chosen."""
    if (choosing := shapes.choosing) is not None:
        yield choosing._replace(compared=0)
        if choosing.compared:
            yield choosing.of_the_choice


def _states_before_a_choice(shapes: Shapes, extent: Extent, setting: MemorySetting) -> tuple[int, int]:
    """Return the bytes of hidden states where the run computes, and on the host."""
    state = SINGLE * extent.batch * shapes.hidden  # of a batch
    batches = -(-extent.seen // extent.batch)
    if setting.states == "device":
        return batches * state, 0
    if setting.states == "host":
        return SENT_STATES * state, batches * pinned_bytes(state)
    return state, 0


def _in_a_block(shapes: Shapes, kind: Blocks, setting: MemorySetting) -> Iterator[Moment]:
    streams, split, windows = shapes.streams, shapes.streams - 1, shapes.most_windows(setting.batch)
    costs, tiling = (CPU, kernels.CPU) if setting.device.on_cpu else (GPU, kernels.GPU)
    cut_at_once, span = 0 if setting.device.on_cpu else tiling.summed, tiling.span
    block, held = shapes.number * kind.weights * streams, waits(shapes, kind, setting)
    all_paused = len(held) == len(kind.groups)
    states = 0 if all_paused else streams * _states(shapes, setting)[0]
    for stage, group in enumerate(kind.groups):
        n, paused = group.inputs, stage < len(held)
        last = all_paused and stage == len(kind.groups) - 1 and group.experts == 1
        before = kind.groups[stage - 1].held if stage else shapes.state
        arrived = group.held + split * shapes.state if last else streams * group.held
        given, wide = (streams * windows * size for size in group.routed)  # inputs of as many experts as fit
        routed = given if given <= setting.room else wide // min(group.experts, -(-wide // max(1, setting.room)))
        waiting_now = windows * arrived if paused else routed
        running = setting.batch * (max(0, group.alive - before) if paused else streams * group.alive)
        row, widest = SINGLE * setting.batch * shapes.seqlen, max((out for out, _ in group.lost), default=0)
        copied = split * last if paused else streams  # passes that wait hold their inputs
        parts = PART_COPIES * split if shapes.number < SINGLE and not setting.device.on_cpu else 0  # see `wide_product`
        scaled = streams * (shapes.placed and group.experts == 1)
        rows = row * (n * (copied + split + parts + scaled + ROUNDING_COPIES * shapes.rounded) + 4 * split * widest)
        lost, crossed = split * sum(out * columns for out, columns in group.lost), split * _crossed(group)
        summed = n * n * (streams + 2 * crossed) + 2 * lost
        sums = DOUBLE * (summed + 2 * crossed * n * n + 2 * lost + streams * min(span, n) * n)  # see `exact_sum.py`
        largest_product = max(crossed * n * n, lost)
        products = SINGLE * largest_product + SINGLE * split * _largest(group)
        products += 2 * DOUBLE * min(cut_at_once, max(largest_product, min(span, n) * n))
        extra = streams * SINGLE * _extra_rows(shapes) * n  # no product is formed of them
        means = DOUBLE * summed + SINGLE * split * n * n + extra  # held-out ones in float32, and squares of extra rows
        waiting_first = held[stage] if paused else waiting_now
        # rows are summed while no pass runs; the quantized network runs after the original one
        most = max(running + row * split * (n * copied + widest), rows + products)
        yield Moment("running a block", block + states + waiting_first + sums + max(most, most - products + extra))
        left = shapes.number * kind.weights if last else block  # the original stream may have passed the block
        yield Moment("running a block", left + states + waiting_now + extra + max(sums, means))
        yield Moment("solving a layer", left + states + waiting_now + _solving(shapes, group, costs))


def _solving(shapes: Shapes, group: Group, costs: Costs) -> int:
    """Return the bytes of second moments and of the solve of a group's layers, in addition to the block."""
    n, largest, split, shared = group.inputs, _largest(group), shapes.streams - 1, len(group.layers) > 1
    square, crossed, lost = n * n, split * _crossed(group), split * sum(out * columns for out, columns in group.lost)
    inputs = DOUBLE * square + shapes.streams * SINGLE * _extra_rows(shapes) * n
    values = SINGLE * (group.weights - largest)  # of the other layers, until all are written
    aims = square * (SINGLE * split + (DOUBLE + SINGLE) * crossed) + (DOUBLE + SINGLE) * lost  # C or lost outputs
    correction = DOUBLE * square * split  # two factors in float32, for all windows and for the fitted part
    factor = DOUBLE * square  # factor of the sweep
    rows = CERTIFIED_ROWS if costs is CPU else max(CERTIFIED_ROWS, kernels.GPU.numbers // n)
    strips = CERTIFIED_BYTES * min(rows, largest // n) * n
    strips += 0 if costs is CPU else DOUBLE * min(BLOCK_COLUMNS, n) ** 2  # a triangle of ones, for running sums
    limit = 2 * DOUBLE * square if n <= MAX_CERTIFIED_INPUTS else 0  # H minus the water level, and its Cholesky factor
    certifying = 4 * SINGLE * largest + max(strips, limit)
    beam = min(costs.beam, 3 * SINGLE * shapes.beam * largest) if shapes.beam > 1 else SINGLE * square
    swept = beam * costs.swept * min(BEAM_COLUMNS, n) // (3 * SINGLE * n) if shapes.beam > 1 else 0
    solving = costs.solved * largest + beam + swept
    correcting = aims + correction + SINGLE * square + CORRECTED_BYTES * largest + factor * shared
    solved = factor + max(solving, certifying) + (aims + correction) * shared
    return inputs + values + max(correcting, solved)


def _extra_rows(shapes: Shapes) -> int:
    """Return the rows of the extra windows that are kept for a layer: evenly spread, at most `EXTRA_ROWS`."""
    rows = shapes.extra * shapes.seqlen
    return -(-rows // max(1, -(-rows // EXTRA_ROWS)))


def _largest(group: Group) -> int:
    return max(out * columns for out, columns in group.layers)


def _crossed(group: Group) -> int:
    return int(len(group.lost) < len(group.layers))
