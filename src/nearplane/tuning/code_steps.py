"""Steps of trained codes, each taken within the backward pass, so that gradients of one block exist at a time.

Adam without averages of gradients, whose squared gradients are known by their means over rows and over columns alone, as in
Adafactor (Shazeer and Stern 2018). A gradient of a code is a product of an output's gradient, an input and a step, so their
squares nearly factor too. Averages of gradients gain nothing here (docs/log.md), and a code keeps no state but its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

DECAY = 0.999  # of the means; a long average, because random moves of codes cost loss
TINY = 1e-300  # in place of squares that are all 0; squares of small gradients need the range of float64


class CodeSteps:
    """Optimizer of leaves (out, in), which steps as soon as a backward pass has added to them and drops their gradients.

    Args:
        leaves: The leaves.
        rate: Function without arguments that returns the learning rate of the present step.
        before: Function of the number of a leaf that may change its gradient before the step.
    """

    def __init__(
        self, leaves: Sequence[Tensor], rate: Callable[[], float], before: Callable[[int], None] = lambda _: None
    ) -> None:
        self._leaves, self._rate, self._before = leaves, rate, before
        self._counts = [0] * len(leaves)
        self._rows = [leaf.new_zeros(len(leaf), dtype=_widest(leaf)) for leaf in leaves]
        self._columns = [leaf.new_zeros(leaf.shape[1], dtype=_widest(leaf)) for leaf in leaves]
        self._hooks = [
            leaf.register_post_accumulate_grad_hook(lambda _, number=number: self._step(number))
            for number, leaf in enumerate(leaves)
        ]

    def close(self) -> None:
        """Step no more; without this the leaves stay in memory, as their hooks refer to them."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _step(self, number: int) -> None:
        leaf, rows, columns = self._leaves[number], self._rows[number], self._columns[number]
        self._before(number)
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "called behind the addition to a gradient"
        out, width = gradient.shape
        rows.lerp_(torch.linalg.vector_norm(gradient, dim=1).to(rows).square_().div_(width), 1 - DECAY)
        columns.lerp_(torch.linalg.vector_norm(gradient, dim=0).to(columns).square_().div_(out), 1 - DECAY)
        self._counts[number] += 1
        known = 1 - DECAY ** self._counts[number]
        least = max(TINY, torch.finfo(rows.dtype).tiny)
        by_row = (rows / rows.mean().clamp(min=least)).sqrt_().clamp_(min=least)
        by_column = (columns / known).sqrt_().clamp_(min=least)
        gradient.div_(by_row.to(gradient)[:, None].clamp_(min=torch.finfo(gradient.dtype).tiny))
        gradient.div_(by_column.to(gradient).clamp_(min=torch.finfo(gradient.dtype).tiny))
        leaf.add_(gradient, alpha=-self._rate())

    def state(self) -> Mapping[str, list[Tensor] | list[int]]:
        """Return the state for `restore`."""
        return {"counts": self._counts, "rows": self._rows, "columns": self._columns}

    def restore(self, state: Mapping[str, list[Tensor] | list[int]]) -> None:
        """Restore the state that `state` returned."""
        self._counts = [int(count) for count in state["counts"]]
        for mine, read in ((self._rows, state["rows"]), (self._columns, state["columns"])):
            for one, other in zip(mine, read, strict=True):
                one.copy_(torch.as_tensor(other))


def _widest(leaf: Tensor) -> torch.dtype:
    """Return float64, or float32 on devices without it."""
    return torch.float32 if leaf.device.type == "mps" else torch.float64
