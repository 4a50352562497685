"""The second moments of what layers see: rows that `calibration/stages.py` hands out, summed by `lattice/moments.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream
from nearplane.calibration.stages import seen, unreached
from nearplane.calibration.watch import ExpertRows, InParts, RoutedRows, Rows
from nearplane.calibration.windows import EXTRA_TOKENS
from nearplane.errors import CalibrationError
from nearplane.lattice.moments import ExtraRows, Moments, MomentSums
from nearplane.matrix.inputs import Inputs
from nearplane.models.experts import by_expert
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.recipe.recipe import Rare
from nearplane.record.words import ADVISED, LEAST
from nearplane.system.ranks import ALONE

HELD_OUT = 0.2  # of the windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Layers with the same input, bound to the quantized block, and the moments of that input.

    Args:
        layers: in module order.
        moments: by layer name; H and C are the same tensors for all, `lost` is each layer's own.
        more: whether they are an expert of a stage of which another follows that is known already.
    """

    layers: tuple[Layer, ...]
    moments: dict[str, Moments]
    more: bool = False


@torch.no_grad()
def observe(
    block: Block, groups: Sequence[tuple[Layer, ...]], stream: Stream, *, last: bool = False, onward: bool = False
) -> list[Observed]:
    """Sum the second moments of the inputs of some groups of layers, as the block is now.

    This is a pass of its own; see `seen` for `last` and `onward`, and `summed` for the sums.

    Args:
        block: in memory, with its original if the stream has two streams.
        groups: from `stages`; often one of them.
        stream: standing before the block.
        last, onward: whether the streams move on in the same pass.

    Raises:
        CalibrationError: as `summed`, or a layer sees different tokens in the two networks.
    """
    return [*summed(groups, seen(block, groups, stream, last=last, onward=onward), stream)]


# not under torch.no_grad, which would hold what a generator yields until it is asked for more; what it calls is under it
def summed(
    groups: Sequence[tuple[Layer, ...]],
    looked: Iterable[list[Rows | RoutedRows]] | InParts,
    stream: Stream,
    rare: Rare = "mean",
) -> Iterator[Observed]:
    """Yield some groups of layers with the second moments of their inputs, summed over all batches.

        H = X_hat^T X_hat / tokens        C = X^T X_hat / tokens        lost = (X W^T + r - X_hat W^T - r_hat)^T X_hat / tokens

    `lost` takes the place of C where that is less work, see `_lost_outputs`. Products are taken in float32 (float64 if the
    activations are) batch by batch and summed in float64. Extra windows enter none of this; about `EXTRA_TOKENS` of their rows,
    evenly spread, are given apart: `Extra`; so are, where there is the original network to compare with, the moments of the
    last `HELD_OUT` of the windows, at least one.

    Of experts, which come in one group, the rows of all batches are kept, and the moments of each are summed when its turn comes:
    as many matrices as there are experts never live at once.

    Args:
        groups: of layers that share an input, or of all experts of a block.
        looked: of every batch, its rows of the input of each group.
        stream: that the batches are of.
        rare: what becomes of experts that few tokens reach.

    Raises:
        CalibrationError: an input is not finite, extra windows are asked for on several ranks, or too few tokens reach an expert.
    """
    if stream.fitted < len(stream.sizes) and ALONE.world > 1:
        raise CalibrationError(f"Extra windows are measured on one rank, and this run has {ALONE.world}.")
    windows = sum(stream.sizes[: stream.fitted])
    split = stream.original is not None and windows > 1
    first_held = windows - min(windows - 1, max(1, round(HELD_OUT * windows))) if split else windows
    made = partial(_Sums, stream=stream, first_held=first_held)
    if isinstance(looked, InParts):
        whole = made(groups[0], crossed=True).summed_over_experts(looked.shown(groups[0], last=False))
        for part in looked.parts:
            last = part is looked.parts[-1]  # rows are an argument alone: two parts would be in memory at once
            yield from _in_turn(part, list(looked.shown(part, last=last)), made, split, rare, whole)
        return
    sums, kept = {index: made(group) for index, group in enumerate(groups)}, defaultdict[int, list[RoutedRows]](list)
    _take_in(looked, sums, kept)
    for index, group in enumerate(groups):  # nothing of one is held here while the layers of another are solved
        if index in kept:
            yield from _in_turn(group, kept.pop(index), made, split, rare)
        else:
            yield sums.pop(index).observed(split)


@torch.no_grad()
def _take_in(
    looked: Iterable[list[Rows | RoutedRows]], sums: Mapping[int, _Sums], kept: Mapping[int, list[RoutedRows]]
) -> None:
    """Add what all batches show to the sums of each group; the rows of experts are kept instead."""
    for batch, every in enumerate(looked):
        for index, rows in enumerate(every):
            if isinstance(rows, RoutedRows):
                kept[index].append(rows)
            else:
                sums[index].add(batch, rows)


def _in_turn(
    group: tuple[Layer, ...],
    shown: list[RoutedRows],
    made: Callable[..., _Sums],
    split: bool,
    rare: Rare,
    known: _Sums | None = None,
) -> Iterator[Observed]:
    """Yield the layers of one expert after the other, each with the moments of the tokens that reach it.

    One that fewer tokens reach than `LEAST` for every input has the mean over all experts besides, as if so many more
    tokens were like those of the others: `H = (n H_own + m H_mean) / (n + m)`, n its tokens, n + m the least number.

    Args:
        group: layers of experts.
        shown: what each batch shows of them.
        made: makes sums of some layers.
        split, rare: see `summed`.
        known: sums over the rows of all experts; None: `group` is all of them.

    Raises:
        CalibrationError: there is such an expert, and `rare` is "error".
    """
    fitted, inputs, experts = shown[: made(group).fitted], group[0].shape[1], by_expert(group)
    whole = [] if known is None else [known]  # once there is need of it

    def formed(expert: int, layers: tuple[Layer, ...]) -> Observed:
        tokens = sum(rows.quantized.count(expert) for rows in fitted)
        wanted = max(0, LEAST * inputs - tokens)
        if tokens < ADVISED * inputs and rare == "error":
            raise CalibrationError(too_rare(layers[0].name, tokens, inputs))
        if wanted and not whole:
            whole.append(made(group, crossed=True).summed_over_experts(fitted))
        own = made(layers, crossed=True if wanted else None).summed(rows.of(expert) for rows in shown)
        return own.observed(split, blended=(wanted, whole[0]) if wanted else None)

    for number, (expert, layers) in enumerate(experts.items(), 1):
        yield replace(formed(expert, layers), more=number < len(experts))


def too_rare(name: str, tokens: int, inputs: int) -> str:
    """Return the sentence for an expert that too few tokens reach."""
    more = ""
    if tokens:
        more = f" About {math.ceil(ADVISED * inputs / tokens)} times the --samples would give it as many."
    return (
        f"{tokens:,} calibration tokens reach {name}, fewer than {ADVISED} for each of its {inputs:,} inputs.{more} Ask for more "
        f"--samples, pass text like what the model is for, or take --rare-experts mean, which fills up with the mean over the "
        f"experts of the block."
    )


class _Sums:
    """Sums over the rows of layers that share an input, batch by batch.

    Args:
        group: the layers.
        stream: that the batches are of.
        first_held: the first window that is held out.
        crossed: whether C is summed whatever the layers; None: as is less work.
    """

    def __init__(
        self, group: tuple[Layer, ...], stream: Stream, *, first_held: int, crossed: bool | None = None
    ) -> None:
        self.group, self.fitted = group, stream.fitted
        self._stream, self._first_held, self._crossed = stream, first_held, crossed
        self._fitted, self._held, self._extra = MomentSums(), MomentSums(), ExtraRows()
        self._alike, self._compared = 0, False

    @torch.no_grad()
    def add(self, batch: int, rows: Rows) -> None:
        """Add what a batch showed; batches come in order."""
        stream, size = self._stream, self._stream.sizes[batch]
        if batch >= stream.fitted:
            expected = len(rows.X_hat) * sum(stream.sizes[stream.fitted :]) // size  # of all extra windows
            some = slice(None, None, max(1, -(-expected // EXTRA_TOKENS)))
            self._extra.add(rows.X_hat[some], None if rows.X is None else rows.X[some])
            return
        before = sum(stream.sizes[:batch])
        cut = rows.before(Fraction(min(max(self._first_held - before, 0), size), size))
        outputs = {} if self._crossed else _lost_outputs(rows, self.group)
        crossed = len(outputs) < len(self.group)
        for sums, part in ((self._fitted, slice(0, cut)), (self._held, slice(cut, None))):
            lost = {name: difference[part] for name, difference in outputs.items()}
            sums.add(rows.X_hat[part], None if rows.X is None else rows.X[part], lost, crossed=crossed)
        if isinstance(rows, ExpertRows):
            self._alike, self._compared = self._alike + rows.alike, rows.X is not None

    @torch.no_grad()
    def summed(self, shown: Iterable[Rows]) -> _Sums:
        """Add what all batches showed."""
        for batch, rows in enumerate(shown):
            self.add(batch, rows)
        return self

    @torch.no_grad()
    def summed_over_experts(self, shown: Iterable[RoutedRows]) -> _Sums:
        """Add what batches showed of every expert of the group; nothing of extra windows."""
        for batch, rows in enumerate(shown):
            for expert in by_expert(self.group) if batch < self.fitted else ():
                self.add(batch, rows.of(expert))
        return self

    @torch.no_grad()
    def observed(self, split: bool, *, blended: tuple[int, _Sums] | None = None) -> Observed:
        """Return the layers with what was summed, which is not summed on.

        Args:
            split: whether moments of the held-out windows are given apart.
            blended: tokens and sums, of which as much is added as stands for so many tokens.
        """
        tokens, more = self._fitted.tokens + self._held.tokens, 0
        if blended is not None:
            wanted, whole = blended
            share = wanted / max(1, whole._fitted.tokens + whole._held.tokens)
            self._fitted.blend(whole._fitted, share)
            self._held.blend(whole._held, share)
            more = self._fitted.tokens + self._held.tokens - tokens
        moments = self._moments(split)
        if any(layer.routed for layer in self.group):
            alike = self._alike / max(1, tokens) if self._compared else None
            moments = {name: replace(each, alike=alike, blended=more) for name, each in moments.items()}
        return Observed(layers=self.group, moments=moments)

    def _moments(self, split: bool) -> dict[str, Moments]:
        """Return what was summed, by layer name."""
        fitted, held = self._fitted, self._held
        split = (
            split and fitted.tokens > 0 and held.tokens > 0
        )  # an expert may be reached by the ones or the others alone
        fitted.absorb(held)
        total, extra = fitted.means(ALONE.sum_exactly), self._extra.together()
        apart = held.means(ALONE.sum_exactly, held.dtype) if split else None
        names = ", ".join(layer.name for layer in self.group)
        if not total.tokens:
            raise unreached(names)
        quantized, original = [total.H], [total.C, *total.lost.values()]
        if extra is not None:
            quantized.append(extra.X_hat.square())
            original.append(None if extra.X is None else extra.X.square())
        for which, tensors in (("quantized", quantized), ("original", original)):
            if not all(tensor is None or torch.isfinite(tensor).all() for tensor in tensors):
                raise CalibrationError(
                    f"The input of {names} holds NaN or Inf (in the {which} network, or its square overflows). "
                    f"Check the checkpoint, or compute in a wider dtype."
                )
        return {layer.name: replace(total.of(layer.name, apart), extra=extra) for layer in self.group}


def _lost_outputs(rows: Rows, group: tuple[Layer, ...]) -> dict[str, Tensor]:
    """Return (tokens, out) `W x + r - W x_hat - r_hat` for the layers whose loss is summed as such, not by C.

    That is fewer products for a layer by itself; and where a layer adds to a residual stream r, what that has lost is in the same
    sum. None of them is quantized yet.
    """
    if rows.X is None:
        return {}
    alone = len(group) == 1 and group[0].shape[0] <= group[0].shape[1]
    apart = rows.X - rows.X_hat
    outputs = {layer.name: apart @ layer.read().to(apart.dtype).T for layer in group if layer.adds or alone}
    for name, residual in rows.residual.items():
        outputs[name] += residual
    return outputs


def shared_inputs(observed: Observed) -> Iterator[Inputs]:
    """Yield the inputs of each layer: factors are made once for all of them."""
    shared: Inputs | None = None
    for layer in observed.layers:
        moments = observed.moments.get(layer.name)
        if moments is None:
            shared = Inputs(torch.eye(layer.shape[1], dtype=torch.float64, device=layer.read().device))
        else:
            shared = shared.of(moments) if shared else Inputs(moments)
        yield shared
