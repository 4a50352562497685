"""Rows of one batch that layers multiply, in the quantized and in the original network; those of experts by their routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.additions import wide
from nearplane.errors import CalibrationError
from nearplane.models.experts import ExpertLayer, Routed
from nearplane.models.layers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one batch that layers with one shared input multiply.

    Args:
        X_hat: (tokens, in) rows in the quantized network.
        X: (tokens, in) rows of the same tokens in the original network; None without a comparison.
        residual: {layer: (tokens, out) `r - r_hat`} of layers whose output is added to the residual stream.
    """

    X_hat: Tensor
    X: Tensor | None = None
    residual: dict[str, Tensor] = field(default_factory=dict)

    def before(self, share: Fraction) -> int:
        """Return the number of rows that belong to the first `share` of the batch's tokens."""
        return int(len(self.X_hat) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows(Rows):
    """Rows of one batch that one expert multiplies.

    Args:
        token: (rows,) index of each row's token in the batch, ascending; on the CPU.
        tokens: Number of tokens in the batch.
        alike: Number of rows whose token the original network routes to this expert as well; in the other rows `X`
            equals `X_hat` before it is rounded, as there is nothing to compare with.
    """

    token: Tensor
    tokens: int
    alike: int = 0

    def before(self, share: Fraction) -> int:
        """Return the number of rows that belong to the first `share` of the batch's tokens."""
        return int((self.token < int(self.tokens * share)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """Inputs of all experts of a block in one batch, before gate and up or before down.

    Args:
        quantized: The inputs in the quantized network.
        original: The inputs in the original network; None without a comparison.
        rounded: Function that rounds rows of the quantized network as the runtime does; None: they are not rounded.

    Attributes:
        position: (pairs,) index of each pair of token and expert among those of the original network, if it is there.
        alike: (pairs,) whether it is there.
        on_host: (2, pairs) token of each pair, and `alike`, on the CPU: a device is waited for once for all experts.
    """

    quantized: Routed
    original: Routed | None = None
    rounded: Callable[[Tensor], Tensor] | None = None
    position: Tensor = field(init=False)
    alike: Tensor = field(init=False)
    on_host: Tensor = field(init=False)

    def __post_init__(self) -> None:
        keys = self.quantized.keys
        others = keys[:0] if self.original is None else self.original.keys
        position = torch.searchsorted(others, keys).clamp(max=max(0, len(others) - 1))
        alike = others[position] == keys if len(others) else torch.zeros_like(keys, dtype=torch.bool)
        on_host = torch.stack([self.quantized.token, alike.long()]).cpu()
        for name, value in (("position", position), ("alike", alike), ("on_host", on_host)):
            object.__setattr__(self, name, value)

    def of(self, expert: int) -> ExpertRows:
        """Return a copy of the rows of one expert."""
        routed, pairs = self.quantized, self.quantized.of(expert)
        rows, (token, alike) = routed.rows(expert), self.on_host[:, pairs]
        X_hat = (rows if self.rounded is None else self.rounded(rows)).clone()
        if self.original is None:
            return ExpertRows(X_hat=X_hat, token=token, tokens=routed.tokens)
        X = rows.clone()
        if self.original.ends[-1]:
            X = torch.where(self.alike[pairs, None], self.original.at(self.position[pairs]), X)
        return ExpertRows(X_hat=X_hat, X=X, token=token, tokens=routed.tokens, alike=int(alike.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class InParts:
    """Rows of experts of all batches, in several passes, as the rows of all experts do not fit into memory together.

    Args:
        parts: The layers of each pass.
        run: Function that runs all batches through the block and yields rows of groups; see `stages.rows_by_batch`.
        ends: Whether the last of these passes is the last of the block.
    """

    parts: list[tuple[Layer, ...]]
    run: Callable[..., Iterator[list[Rows | RoutedRows]]]
    ends: bool

    def shown(self, layers: tuple[Layer, ...], *, last: bool) -> Iterator[RoutedRows]:
        """Yield the rows of some layers batch by batch, in a separate pass; `last`: it is the last of these passes."""
        for (rows,) in self.run([layers], last=self.ends and last):
            assert isinstance(rows, RoutedRows), "only experts are shown in parts"
            yield rows


@dataclass(slots=True)
class Seen:
    """Input rows of one group of layers in one batch and network, and the tensors added to the layers' outputs.

    For experts, `routed` replaces the rows.

    Args:
        inputs: Number of inputs of the layers.
        device: Device of the network.
        rounded: Function that rounds the inputs of a layer of this name as the runtime does; None: they are not rounded.
    """

    rows: list[Tensor] = field(default_factory=list)  # (tokens, in) each
    added: dict[str, Tensor] = field(default_factory=dict)  # layer name: (tokens, out)
    inputs: int = 0
    device: torch.device | None = None
    routed: Routed | None = None
    rounded: Callable[[str, Tensor], Tensor] | None = None

    def add(self, group: Sequence[Layer], x: Any, *, waits: bool = False) -> None:
        """Add an input `x` of the group; it is copied unless the forward pass `waits` until its rows are used."""
        layer = group[0]
        if isinstance(x, Routed):
            experts = list(dict.fromkeys(each.expert for each in group if isinstance(each, ExpertLayer)))
            self.routed = x if waits else x.only(experts)
        else:
            rows = layer.rows(x)
            rows = rows if self.rounded is None else self.rounded(layer.name, rows)
            self.rows.append(rows if waits and rows.is_contiguous() else rows.clone())

    @property
    def peak(self) -> float:
        """Largest magnitude of the rows."""
        return max((float(rows.abs().max()) for rows in self.rows if rows.numel()), default=0.0)

    @property
    def stacked(self) -> Tensor:
        if not self.rows:
            return torch.empty(0, self.inputs, device=self.device)
        return self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)


def rows_of(name: str, quantized: Seen, original: Seen | None) -> Rows | RoutedRows:
    """Combine the observations of one batch in the two networks.

    Raises:
        CalibrationError: The layer receives different tokens in the two networks.
    """
    if quantized.routed is not None:
        rounded = None if quantized.rounded is None else partial(quantized.rounded, name)
        original_routed = None if original is None else original.routed
        return RoutedRows(quantized=quantized.routed, original=original_routed, rounded=rounded)
    X_hat = quantized.stacked
    if original is None:
        return Rows(X_hat=X_hat)
    X = original.stacked
    if len(X) != len(X_hat):
        raise CalibrationError(
            f"{name} receives {len(X)} tokens in the original network and {len(X_hat)} in the quantized network, as routed "
            f"experts do. Leave the layer unquantized with --ignore, or use --no-correct."
        )
    residual = {layer: wide(original.added[layer]) - r_hat for layer, r_hat in quantized.added.items()}
    return Rows(X_hat=X_hat, X=X, residual=residual)
