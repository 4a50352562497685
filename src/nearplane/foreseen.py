"""What a run will take: peak memory, time, tokens. Arithmetic over shapes; measures and allocates nothing, knows no modules.

It counts what the parts of a run hold at a time: `models/activations.py` what lies between blocks, `models/staged.py` what waits
within one, `lattice/moments.py` the moments, `matrix/` what a layer is solved with, `budget/` what is measured before the first.
Whoever changes these changes the counts here; `benchmarks/plan.py` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nearplane.budget.probe import HELD, Extent
from nearplane.models.staged import waiting
from nearplane.progress import duration
from nearplane.record import MAX_PROFILED_INPUTS
from nearplane.sizes import size_text
from nearplane.speed import Speed

SINGLE, DOUBLE = 4, 8  # bytes of a number
EXTRA = 1024  # rows of extra windows that a layer keeps
STRIP = 256  # rows that a certificate measures at a time
STRIPS = 110  # bytes of a weight of these
MATRICES = 8  # of (out, in) in float32 that live while one is solved: weights, targets, codes, what a descent has
CODED = 9  # the same of entropy-coded weights: the coder's symbols too
BEAM = 128 << 20  # bytes of candidates that a beam holds at a time
TRIES = 2  # of the search for a step, on all rows by the solver
PERTURBED = 3  # times, that a layer is
STARTING, UNCOUNTED = 3.0, 1.3  # seconds before and behind all that is counted; times that, for what is not
KEPT = 450 << 20  # bytes that libraries keep once they compute, and that lie between small tensors, at most
BETWEEN = 5  # a part in so many of activations is what was freed between those that wait
LOGITS = 6  # times those of a window, that live where gradients begin
GRADIENTS = 3  # times what lives at the fullest stage of a forward, that a pass back keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers of a block that share an input.

    Args:
        layers: (out, in) of each.
        alive: bytes of activations that live while a forward of one window waits before them.
        lost: (out, in) of those whose lost outputs are summed; of the others C is.
        experts: how many sets of layers, each with rows of its own, `layers` stand for one of; 1: plain layers.
    """

    layers: tuple[tuple[int, int], ...]
    alive: int
    lost: tuple[tuple[int, int], ...] = ()
    experts: int = 1

    @property
    def inputs(self) -> int:
        """Inputs of the layers."""
        return self.layers[0][1]

    @property
    def widest(self) -> int:
        """Most outputs of one of the layers."""
        return max(out for out, _ in self.layers)

    @property
    def crossed(self) -> bool:
        """Whether C is summed."""
        return len(self.lost) < len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one kind.

    Args:
        count: of them.
        weights: of one.
        groups: in the order they run.
        pauses: whether forwards can wait in them.
    """

    count: int
    weights: int
    groups: tuple[Group, ...]
    pauses: bool = True

    @property
    def most_alive(self) -> int:
        """Bytes of activations that live at the fullest stage of a forward of one window."""
        return max((group.alive for group in self.groups), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run has to do.

    Args:
        blocks: of every kind.
        windows, extra, seqlen: of the text: fitted, beside them, tokens of each.
        hidden: width of hidden states.
        vocabulary: outputs of the head.
        around: weights of what is not in blocks and runs before the first: embeddings.
        ends: bytes of what is written behind the last block as it is: embeddings, head.
        streams: 2 with a correction, else 1.
        beam: candidates of a row.
        descents: passes over the codes of a layer; a second sweep goes with more than one.
        coded: whether codes are entropy-coded.
        probe: what is measured before the first layer is solved; None: nothing.
        backward: tokens of a pass back through the network; 0: there is none.
        again: whether layers may be solved more than once, so that what their targets are made of stays.
    """

    blocks: tuple[Blocks, ...]
    windows: int
    extra: int
    seqlen: int
    hidden: int
    vocabulary: int
    around: int
    ends: int
    streams: int = 2
    beam: int = 1
    descents: int = 0
    coded: bool = False
    probe: Extent | None = None
    backward: int = 0
    again: bool = False

    @property
    def all_windows(self) -> int:
        """Windows that pass through the network."""
        return self.windows + self.extra

    @property
    def state(self) -> int:
        """Bytes of the hidden states of one window in one network."""
        return SINGLE * self.seqlen * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a run goes about it.

    Args:
        batch: windows that pass at a time.
        room: bytes that waiting activations may take; stages that take more are passes of their own.
        disk: whether hidden states between blocks lie in a file.
    """

    batch: int
    room: int
    disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes in memory at a moment that may be the worst, beside what the program has without a run.

    Args:
        name: what is being done.
        block, activations, moments, solving: bytes of the block in memory, of activations, of second moments, and of all else.
    """

    name: str
    block: int = 0
    activations: int = 0
    moments: int = 0
    solving: int = 0

    @property
    def bytes(self) -> int:
        """Of all."""
        return self.block + self.activations + self.moments + self.solving

    @property
    def between(self) -> int:
        """What lies between activations that wait, freed and kept."""
        return self.activations // BETWEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What is foreseen of a run.

    Args:
        base: bytes that the process has without it.
        worst: the moment at which it takes most.
        seconds: on a quiet machine.
        tokens: that pass through the network.
    """

    base: int
    worst: Moment
    seconds: float
    tokens: int

    @property
    def peak(self) -> int:
        """Bytes at the most."""
        return self.base + self.worst.bytes + self.kept

    @property
    def kept(self) -> int:
        """Bytes that nobody uses and the system does not get back."""
        return min(KEPT, self.worst.bytes) + self.worst.between

    def sentence(self) -> str:
        """Return one line for the log."""
        parts = {
            "the program": self.base + self.kept,
            "a block": self.worst.block,
            "activations": self.worst.activations,
            "second moments": self.worst.moments,
            "work on them": self.worst.solving,
        }
        found = ", ".join(f"{name} {size_text(many)}" for name, many in parts.items() if many)
        return (
            f"quantizing takes about {size_text(self.peak)} of memory at its most, while {self.worst.name} ({found}), and "
            f"{duration(self.seconds)} on a quiet machine, for {self.tokens:,} tokens"
        )


def foresee(work: Work, way: Way, speed: Speed, base: int) -> Foreseen:
    """Return what a run takes if it goes a way.

    Args:
        work: what there is to do.
        way: how.
        speed: of this machine.
        base: bytes that the process has before it begins.
    """
    return Foreseen(
        base=base,
        worst=max(moments(work, way), key=lambda moment: moment.bytes + moment.between),
        seconds=seconds(work, way, speed) / speed.threads,
        tokens=work.all_windows * work.seqlen,
    )


def waits(work: Work, kind: Blocks, way: Way) -> list[int]:
    """Return the bytes that wait at each stage of a block at which forwards pause; of the stages behind there are none."""
    held: list[int] = []
    for stage, group in enumerate(kind.groups if kind.pauses else ()):
        last = stage == len(kind.groups) - 1 and group.experts == 1
        before = kind.groups[stage - 1].alive if stage else work.state
        needed = work.all_windows * waiting(group.alive, before, work.state, work.streams, last=last)
        if needed > way.room:
            break
        held.append(needed)
    return held


def moments(work: Work, way: Way) -> Iterator[Moment]:
    """Yield the moments of a run that may be the worst."""
    states = way.batch * work.state if way.disk else work.all_windows * work.state
    yield Moment(
        name="the embeddings run", activations=states + 4 * way.batch * work.state, solving=SINGLE * work.around
    )
    yield Moment(name="what is left is written", activations=work.streams * states, solving=work.ends)
    yield from _measuring(work)
    for kind in work.blocks:
        yield from _passing(work, kind, way)


def _measuring(work: Work) -> Iterator[Moment]:
    """Yield the moments before the first layer is solved."""
    window, width = work.seqlen, SINGLE * work.hidden
    head = SINGLE * (work.around + work.hidden * work.vocabulary)
    largest = max(kind.weights for kind in work.blocks)
    alive = max(kind.most_alive for kind in work.blocks) / window  # of a token
    if work.backward:
        logits = LOGITS * SINGLE * window * work.vocabulary
        yield Moment(name="gradients begin", activations=2 * width * work.backward + logits, solving=head)
        kept = round(GRADIENTS * alive * min(work.backward, 8 * window))
        yield Moment(name="gradients pass", block=SINGLE * largest, activations=2 * width * work.backward + kept)
    if work.probe is not None:
        seen, travelling, travellers, *_ = work.probe
        on_their_way = 2 * travellers * travelling * work.hidden
        groups = [group for kind in work.blocks for group in kind.groups]
        sums = DOUBLE * max(sum(group.inputs**2 for group in kind.groups) for kind in work.blocks)
        yield Moment(
            name="layers are probed",
            block=SINGLE * largest,
            activations=width * (2 * seen + 2 * travelling) + on_their_way + round(alive * min(seen, 8 * window)),
            moments=sums,
            solving=max(
                2 * DOUBLE * group.inputs**2 + CODED * SINGLE * group.widest * group.inputs for group in groups
            ),
        )
        logits = 4 * SINGLE * min(HELD, travelling * work.vocabulary)
        yield Moment(name="predictions are compared", activations=width * seen + on_their_way + logits, solving=head)


def _passing(work: Work, kind: Blocks, way: Way) -> Iterator[Moment]:
    """Yield the moments of a block that is quantized."""
    streams, split = work.streams, work.streams - 1
    block = SINGLE * kind.weights * streams
    held = waits(work, kind, way)
    whole = len(held) == len(kind.groups)
    states = 0 if whole else streams * (way.batch if way.disk else work.all_windows) * work.state
    for stage, group in enumerate(kind.groups):
        n, paused = group.inputs, stage < len(held)
        last = stage == len(kind.groups) - 1 and group.experts == 1
        before = kind.groups[stage - 1].alive if stage else work.state
        arrived = group.alive + split * work.state if whole and last else streams * group.alive
        after = states + (work.all_windows * arrived if paused else 0)
        rows = way.batch * work.seqlen
        flight = way.batch * (max(0, group.alive - before) if paused else streams * group.alive)
        shown = SINGLE * rows * (n * (1 + split) + split * group.widest)
        lost = sum(out * columns for out, columns in group.lost)
        crossed = split * group.crossed
        sums = DOUBLE * (n * n * (1 + split + 2 * crossed) + 2 * split * lost)
        product = SINGLE * max(crossed * n * n, *(split * out * columns for out, columns in group.lost), 0)
        going = states + (held[stage] if paused else 0)
        yield Moment(name="blocks run", block=block, activations=going + flight + shown, moments=sums, solving=product)
        known = DOUBLE * n * n + streams * SINGLE * min(EXTRA, work.extra * work.seqlen) * n
        aims = n * n * (split * SINGLE + crossed * (DOUBLE + SINGLE)) + split * (DOUBLE + SINGLE) * lost
        for name, aimed, taken in _solving(work, group):
            held_now = known + (0 if aimed and not work.again else aims)
            yield Moment(name=name, block=block, activations=after, moments=held_now, solving=taken)


def _solving(work: Work, group: Group) -> Iterator[tuple[str, bool, int]]:
    """Yield what is done to solve the layers of a group, whether all targets are there, and the bytes it takes beside moments."""
    n, values = group.inputs, 0
    for index, (out, _) in enumerate(group.layers):
        last, weights = index == len(group.layers) - 1, SINGLE * out * n
        correction = SINGLE * 2 * n * n * (work.streams - 1)
        factors = DOUBLE * n * n + (0 if last else correction)
        descent = SINGLE * n * n if work.descents else 0
        beam = BEAM if work.beam > 1 else 0
        limit = DOUBLE * n * n if n <= MAX_PROFILED_INPUTS else 0
        yield "targets are corrected", False, values + correction + SINGLE * n * n + 5 * weights
        yield (
            "layers are solved",
            last,
            values + factors + max(descent, beam) + (CODED if work.coded else MATRICES) * weights,
        )
        measuring = max(SINGLE * n * n + STRIP * n * STRIPS, limit)
        yield "losses are measured", last, values + factors + measuring + 4 * weights
        values += weights


def seconds(work: Work, way: Way, speed: Speed) -> float:
    """Return the seconds of one thread that a run takes."""
    solving = sum(kind.count * _block_seconds(work, kind, way, speed) for kind in work.blocks)
    return STARTING + UNCOUNTED * (solving + _measuring_seconds(work, speed))


def _forward(work: Work, kind: Blocks, speed: Speed) -> float:
    """Return the seconds that a token takes through a block."""
    matrices = sum(out * n for group in kind.groups for out, n in group.layers)
    products = matrices + 2 * work.seqlen * work.hidden
    return products * speed.product + 4 * kind.most_alive / work.seqlen * speed.touch


def _measuring_seconds(work: Work, speed: Speed) -> float:
    """Return the seconds of one thread that pass before the first layer is solved."""
    count = sum(kind.count for kind in work.blocks)
    forward = sum(kind.count * _forward(work, kind, speed) for kind in work.blocks)  # of a token through all blocks
    head = work.vocabulary * (work.hidden * speed.product + LOGITS * SINGLE * speed.touch)
    total = work.backward * (4 * forward + 3 * head)
    if work.probe is None:
        return total
    probe = work.probe
    total += (probe.seen + probe.travelling * (probe.crossings + probe.born + 2 * count) / count) * forward
    total += probe.travelling * (probe.travellers + 1) * head
    for kind in work.blocks:
        for group in kind.groups:
            n, sets = group.inputs, kind.count * group.experts
            total += sets * (probe.seen * n * n / 2 * speed.product + n**3 / 6 * speed.double)
            for out, _ in group.layers:
                total += PERTURBED * sets * out * n * (speed.perturb + n / 2 * speed.product)
    return total


def _block_seconds(work: Work, kind: Blocks, way: Way, speed: Speed) -> float:
    """Return the seconds of one thread that a block takes."""
    tokens, fitted = work.all_windows * work.seqlen, work.windows * work.seqlen
    paused = len(waits(work, kind, way))
    depths = [
        sum(out * n for group in kind.groups[:stage] for out, n in group.layers) for stage in range(len(kind.groups))
    ]
    total = tokens * work.streams * _forward(work, kind, speed)
    if paused < len(kind.groups):  # each stage behind is a pass as far as it, the last one to the end, and one goes on
        matrices = sum(out * n for group in kind.groups for out, n in group.layers)
        total += tokens * (work.streams * sum(depths[paused:]) + matrices) * speed.product
    for group in kind.groups:
        n, split = group.inputs, work.streams - 1
        lost = sum(out * columns for out, columns in group.lost)
        total += fitted * (n * n / 2 + split * (n * n * group.crossed + 2 * lost)) * speed.product
        batches = math.ceil(work.windows / way.batch)
        total += batches * DOUBLE * (n * n / 2 + split * (n * n * group.crossed + lost)) * speed.touch
        total += group.experts * _solve_seconds(work, group, speed)
    return total


def _solve_seconds(work: Work, group: Group, speed: Speed) -> float:
    """Return the seconds that the layers of a group take to solve and to measure."""
    n, split = group.inputs, work.streams - 1
    cube = n**3 / 6
    total = cube * (2 * split * speed.product + speed.double)
    if n <= MAX_PROFILED_INPUTS:
        total += cube * speed.double
    for out, _ in group.layers:
        weights, square = out * n, out * n * n
        total += split * (square * (1 + group.crossed) + 3 * STRIP * n * n) * speed.product
        if work.coded:
            total += TRIES * (weights * (speed.sweep + speed.coding) + work.beam * square / 2 * speed.product)
            total += 2 * (square / 2 * speed.product + weights * speed.coding) + 8 * STRIP * n * n / 2 * speed.product
        else:
            sweeps = 2 if work.descents > 1 else 1
            total += weights * (speed.search + sweeps * speed.sweep + work.descents * speed.descent)
            total += square * (sweeps / 2 + work.descents) * speed.product
        total += weights * speed.certificate + square * (speed.product + speed.double / 2)
        if n <= MAX_PROFILED_INPUTS:
            total += cube * speed.product
        total += 3 * weights * min(EXTRA, work.extra * work.seqlen) * speed.product
    return total


def ways(work: Work, way: Way, *, batches: bool) -> list[Way]:
    """Return ways to go: fewer stages at which forwards wait, hidden states in a file, and if `batches` smaller ones."""
    rooms = {way.room, 0}
    for kind in work.blocks:
        rooms.update(needed - 1 for needed in waits(work, kind, way))
    sizes = {way.batch, *(max(1, way.batch // part) for part in (2, 4, 8) if batches)}
    return [
        Way(room=room, batch=batch, disk=disk)
        for room in sorted(rooms, reverse=True)
        for batch in sorted(sizes, reverse=True)
        for disk in (False, True)
    ]
