"""Second moments of the inputs of layers, summed over the rows that forward passes of a block yield."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream
from nearplane.calibration.expert_rows import InParts, RoutedRows, in_turn, unit_of_experts
from nearplane.calibration.positions import RowFactors
from nearplane.calibration.rows import Rows
from nearplane.calibration.stages import unreached
from nearplane.calibration.sums_of_ranks import add_up, collect
from nearplane.calibration.windows import EXTRA_TOKENS
from nearplane.errors import CalibrationError, RankError
from nearplane.lattice.exact_sum import unit_of
from nearplane.lattice.moments import ExtraRows, Moments, MomentSums, MomentTotals, sum_dtype, wide_product
from nearplane.matrix.inputs import LayerInput, SharedInput
from nearplane.models.layers import Layer
from nearplane.recipe.recipe import Rare
from nearplane.system.matmul_library import repeatable_threads

HELD_OUT = 0.2  # fraction of the calibration windows whose moments are also summed separately


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Layers that share one input, bound to the quantized block, and the moments of this input.

    Args:
        layers: The layers in module order.
        moments: {layer name: moments}; H and C are the same tensors for all layers, `lost` differs.
        more: Whether another expert of the same stage follows, whose rows are already in memory.
    """

    layers: tuple[Layer, ...]
    moments: dict[str, Moments]
    more: bool = False


# without torch.no_grad, which would keep a reference to each yielded value; the functions called here have it
def sum_moments(
    groups: Sequence[tuple[Layer, ...]],
    looked: Iterable[list[Rows | RoutedRows]] | InParts,
    stream: Stream,
    rare: Rare = "mean",
) -> Iterator[Observed]:
    """Yield groups of layers with the second moments of their inputs, summed over all batches.

        H = X_hat^T X_hat / tokens    C = X^T X_hat / tokens    lost = (X W^T + r - X_hat W^T - r_hat)^T X_hat / tokens

    Rows are scaled first where the stream has weights of positions, see `positions.py`. `lost` replaces C where that is
    less work, see `_lost_outputs`. Products are computed in float32 (float64 for float64 activations, see
    `cross_product`) batch by batch and summed exactly, see `ExactSum`. Extra windows do not enter these sums; about
    `EXTRA_TOKENS` of their rows, evenly spread, are kept separately as `ExtraRows`. With an original network to compare
    with, the moments of the last `HELD_OUT` of the fitted windows, at least one, are also returned separately.

    All experts of a block are one group. The rows of all batches are kept and the moments of one expert are summed at a
    time, so that the matrices of all experts are never in memory together.

    Args:
        groups: Groups of layers that share an input, or all experts of a block.
        looked: Rows of the input of each group, batch by batch.
        stream: The stream of these batches.
        rare: Treatment of experts that few tokens reach.

    Raises:
        CalibrationError: An input is not finite, or too few tokens reach an expert.
    """
    windows = stream.dealt.windows
    held = 0 if stream.original is None else min(windows - 1, max(1, round(HELD_OUT * windows)))
    new_sums = partial(_Sums, stream=stream, first_held=windows - held)
    if isinstance(looked, InParts):
        yield from looked.in_turn(groups[0], new_sums, rare)
        return
    sums, kept = dict(enumerate(map(new_sums, groups))), defaultdict[int, list[RoutedRows]](list)
    _take_in(looked, sums, kept)
    for index, group in enumerate(groups):  # drops each group's rows before other layers are solved
        if index in kept:
            with_unit = partial(new_sums, unit=unit_of_experts(group, kept[index][0]))
            yield from in_turn(group, kept.pop(index), with_unit, rare)
        else:
            yield sums.pop(index).observed()


@torch.no_grad()
def _take_in(
    looked: Iterable[list[Rows | RoutedRows]], sums: Mapping[int, _Sums], kept: Mapping[int, list[RoutedRows]]
) -> None:
    """Add the rows of all batches to the sums of each group; rows of experts are kept instead."""
    for batch, rows_by_group in enumerate(looked):
        for index, rows in enumerate(rows_by_group):
            if isinstance(rows, RoutedRows):
                kept[index].append(rows)
            else:
                sums[index].add(batch, rows)
            del rows
        del rows_by_group  # before the next batch runs


class _Totals(NamedTuple):
    """Sums over all fitted windows of all ranks, and over those of them that are held out."""

    all: MomentTotals
    held: MomentTotals


class _Sums:
    """Sums over the rows of layers that share an input, batch by batch.

    Args:
        group: The layers.
        stream: The stream of the batches.
        first_held: Index of the first held-out window.
        crossed: Whether C is summed in any case; None: whichever of C and `lost` is less work.
        unit: Unit of all sums; None: that of the first batch, which every rank has, see `unit_of`.
    """

    def __init__(
        self,
        group: tuple[Layer, ...],
        stream: Stream,
        *,
        first_held: int,
        crossed: bool | None = None,
        unit: Tensor | None = None,
    ) -> None:
        self.group, self.dealt = group, stream.dealt
        self._stream, self._first_held, self._crossed = stream, first_held, crossed
        self._fitted, self._held = MomentSums(unit=unit), MomentSums(unit=unit)
        self._extra = ExtraRows(sizes=[0] * stream.dealt.texts)
        self._alike, self._compared = 0, False
        self._factors: RowFactors | None = None  # known with the first batch, which every rank has

    @property
    def unit(self) -> Tensor | None:
        """Unit of all sums."""
        return self._fitted.unit

    @unit.setter
    def unit(self, unit: Tensor) -> None:
        self._fitted.unit = self._held.unit = unit

    @torch.no_grad()
    def add(self, batch: int, rows: Rows) -> None:
        """Add the rows of a batch; batches come in order."""
        dealt, size = self.dealt, self._stream.sizes[batch]
        if self._factors is None:
            weights = [self._stream.positions[each.name] for each in self.group if each.name in self._stream.positions]
            placed = weights and rows.token is None and len(rows.X_hat) % size == 0
            self._factors = RowFactors(weights, len(rows.X_hat) // size if placed else 0)
        rows = self._factors.scaled(rows, size)
        if self.unit is None:
            self.unit = unit_of(rows.X_hat)
        if batch == 0 and dealt.repeated:
            return
        if batch >= dealt.fitted:
            expected = len(rows.X_hat) * dealt.extra_windows // size  # of all extra windows
            some = slice(None, None, max(1, -(-expected // EXTRA_TOKENS)))
            source = dealt.sources[batch - dealt.fitted] if dealt.sources else 0
            self._extra.add(rows.X_hat[some], None if rows.X is None else rows.X[some], source)
            return
        cut = rows.before(Fraction(min(max(self._first_held - dealt.starts[batch], 0), size), size))
        outputs = {} if self._crossed else _lost_outputs(rows, self.group)
        crossed = len(outputs) < len(self.group)
        for sums, part in ((self._fitted, slice(0, cut)), (self._held, slice(cut, None))):
            lost = {name: difference[part] for name, difference in outputs.items()}
            sums.add(rows.X_hat[part], None if rows.X is None else rows.X[part], lost, crossed=crossed)
        if rows.token is not None:
            self._alike, self._compared = self._alike + rows.alike, rows.X is not None

    @torch.no_grad()
    def totals(self) -> _Totals:
        """Return the sums over the windows of all ranks; these sums are used up."""
        self._over_all_ranks()
        self._fitted.merge(self._held)
        return _Totals(self._fitted.totals(), self._held.totals())

    @torch.no_grad()
    def observed(self, *, blended: tuple[int, _Totals] | None = None) -> Observed:
        """Return the layers with their moments; these sums are used up.

        Args:
            blended: Number of tokens and sums over all experts; the sums are added with the weight of so many tokens.
        """
        totals, more = self.totals(), 0
        tokens = totals.all.tokens
        if blended is not None:
            borrowed, mean_totals = blended
            share = borrowed / max(1, mean_totals.all.tokens)
            for sums, others in zip(totals, mean_totals, strict=True):
                sums.blend(others, share)
            more = totals.all.tokens - tokens
        moments = self._moments(totals)
        if any(layer.routed for layer in self.group):
            alike = self._alike / max(1, tokens) if self._compared else None
            moments = {name: replace(each, alike=alike, blended=more) for name, each in moments.items()}
        return Observed(layers=self.group, moments=moments)

    def _over_all_ranks(self) -> None:
        """Replace these sums by those over the windows of all ranks.

        Raises:
            RankError: The ranks are at different layers, or their first batches differ.
        """
        ranks = self.dealt.ranks
        if ranks.world == 1:
            return
        names = [layer.name for layer in self.group]
        every = ranks.gather((names, self._alike, self._compared))
        if (other := next((rank for rank, each in enumerate(every) if each[0] != names), None)) is not None:
            raise RankError(
                f"Rank {ranks.rank} is at {', '.join(names)}, and rank {other} at {', '.join(every[other][0])}. All ranks need the "
                f"same model, versions and options."
            )
        self._alike, self._compared = sum(each[1] for each in every), any(each[2] for each in every)
        add_up(self._fitted, ranks)
        add_up(self._held, ranks)
        collect(self._extra, ranks, self.group[0].weight.device)

    def _moments(self, totals: _Totals) -> dict[str, Moments]:
        """Return {layer name: moments}."""
        everything, held = totals
        split = 0 < held.tokens < everything.tokens  # all tokens of an expert may lie in one of the two
        names = ", ".join(layer.name for layer in self.group)
        if not everything.tokens:
            raise unreached(names)
        means, extra = everything.means(), self._extra.together()
        held_means = held.means(held.dtype) if split else None
        checks = everything.checks
        for network, X in () if extra is None else (("quantized", extra.X_hat), ("original", extra.X)):
            if X is not None:
                finite = X.square().isfinite().all()[None]
                checks.append((network, finite, torch.ones_like(finite)))
        refuse_unusable(names, checks)
        exponents = () if self._factors is None else self._factors.exponents
        return {
            layer.name: replace(means.of(layer.name, held_means), extra=extra, positions=exponents)
            for layer in self.group
        }


def refuse_unusable(names: str, sums: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Check sums of layers.

    Args:
        names: Names of the layers.
        sums: Network, and (1,) whether all numbers are finite, and whether they are in the range of exact sums.

    Raises:
        CalibrationError: One is not.
    """
    flags = torch.cat([flag for _, *both in sums for flag in both]).tolist()  # a device is waited for once a stage
    for (network, *_), finite, fits in zip(sums, flags[::2], flags[1::2], strict=True):
        if not finite:
            raise CalibrationError(
                f"The input of {names} contains NaN or Inf in the {network} network, or its square overflows. Check "
                f"the model's weights, or use --compute-dtype float32."
            )
        if not fits:
            raise CalibrationError(
                f"Inputs of {names} in the {network} network grow far beyond those of the first window: the largest "
                f"sum of squares in a batch, times the number of batches, exceeds 2^38 times that of the first window, or "
                f"there are more than 2^21 batches. "
                f"Check the model's weights, put other text first, or use fewer --samples."
            )


def _lost_outputs(rows: Rows, group: tuple[Layer, ...]) -> dict[str, Tensor]:
    """Return (tokens, out) `W x + r - W x_hat - r_hat` of the layers whose `lost` is summed directly, not through C.

    For a layer alone this needs fewer products; for a layer whose output is added to a residual stream r, the sum also
    includes the error of r. None of the layers is quantized yet.
    """
    if rows.X is None:
        return {}
    alone = len(group) == 1 and group[0].shape[0] <= group[0].shape[1]
    dtype = sum_dtype(rows.X, rows.X_hat)  # 16 bits do not hold a difference
    difference = rows.X.to(dtype) - rows.X_hat.to(dtype)
    with repeatable_threads(difference):
        outputs = {
            layer.name: wide_product(difference, layer.matrix().detach().contiguous().T)
            for layer in group
            if layer.adds or alone
        }
    for name, residual in rows.residual.items():
        outputs[name] += residual
    return outputs


def shared_inputs(observed: Observed) -> Iterator[LayerInput]:
    """Yield the input of each layer, which share the factors of one Hessian."""
    shared: SharedInput | None = None
    for layer in observed.layers:
        moments = observed.moments.get(layer.name)
        if moments is None:
            yield LayerInput.of(torch.eye(layer.shape[1], dtype=torch.float64, device=layer.read().device))
        else:
            each = LayerInput.of(moments, shared)
            shared = each.shared
            yield each
