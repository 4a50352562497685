"""An upper bound of the memory of a run, from shapes. Pure arithmetic; measures and allocates nothing.

    bound = SLACK * (resident at start + the most bytes that live at a time)

What lives is counted part by part: `calibration/` holds hidden states, waiting activations and second moments, `matrix/` what a
layer is solved with, `planning/probe.py` what is measured before the first layer. A change there is a change here;
`benchmarks/speed/memory_bound.py` compares the bound with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nearplane.calibration.one_forward import MemorySetting, waiting
from nearplane.planning.probe import HELD, Extent
from nearplane.record.record import MAX_CERTIFIED_INPUTS

SLACK = 1.3  # allocators keep freed memory between live tensors, libraries keep buffers and compiled kernels
SINGLE, DOUBLE = 4, 8  # bytes of a number
EXTRA_ROWS = 1024  # rows of held-out windows that a layer keeps
CERTIFIED_ROWS, CERTIFIED_BYTES = 256, 110  # rows that a certificate measures at a time, bytes of a weight of these
SOLVED_BYTES = 36  # of a weight that is solved: W, target, values, codes, errors, codes and sums that are tried
CORRECTED_BYTES = 20  # of a weight whose target is corrected: W, what was lost twice, the correction, the target
FINITE_BYTES = 10  # of a float64 number that is checked: its absolute value, two comparisons
BEAM_BYTES = 128 << 20  # of the targets, their copies and the codes of a beam, at most
LOGITS_COPIES = 6  # of a window's logits where gradients begin: logits, probabilities, gradients, each and a temporary
COMPARED_COPIES = 5  # of logits where predictions are compared: both log-probabilities, exp, difference, product
BACKWARD_COPIES = 3  # of the most activations of a forward, that a pass back keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers of a block that share an input.

    Args:
        layers: (out, in) of each.
        alive: bytes of activations that live while a forward of one window waits before them.
        lost: (out, in) of those whose lost outputs are summed; of the others C is.
        experts: how many sets of layers `layers` stand for one of; 1: plain layers.
        routed: of experts, bytes of a window's inputs as they are given, and with a row for every expert that a token reaches.
    """

    layers: tuple[tuple[int, int], ...]
    alive: int
    lost: tuple[tuple[int, int], ...] = ()
    experts: int = 1
    routed: tuple[int, int] = (0, 0)

    @property
    def inputs(self) -> int:
        """Inputs of the layers."""
        return self.layers[0][1]

    @property
    def weights(self) -> int:
        """Weights of the layers."""
        return sum(out * columns for out, columns in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one kind: how many, weights of one, its groups in the order they run, whether forwards can pause in them."""

    count: int
    weights: int
    groups: tuple[Group, ...]
    pauses: bool = True

    @property
    def most_alive(self) -> int:
        """Bytes of activations at the fullest stage of a forward of one window."""
        return max((group.alive for group in self.groups), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """All that a bound depends on.

    Args:
        blocks: of every kind.
        windows, extra, seqlen: fitted windows, held-out windows, tokens of each.
        hidden, vocabulary: width of hidden states, outputs of the head.
        embeddings: weights that run before the first block.
        ends: bytes of what is copied behind the last block: embeddings, head.
        streams: 2 with a correction, else 1.
        beam: candidates of a row.
        descents: passes of coordinate descent over the codes of a layer.
        probe: what perturbed layers are measured on before the first layer is solved; None: nothing.
        backward: tokens of a backward pass; 0: there is none.
    """

    blocks: tuple[Blocks, ...]
    windows: int
    extra: int
    seqlen: int
    hidden: int
    vocabulary: int
    embeddings: int
    ends: int
    streams: int = 2
    beam: int = 1
    descents: int = 0
    probe: Extent | None = None
    backward: int = 0

    @property
    def all_windows(self) -> int:
        """Windows that pass through the network."""
        return self.windows + self.extra

    @property
    def state(self) -> int:
        """Bytes of the hidden states of one window in one network."""
        return SINGLE * self.seqlen * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most bytes that a run with a setting takes, and what it is doing then."""

    setting: MemorySetting
    bytes: int
    while_: str


def bound(shapes: Shapes, setting: MemorySetting, resident: int) -> Bound:
    """Return an upper bound of the memory of a run.

    Args:
        shapes: of the model, the text and the recipe.
        setting: how the run spares memory.
        resident: bytes that the process holds before it begins, its libraries loaded.
    """
    while_, live = max(_moments(shapes, setting), key=lambda moment: moment[1])
    return Bound(setting=setting, bytes=round(SLACK * (resident + live)), while_=while_)


def choose(bounds: Iterable[Bound], limit: int) -> tuple[Bound, bool]:
    """Return the first bound within a limit and true; where none is, the least and false."""
    tried = list(bounds)
    fitting = [each for each in tried if each.bytes <= limit]
    return (fitting[0], True) if fitting else (min(tried, key=lambda each: each.bytes), False)


def settings(shapes: Shapes, first: MemorySetting, *, batches: bool) -> Iterator[MemorySetting]:
    """Yield settings in the order in which they are tried, from `first` on, each sparing more memory.

    Passes instead of pauses, stage by stage; hidden states on disk; then, with `batches`, fewer windows at a time, which alone
    changes the bytes of the checkpoint.
    """
    rooms = {needed - 1 for kind in shapes.blocks for needed in waits(shapes, kind, first)}
    for room in (first.room, *sorted(rooms, reverse=True), 0):
        yield (setting := replace(first, room=room))
    yield (setting := replace(setting, disk=True))
    while batches and setting.batch > 1:
        yield (setting := replace(setting, batch=setting.batch // 2))


def waits(shapes: Shapes, kind: Blocks, setting: MemorySetting) -> list[int]:
    """Return the bytes that wait at each stage of a block at which forwards pause; the stages behind them do not."""
    held: list[int] = []
    for stage, group in enumerate(kind.groups if kind.pauses else ()):
        last = stage == len(kind.groups) - 1 and group.experts == 1
        before = kind.groups[stage - 1].alive if stage else shapes.state
        needed = shapes.all_windows * waiting(group.alive, before, shapes.state, shapes.streams, last=last)
        if needed > setting.room:
            break
        held.append(needed)
    return held


def multiplications(shapes: Shapes) -> float:
    """Count the multiplications of a run in its matrix products, each forward of a block run once."""
    tokens, split, blocks = shapes.all_windows * shapes.seqlen, shapes.streams - 1, shapes.blocks
    total, through = 0.0, 0.0
    for kind in blocks:
        active = sum(group.weights for group in kind.groups)  # of one expert: at least that many
        forward = active + 2 * shapes.seqlen * shapes.hidden
        through += kind.count * forward
        total += kind.count * tokens * shapes.streams * forward
        for group in kind.groups:
            n = group.inputs
            total += kind.count * tokens * n * n * (0.5 + split)  # moments
            each = 2 * split + shapes.beam / 2 + shapes.descents + 1  # target, sweep, descent, certificate
            total += kind.count * group.experts * (n**3 / 6 * (1 + 2 * split) + each * n * group.weights)
    head = shapes.hidden * shapes.vocabulary
    total += shapes.backward * (4 * through + 3 * head)
    if shapes.probe is not None:
        crossings = (shapes.probe.crossings + shapes.probe.born) / sum(kind.count for kind in blocks)
        total += (shapes.probe.seen + shapes.probe.travelling * crossings) * through
        total += shapes.probe.travelling * (shapes.probe.travellers + 1) * head
    return total


def _moments(shapes: Shapes, setting: MemorySetting) -> Iterator[tuple[str, int]]:
    """Yield what a run does, and the bytes that live then beside what the process holds before it."""
    states = (setting.batch if setting.disk else shapes.all_windows) * shapes.state
    yield "embedding the tokens", states + 4 * setting.batch * shapes.state + SINGLE * shapes.embeddings
    yield "copying what is not quantized", shapes.streams * states + shapes.ends
    yield from _before_the_first_layer(shapes)
    for kind in shapes.blocks:
        yield from _in_a_block(shapes, kind, setting)


def _before_the_first_layer(shapes: Shapes) -> Iterator[tuple[str, int]]:
    width, window = SINGLE * shapes.hidden, shapes.seqlen
    head = SINGLE * (shapes.embeddings + shapes.hidden * shapes.vocabulary)
    block = SINGLE * max(kind.weights for kind in shapes.blocks)
    alive = max(kind.most_alive for kind in shapes.blocks) / window  # of a token
    if shapes.backward:
        gradients = 2 * width * shapes.backward
        yield "measuring gradients", gradients + LOGITS_COPIES * SINGLE * window * shapes.vocabulary + head
        kept = round(BACKWARD_COPIES * alive * min(shapes.backward, 8 * window))
        yield "measuring gradients", block + gradients + kept
    if shapes.probe is not None:
        seen, travelling, travellers, *_ = shapes.probe
        differences = 2 * travellers * travelling * shapes.hidden  # bfloat16
        groups = [group for kind in shapes.blocks for group in kind.groups]
        sums = DOUBLE * max(sum(group.inputs**2 for group in kind.groups) for kind in shapes.blocks)
        solving = max(2 * DOUBLE * group.inputs**2 + SOLVED_BYTES * _largest(group) for group in groups)
        states = 2 * width * (seen + travelling) + differences + round(alive * min(seen, 8 * window))
        yield "probing layers", block + states + sums + solving
        logits = COMPARED_COPIES * SINGLE * min(HELD, travelling * shapes.vocabulary)
        yield "comparing predictions", width * seen + differences + logits + head


def _in_a_block(shapes: Shapes, kind: Blocks, setting: MemorySetting) -> Iterator[tuple[str, int]]:
    streams, split, windows = shapes.streams, shapes.streams - 1, shapes.all_windows
    block, held = SINGLE * kind.weights * streams, waits(shapes, kind, setting)
    whole = len(held) == len(kind.groups)
    between = 0 if whole else streams * (setting.batch if setting.disk else windows) * shapes.state
    for stage, group in enumerate(kind.groups):
        n, paused = group.inputs, stage < len(held)
        last = whole and stage == len(kind.groups) - 1 and group.experts == 1
        before = kind.groups[stage - 1].alive if stage else shapes.state
        arrived = group.alive + split * shapes.state if last else streams * group.alive
        given, apart = (streams * windows * size for size in group.routed)  # the inputs of experts, of as many as fit
        routed = given if given <= setting.room else apart // min(group.experts, -(-apart // max(1, setting.room)))
        waiting_now = windows * arrived if paused else routed
        running = setting.batch * (max(0, group.alive - before) if paused else streams * group.alive)
        rows = (
            SINGLE
            * setting.batch
            * shapes.seqlen
            * (n * (streams + split) + 4 * split * max(out for out, _ in group.layers))
        )
        lost, crossed = split * sum(out * columns for out, columns in group.lost), split * _crossed(group)
        sums = n * n * DOUBLE * (streams + 2 * crossed) + 2 * DOUBLE * lost
        products = SINGLE * max(crossed * n * n, lost) + SINGLE * split * _largest(group)
        extra = streams * SINGLE * min(EXTRA_ROWS, shapes.extra * shapes.seqlen) * n
        checked = n * n * (SINGLE * split + FINITE_BYTES) + extra  # held-out moments in float32, whether all are finite
        going = held[stage] if paused else waiting_now
        yield "running a block", block + between + going + running + rows + products + sums + extra
        yield "running a block", block + between + waiting_now + sums + extra + checked
        yield "solving a layer", block + between + waiting_now + _solving(shapes, group)


def _solving(shapes: Shapes, group: Group) -> int:
    """Return the bytes of second moments and of all that solving the layers of a group takes, beside the block."""
    n, largest, split, shared = group.inputs, _largest(group), shapes.streams - 1, len(group.layers) > 1
    square, crossed, lost = n * n, split * _crossed(group), split * sum(out * columns for out, columns in group.lost)
    inputs = DOUBLE * square + shapes.streams * SINGLE * min(EXTRA_ROWS, shapes.extra * shapes.seqlen) * n
    values = SINGLE * (group.weights - largest)  # of the other layers, until all are written
    aims = square * (SINGLE * split + (DOUBLE + SINGLE) * crossed) + (DOUBLE + SINGLE) * lost  # C or what is lost
    correction = DOUBLE * square * split  # factors in float32, of all windows and of those not held out
    factor = DOUBLE * square  # of the sweep
    strips = CERTIFIED_BYTES * min(CERTIFIED_ROWS, largest // n) * n
    limit = 2 * DOUBLE * square if n <= MAX_CERTIFIED_INPUTS else 0  # H less the water level, its Cholesky factor
    certifying = 4 * SINGLE * largest + max(strips, limit)
    beam = min(BEAM_BYTES, 3 * SINGLE * shapes.beam * largest) if shapes.beam > 1 else SINGLE * square
    solving = SOLVED_BYTES * largest + beam
    correcting = aims + correction + SINGLE * square + CORRECTED_BYTES * largest + factor * shared
    solved = factor + max(solving, certifying) + (aims + correction) * shared
    return inputs + values + max(correcting, solved)


def _largest(group: Group) -> int:
    return max(out * columns for out, columns in group.layers)


def _crossed(group: Group) -> int:
    return int(len(group.lost) < len(group.layers))
