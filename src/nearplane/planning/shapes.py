"""Shapes of the model, the text and the recipe, from which the memory and the time of a run follow, and its multiplications."""

from __future__ import annotations

from dataclasses import dataclass

from nearplane.calibration.windows import extra_batch
from nearplane.planning.parts import Extent

SINGLE = 4  # bytes of a float32 number


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers of a block that share an input.

    Args:
        layers: (out, in) of each layer.
        alive: Bytes of live activations when the forward pass of one window comes to these layers.
        held: Bytes of those that it keeps while it waits there, because the rest of it uses them.
        lost: (out, in) of each layer whose lost outputs are summed; for the others the moments C are summed.
        experts: Number of experts, of which `layers` are one; 1: plain layers.
        routed: Bytes of a window's inputs of experts: as they are given, and with one row per expert that a token reaches.
    """

    layers: tuple[tuple[int, int], ...]
    alive: int
    held: int
    lost: tuple[tuple[int, int], ...] = ()
    experts: int = 1
    routed: tuple[int, int] = (0, 0)

    @property
    def inputs(self) -> int:
        """Number of inputs of the layers."""
        return self.layers[0][1]

    @property
    def weights(self) -> int:
        """Number of weights of the layers."""
        return sum(out * columns for out, columns in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one kind: their number, weights of one, its groups in order of execution, and whether passes can pause."""

    count: int
    weights: int
    groups: tuple[Group, ...]
    pauses: bool = True

    @property
    def most_alive(self) -> int:
        """Bytes of live activations at the largest stage of a forward pass of one window."""
        return max((group.alive for group in self.groups), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes of the model, the text and the recipe, which determine the bound.

    Args:
        blocks: Blocks of every kind.
        windows, extra, seqlen: Numbers of fitted windows and of extra windows, tokens per window.
        hidden, vocabulary: Width of hidden states, number of outputs of the head.
        embeddings: Number of weights before the first block.
        ends: Bytes of embeddings and head, which are copied after the last block.
        streams: 2 with a correction, else 1.
        beam: Candidates per row.
        descents: Number of passes of coordinate descent over the codes of a layer.
        searched: Time of searching steps and codes beside the products, as a number of multiplications for each weight.
        choosing: Work of choosing bits or formats by measuring before the first layer; None: they are not chosen.
        backward: Tokens of the backward pass; 0: no backward pass.
        predicted: Tokens of a window that are predicted at once in it.
        placed: Whether rows are scaled by their position, which copies them.
        rounded: Whether the quantized network rounds the inputs of its layers.
        beside: Bytes that one network keeps for one window beside its hidden states, see `FirstLook`.
        number: Bytes of a number of weights and hidden states in the network that runs.
        heads: Attention heads of a block.
        ranks: Processes of the run, among which the windows are dealt.
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
    searched: float = 0.0
    choosing: Extent | None = None
    backward: int = 0
    predicted: int = 0
    placed: bool = False
    rounded: bool = False
    beside: int = 0
    number: int = SINGLE
    heads: int = 0
    ranks: int = 1

    @property
    def all_windows(self) -> int:
        """Number of windows that pass through the network."""
        return self.windows + self.extra

    def most_windows(self, batch: int) -> int:
        """Return at least the windows of the rank that has most, in batches of so many; see `Dealt.among`."""
        if self.ranks == 1:
            return self.all_windows
        batches = -(-(self.windows - 1) // batch)
        fitted = 1 + batch * -(-batches // self.ranks)
        whole = self.all_windows + self.ranks - 1  # the first is on every rank
        evened = -(-whole // self.ranks) + extra_batch(batch)
        return min(self.all_windows, max(fitted, evened))

    @property
    def state(self) -> int:
        """Bytes of one window's hidden states in one network."""
        return self.number * self.seqlen * self.hidden


def multiplications(shapes: Shapes) -> float:
    """Return the number of multiplications in matrix products of a run, with each forward pass of a block run once."""
    per_token = sum(kind.count * forward_work(shapes, kind) for kind in shapes.blocks)
    total = sum(kind.count * of_a_block(shapes, kind) for kind in shapes.blocks)
    head = shapes.hidden * shapes.vocabulary
    total += shapes.backward * (4 * per_token + 3 * head)
    if (choosing := shapes.choosing) is not None:
        for kind in shapes.blocks:
            for group in kind.groups:
                n = group.inputs
                swept = choosing.points * (group.experts * (n / 2 + shapes.searched) + choosing.scored)
                total += kind.count * (n * n * (choosing.seen / 2 + group.experts * n / 6) + swept * group.weights)
        total += choosing.seen * per_token
    return total


def of_a_block(shapes: Shapes, kind: Blocks) -> float:
    """Return the number of multiplications for one block of a kind, after what is measured before the first layer."""
    tokens, split = shapes.all_windows * shapes.seqlen, shapes.streams - 1
    total = tokens * shapes.streams * forward_work(shapes, kind)
    for group in kind.groups:
        n = group.inputs
        total += tokens * n * n * (0.5 + split)  # moments
        each = 2 * split + shapes.beam / 2 + shapes.descents + 1  # target, sweep, descent, certificate
        total += group.experts * (n**3 / 6 * (1 + 2 * split) + (each * n + shapes.searched) * group.weights)
    return total


def forward_work(shapes: Shapes, kind: Blocks) -> float:
    """Return the multiplications of a token in one block, which counts one expert, so that it is a lower bound."""
    return sum(group.weights for group in kind.groups) + 2 * shapes.seqlen * shapes.hidden
