"""Blocks that belong to no model."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from nearplane.calibration.activations import Stream
from nearplane.calibration.recorder import Call
from nearplane.models.model import Block
from nearplane.models.structure import find_layers


class Convolution(nn.Module):
    """A block that is a convolution and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.conv(hidden)


class Routed(nn.Module):
    """A block with an expert that sees some of the tokens; which ones depends on a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        chosen = hidden[..., 0] > 0
        hidden[chosen] = self.expert(hidden[chosen])
        return hidden


class Skipping(Routed):
    """The same, whose expert is not called where it sees no token."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if bool((hidden[..., 0] > 0).any()) else self.first(hidden)


class Tables(nn.Module):
    """A block with a table that `to` returns as it is, and one that its first batch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.table, self.made = torch.full((4,), 2.0, dtype=torch.float64), None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.table.exp()
        return self.second(self.first(hidden) * self.table.to(hidden.dtype) * self.made)


class Experts(nn.Module):
    """A block with a list of two experts, of which each sees some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8, dtype=torch.float64), "down": nn.Linear(8, 4, dtype=torch.float64)})
            for _ in range(2)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            chosen = (hidden[..., 0] > 0) == index
            out[chosen] = expert["down"](expert["up"](hidden[chosen]).relu())
        return hidden + out


def bare(module: nn.Module, *shape: int) -> tuple[Block, Stream]:
    """Return a block that belongs to no model, in memory twice, and a stream before it: two batches of two windows."""
    layers, _ = find_layers(module, "block")
    block = Block(None, "block", module, layers)
    block.original, block.quantized = deepcopy(module), deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    calls = {"block": [Call(args=(), kwargs={}, positional=True) for _ in hidden]}
    return block, both(Stream(hidden, calls))


def both(stream: Stream) -> Stream:
    """Return a stream with the original network's beside, which starts as the same tensors."""
    stream.original = list(stream.quantized)
    return stream
