"""What every layer of a deep network loses, told by measuring the layers of some of its blocks.

Knows losses and what perturbations change in their own block; not how either is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nearplane.models.model import Block


class Change(NamedTuple):
    """What a perturbation does.

    Args:
        block: number of the block that its layers are in.
        layers: their names within the block.
        estimate: what its loss is about proportional to, see `expected_loss` and `relative_energy`.
        loss: of the network; None where that was not measured.
    """

    block: int
    layers: tuple[str, ...]
    estimate: float
    loss: float | None


def within(layer: str, block: str) -> str:
    """Return the name of a layer within its block."""
    return layer.removeprefix(f"{block}.")


def measured_blocks(blocks: Sequence[Block], most: int) -> frozenset[int]:
    """Return the numbers of blocks whose layers are measured: all, or about `most`.

    From the first to the last, closer to each other at both ends (Chebyshev's points), where blocks differ most. Blocks with other
    layers (attention here, convolution there) are chosen by themselves: of every sort at least two, or all.
    """
    if len(blocks) <= most:
        return frozenset(range(len(blocks)))
    sorts: dict[tuple[str, ...], list[int]] = {}
    for number, block in enumerate(blocks):
        if block.layers:
            sorts.setdefault(tuple(sorted(within(layer.name, block.name) for layer in block.layers)), []).append(number)
    chosen: set[int] = set()
    for numbers in sorts.values():
        count = max(min(2, len(numbers)), most * len(numbers) // len(blocks))
        places = (1 - np.cos(np.linspace(0, np.pi, count))) / 2 * (len(numbers) - 1)  # of one it is the first
        chosen.update(numbers[round(place)] for place in places)
    return frozenset(chosen)


def expected_loss(W: Tensor, perturbed: Tensor, H: Tensor, sensitivity: Tensor) -> float:
    """Return `1/2 sum_i s_i (E H E^T)_ii`, what the network should lose by errors E of weights, nats per token.

    Args:
        W, perturbed: (out, in).
        H: (in, in) second moments of the inputs.
        sensitivity: (out,) of the network to squared errors of each output.
    """
    E = (W - perturbed).float()
    return float(((E @ H.float()) * E).sum(1).double() @ sensitivity.double()) / 2


def relative_energy(differences: Sequence[Tensor], states: Sequence[Tensor]) -> float:
    """Return the sum over tokens of `|difference|^2 / |state|^2`, of batches (windows, seqlen, hidden)."""
    return sum(
        float((d.double().square().sum(-1) / x.double().square().sum(-1).clamp(min=1e-30)).sum())
        for d, x in zip(differences, states, strict=True)
    )


def told_losses(changes: Sequence[Change]) -> list[float]:
    """Return the loss of every change: its estimate times what estimates of its layers are off by, interpolated over depth.

    That is the loss over the estimate, of the layers of the same name in the blocks where it was measured; its logarithm is linear
    between them and constant beyond. Of names whose measured changes were nothing it is the mean of all.
    """
    least = min((one.loss for one in changes if one.loss), default=0.0)
    known: dict[str, dict[int, float]] = {}  # logarithms by name and block
    for one in changes:
        if one.loss is not None and one.estimate > 0 and least > 0:
            for name in one.layers:
                known.setdefault(name, {})[one.block] = math.log(max(one.loss, least) / one.estimate)
    if not known:
        return [0.0] * len(changes)
    mean = float(np.mean([log for logs in known.values() for log in logs.values()]))

    def interpolated(name: str, block: int) -> float:
        logs = known.get(name, {block: mean})
        return float(np.interp(block, sorted(logs), [logs[place] for place in sorted(logs)]))

    return [one.estimate * math.exp(np.mean([interpolated(name, one.block) for name in one.layers])) for one in changes]
