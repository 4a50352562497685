"""Networks with two stacks of blocks: an encoder, and a decoder whose blocks look at what comes out of it (cross-attention).

Their hidden states travel as one tensor, those of the encoder first: (windows, positions of both, hidden). So every block of the
decoder has the encoder's output in the same network at hand, and gradients find their way back. Each block works on its own
positions and leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from nearplane.calibration.watch import same
from nearplane.errors import ModelError


class Encoded:
    """Stands in the arguments of a block for what comes out of the encoder."""


ENCODED = Encoded()


class Between:
    """Watches what an encoder does to the hidden states behind its last block: nothing, or one module, its last norm.

    Attributes:
        output: of the encoder that ran last.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.output: Tensor | None = None
        self._behind: Tensor | None = None
        self._candidates: list[tuple[nn.Module, Tensor]] = []
        self._module: nn.Module | None = None
        for module in encoder.modules():
            module.register_forward_hook(self._left if module is encoder else self._ran)

    def begin(self, behind: Tensor) -> None:
        """Note what the last block of the encoder returned."""
        self._behind, self._candidates = behind, []

    def _ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._behind is not None and args and isinstance(output, Tensor) and args[0] is self._behind:
            self._candidates.append((module, output))

    def _left(self, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found = self.output = output[0]
        if self._behind is None or same(found, self._behind):
            return
        made = [module for module, result in self._candidates if same(result, found)]
        if not made:
            raise ModelError(
                f"{type(encoder).__name__} does more behind its last block than one module does: it cannot be run block by block."
            )
        self._module = self._module or deepcopy(made[0])  # the network is freed, this is small

    def __call__(self, states: Tensor) -> Tensor:
        """Return what the decoder sees, of hidden states behind the encoder's last block."""
        result: Tensor = states if self._module is None else self._module(states)
        return result


def part_of(whole: Tensor, positions: slice | None) -> Tensor:
    """Return the hidden states at some positions; None: all."""
    return whole if positions is None else whole[:, positions].contiguous()


def with_part(whole: Tensor, positions: slice | None, part: Tensor) -> Tensor:
    """Return hidden states with others at some positions; None: at all."""
    if positions is None:
        return part
    return torch.cat([whole[:, : positions.start], part, whole[:, positions.stop :]], 1)


def joined(encoder: Tensor, decoder: Tensor, name: str) -> Tensor:
    """Return the hidden states that enter both stacks as one tensor.

    Args:
        encoder: (windows, positions, hidden) that enter the first block.
        decoder: (windows, positions, hidden) that enter the first block of the decoder.
        name: of that block.

    Raises:
        ModelError: they are not of one width.
    """
    if encoder.shape[2] != decoder.shape[2]:
        raise ModelError(
            f"{name} is given hidden states {decoder.shape[2]} wide, the encoder {encoder.shape[2]}: nearplane passes encoders and "
            f"decoders of one width."
        )
    return torch.cat([encoder, decoder], 1)


def hands_over(block: Callable[[Tensor], Any], hidden: Tensor, extra: Any) -> bool:
    """Whether a block returns tensors beside hidden states that are the same for others: they go from block to block as they are.

    T5's first block makes the bias of positions for all.

    Args:
        block: from hidden states to its output.
        hidden: that it was given.
        extra: that it returned.
    """
    if not any(isinstance(value, Tensor) for value in extra):
        return False
    other = block(hidden.flip(1) * 0.5)[1:]
    return all(
        type(a) is type(b) and (not isinstance(a, Tensor) or torch.equal(a, b))
        for a, b in zip(extra, other, strict=True)
    )
