"""Rows of the experts of a block by their routing, and their second moments, of one expert at a time.

The rows of all batches are kept: so the matrices of all experts are never in memory together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.rows import Rows
from nearplane.errors import CalibrationError
from nearplane.lattice.exact_sum import unit_of
from nearplane.models.experts import Routed, by_expert
from nearplane.models.layers import Layer
from nearplane.recipe.recipe import Rare
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT, MIN_TOKENS_PER_INPUT


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

    def __init__(
        self, quantized: Routed, original: Routed | None, rounded: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.quantized, self.original, self.rounded = quantized, original, rounded
        keys = quantized.keys
        others = keys[:0] if original is None else original.keys
        self.position = torch.searchsorted(others, keys).clamp(max=max(0, len(others) - 1))
        self.alike = others[self.position] == keys if len(others) else torch.zeros_like(keys, dtype=torch.bool)
        self.on_host = torch.stack([quantized.token, self.alike.long()]).cpu()

    def of(self, expert: int) -> Rows:
        """Return a copy of the rows of one expert."""
        routed, pairs = self.quantized, self.quantized.of(expert)
        rows, (token, alike) = routed.rows(expert), self.on_host[:, pairs]
        X_hat = (rows if self.rounded is None else self.rounded(rows)).clone()
        if self.original is None:
            return Rows(X_hat=X_hat, token=token, tokens=routed.tokens)
        X = rows.clone()
        if self.original.ends[-1]:
            X = torch.where(self.alike[pairs, None], self.original.at(self.position[pairs]), X)
        return Rows(X_hat=X_hat, X=X, token=token, tokens=routed.tokens, alike=int(alike.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class InParts:
    """Rows of experts of all batches, in several passes, as the rows of all experts do not fit into memory together.

    Args:
        parts: The layers of each pass.
        run: Function that runs all batches through the block and yields rows of groups; see `rows_by_batch`.
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

    def in_turn(self, group: tuple[Layer, ...], new_sums: Callable[..., Any], rare: Rare) -> Iterator[Any]:
        """Yield what the function `in_turn` does for all parts of a group; the mean over all experts takes a pass first."""
        mean = _over_experts(group, self.shown(group, last=False), new_sums)
        mean_totals, with_unit = mean.totals(), partial(new_sums, unit=mean.unit)
        for part in self.parts:
            last = part is self.parts[-1]  # no variable for the rows: it would keep two parts in memory
            yield from in_turn(part, list(self.shown(part, last=last)), with_unit, rare, mean_totals)


def in_turn(
    group: tuple[Layer, ...],
    shown: list[RoutedRows],
    new_sums: Callable[..., Any],
    rare: Rare,
    mean_totals: Any = None,
) -> Iterator[Any]:
    """Yield the layers of one expert after the other, each with the moments of the tokens that reach it.

    If the n tokens of an expert are fewer than `MIN_TOKENS_PER_INPUT` per input, the mean over all experts is added with the
    weight of the m missing tokens: `H = (n H_own + m H_mean) / (n + m)`.

    Args:
        group: Layers of experts.
        shown: Routed rows of each batch.
        new_sums: Function that returns empty sums for some layers, see `second_moments.py`.
        rare: Treatment of experts that few tokens reach; see `sum_moments`.
        mean_totals: Sums over the rows of all experts; None if `group` holds all experts.

    Raises:
        CalibrationError: Too few tokens reach an expert, and `rare` is "error".
    """
    dealt, inputs, experts = new_sums(group).dealt, group[0].shape[1], by_expert(group)
    fitted = shown[: dealt.fitted]
    counts = torch.tensor([[rows.quantized.count(each) for each in experts] for rows in fitted]).int()
    tokens_of = dealt.ranks.sum(counts[int(dealt.repeated) :].sum(0)).tolist()
    mean_cache = [] if mean_totals is None else [mean_totals]  # computed only if an expert needs it

    def observed_expert(expert: int, layers: tuple[Layer, ...], tokens: int) -> Any:
        borrowed = max(0, MIN_TOKENS_PER_INPUT * inputs - tokens)
        if tokens < ADVISED_TOKENS_PER_INPUT * inputs and rare == "error":
            raise CalibrationError(too_rare(layers[0].name, tokens, inputs))
        if borrowed and not mean_cache:
            mean_cache.append(_over_experts(group, fitted, new_sums).totals())
        sums = new_sums(layers, crossed=True if borrowed else None)
        for batch, rows in enumerate(shown):
            sums.add(batch, rows.of(expert))
        return sums.observed(blended=(borrowed, mean_cache[0]) if borrowed else None)

    for number, (expert, layers) in enumerate(experts.items(), 1):
        yield replace(observed_expert(expert, layers, tokens_of[number - 1]), more=number < len(experts))


@torch.no_grad()
def _over_experts(group: tuple[Layer, ...], shown: Iterable[RoutedRows], new_sums: Callable[..., Any]) -> Any:
    """Return sums over the rows of every expert of a group, without extra windows."""
    sums = new_sums(group, crossed=True)
    for batch, rows in enumerate(shown):
        if sums.unit is None:
            sums.unit = unit_of_experts(group, rows)
        for expert in by_expert(group) if batch < sums.dealt.fitted else ():
            sums.add(batch, rows.of(expert))
    return sums


@torch.no_grad()
def unit_of_experts(group: tuple[Layer, ...], first: RoutedRows) -> Tensor:
    """Return the unit of sums over experts, from the rows of all of them in the first batch: one may have none there."""
    return unit_of(first.quantized.only([*by_expert(group)]).x)


def too_rare(name: str, tokens: int, inputs: int) -> str:
    """Return the message about an expert that too few tokens reach."""
    more = ""
    if tokens:
        more = f" About {math.ceil(ADVISED_TOKENS_PER_INPUT * inputs / tokens)} times as many samples would be enough."
    return (
        f"{tokens:,} calibration tokens reach {name}, fewer than {ADVISED_TOKENS_PER_INPUT} for each of its {inputs:,} inputs. "
        f"Use more --samples, text of the kind that the model is used for, or --rare-experts mean, which adds the mean over the "
        f"experts of the block.{more}"
    )
