"""What batches show of the inputs of layers: rows, of experts with their routing. Knows tensors; not how they were seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.watch import wide
from nearplane.errors import CalibrationError
from nearplane.models.experts import ExpertLayer, Routed
from nearplane.models.layers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one batch showed of the input of layers that share it.

    Args:
        X_hat: (tokens, in) rows in the quantized network.
        X: (tokens, in) the same rows in the original network; None without a comparison.
        residual: (tokens, out) `r - r_hat`, by layer that adds to the residual stream.
    """

    X_hat: Tensor
    X: Tensor | None = None
    residual: dict[str, Tensor] = field(default_factory=dict)

    def before(self, share: Fraction) -> int:
        """Return how many rows are of the first `share` of the batch's tokens."""
        return int(len(self.X_hat) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows(Rows):
    """What one batch showed of the input of one expert.

    Args:
        token: (rows,) token of the batch that each row is of, ascending.
        tokens: of the batch.
        alike: how many of them the original network sends to this expert as well; for the others `X` is `X_hat`: nothing is known
            to be lost before it.
    """

    token: Tensor
    tokens: int
    alike: int = 0

    def before(self, share: Fraction) -> int:
        """Return how many rows are of the first `share` of the batch's tokens."""
        return int((self.token < int(self.tokens * share)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """What one batch showed of the inputs of all experts of a block, before gate and up or before down.

    Args:
        quantized: in the quantized network.
        original: in the original network; None without a comparison.
    """

    quantized: Routed
    original: Routed | None = None

    def of(self, expert: int) -> ExpertRows:
        """Return what concerns one expert, in memory of its own."""
        routed = self.quantized
        token, X_hat = routed.token[routed.of(expert)], wide(routed.rows(expert))
        if self.original is None:
            return ExpertRows(X_hat=X_hat, token=token, tokens=routed.tokens)
        there, X = self.original.token[self.original.of(expert)], X_hat.clone()
        place = torch.searchsorted(there, token)  # (rows,), of the same token among those of the original
        both = place < len(there)
        both[both.clone()] = there[place[both]] == token[both]
        X[both] = wide(self.original.rows(expert)[place[both]])
        return ExpertRows(X_hat=X_hat, X=X, token=token, tokens=routed.tokens, alike=int(both.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class InParts:
    """What all batches show of experts, some of them at a time: what all multiply is not kept at once.

    Args:
        parts: layers of the experts that are shown together.
        run: passes all batches through the block and yields what each shows of some layers; true with the last of all passes.
    """

    parts: list[tuple[Layer, ...]]
    run: Callable[[tuple[Layer, ...], bool], Iterator[list[Rows | RoutedRows]]]

    def all(self) -> Iterator[RoutedRows]:
        """Yield what each batch shows of all experts, none kept, in a pass of its own before those of the parts."""
        return self._shown(tuple(layer for part in self.parts for layer in part), last=False)

    def of(self, part: tuple[Layer, ...]) -> list[RoutedRows]:
        """Return what each batch shows of a part."""
        return list(self._shown(part, last=part is self.parts[-1]))

    def _shown(self, layers: tuple[Layer, ...], *, last: bool) -> Iterator[RoutedRows]:
        for (rows,) in self.run(layers, last):
            assert isinstance(rows, RoutedRows), "only experts are shown in parts"
            yield rows


@dataclass(slots=True)
class Seen:
    """What one batch showed of one group in one network: rows of its input, and what is added to the outputs of its layers.

    `routed` takes the place of the rows of experts.
    """

    rows: list[Tensor] = field(default_factory=list)  # (tokens, in) each
    added: dict[str, Tensor] = field(default_factory=dict)  # layer name: (tokens, out)
    inputs: int = 0
    routed: Routed | None = None

    def add(self, group: Sequence[Layer], x: Any, *, waits: bool = False) -> None:
        """Take in what layers are given, in memory of its own; of experts as it is where the forward waits there."""
        layer = group[0]
        if isinstance(x, Routed):
            experts = list(dict.fromkeys(each.expert for each in group if isinstance(each, ExpertLayer)))
            self.routed = x if waits else x.only(experts)
        else:
            self.rows.append(wide(layer.rows(x)))

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self.rows)

    @property
    def stacked(self) -> Tensor:
        if not self.rows:
            return torch.empty(0, self.inputs)
        return self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)


def rows_of(name: str, quantized: Seen, original: Seen | None) -> Rows | RoutedRows:
    """Put together what one batch showed in each network.

    Raises:
        CalibrationError: the layer sees different tokens in the two networks.
    """
    if quantized.routed is not None:
        return RoutedRows(quantized=quantized.routed, original=None if original is None else original.routed)
    if original is None:
        return Rows(X_hat=quantized.stacked)
    if original.tokens != quantized.tokens:
        raise CalibrationError(
            f"{name} sees {original.tokens} tokens in the original network and {quantized.tokens} in the quantized one (routed "
            f"experts do): leave it out with --ignore, or do without correction."
        )
    residual = {layer: original.added[layer] - r_hat for layer, r_hat in quantized.added.items()}
    return Rows(X_hat=quantized.stacked, X=original.stacked, residual=residual)
