"""The second moments of what layers see: rows that `models/calibrate.py` hands out, summed by `lattice/moments.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from nearplane.errors import CalibrationError
from nearplane.lattice.moments import ExtraRows, Moments, MomentSums
from nearplane.matrix.inputs import Inputs
from nearplane.models.activations import Stream
from nearplane.models.calibrate import seen, unreached
from nearplane.models.experts import ExpertLayer
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.models.rows import RoutedRows, Rows
from nearplane.parallel import sum_, world
from nearplane.tokens import EXTRA_TOKENS

HELD_OUT = 0.2  # of the windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Layers with the same input, bound to the quantized block, and the moments of that input.

    Args:
        layers: in module order.
        moments: by layer name; H and C are the same tensors for all, `lost` is each layer's own.
        repeated: (block, reason) if not every forward of the block is run once, see `models/staged.py`.
    """

    layers: tuple[Layer, ...]
    moments: dict[str, Moments]
    repeated: tuple[tuple[str, str], ...] = ()


@torch.no_grad()
def observe(
    block: Block,
    groups: Sequence[tuple[Layer, ...]],
    stream: Stream,
    *,
    correct: bool,
    held_out: float = HELD_OUT,
    root: bool = False,
    residual: bool = True,
    last: bool = False,
    extra_rows: int | None = EXTRA_TOKENS,
) -> list[Observed]:
    """Sum the second moments of the inputs of some groups of layers, as the block is now.

    This is a pass of its own; see `seen` for `last`, and `summed` for the sums.

    Args:
        block: in memory, with its original if `correct`.
        groups: from `stages`; often one of them.
        stream: standing before the block.
        correct: whether to compare with the original network: C, `lost` and held-out moments.
        held_out, root, extra_rows: see `summed`.
        residual: whether what layers' outputs are added to counts as well.
        last: no other groups of this block follow: the original stream moves on to the next block in the same pass.

    Raises:
        CalibrationError: as `summed`, or a layer sees different tokens in the two networks.
    """
    looked = seen(block, groups, stream, correct=correct, residual=residual, last=last)
    return [*summed(groups, looked, stream, correct=correct, held_out=held_out, root=root, extra_rows=extra_rows)]


@torch.no_grad()
def summed(
    groups: Sequence[tuple[Layer, ...]],
    looked: Iterable[list[Rows | RoutedRows]],
    stream: Stream,
    *,
    correct: bool,
    held_out: float = HELD_OUT,
    root: bool = False,
    extra_rows: int | None = EXTRA_TOKENS,
) -> Iterator[Observed]:
    """Yield some groups of layers with the second moments of their inputs, summed over all batches.

        H = X_hat^T X_hat / tokens        C = X^T X_hat / tokens        lost = (X W^T + r - X_hat W^T - r_hat)^T X_hat / tokens

    `lost` takes the place of C where that is less work, see `_direct`. Products are taken in float32 (float64 if the activations
    are) batch by batch and summed in float64. A root of H is not made from them: it is the R of a QR decomposition of X_hat in
    float64, to which rows are added as they come. Extra windows enter none of this; some of their rows are given apart: `Extra`.

    Of experts, which come in one group, the rows of all batches are kept, and the moments of each are summed when its turn comes:
    as many matrices as there are experts never live at once.

    Args:
        groups: of layers that share an input, or of all experts of a block.
        looked: of every batch, its rows of the input of each group.
        stream: that the batches are of.
        correct: whether rows of the original network are among them.
        held_out: fraction of the windows, the last ones, whose moments are also given apart; at least one window.
        root: whether to decompose the quantized network's inputs besides: about four times what summing H takes.
        extra_rows: of the extra windows that are kept at most, evenly spread; None: all.

    Raises:
        CalibrationError: an input is not finite, or roots or extra windows are asked for on several ranks.
    """
    if root and world() > 1:
        raise CalibrationError(f"--factor qr runs on one rank, and this run has {world()}: start one, or leave it out.")
    if stream.fitted < len(stream.sizes) and world() > 1:
        raise CalibrationError(f"Extra windows are measured on one rank, and this run has {world()}.")
    windows = sum(stream.sizes[: stream.fitted])
    split = correct and held_out > 0 and windows > 1
    first_held = windows - min(windows - 1, max(1, round(held_out * windows))) if split else windows
    sums = [_Sums(group, stream, first_held, root, extra_rows) for group in groups]
    kept: list[list[RoutedRows]] = [[] for _ in groups]
    for batch, shown in zip(range(len(stream.sizes)), looked, strict=True):
        for index, rows in enumerate(shown):
            if isinstance(rows, RoutedRows):
                kept[index].append(rows)
            else:
                sums[index].add(batch, rows)
    for group, all_rows in zip(groups, kept, strict=True):
        whole = sums.pop(0)
        if not all_rows:
            yield whole.observed(split)
        for expert, layers in by_expert(group).items() if all_rows else ():
            own = _Sums(layers, stream, first_held, root, extra_rows)
            for batch, routed in enumerate(all_rows):
                own.add(batch, routed.of(expert))
            yield own.observed(split)
            del own
        del whole


def by_expert(group: Sequence[Layer]) -> dict[int, tuple[Layer, ...]]:
    """Return the layers of each expert in a group, in the order in which they come."""
    found: dict[int, list[Layer]] = {}
    for layer in group:
        assert isinstance(layer, ExpertLayer), "experts are shown apart from other layers"
        found.setdefault(layer.expert, []).append(layer)
    return {expert: tuple(layers) for expert, layers in found.items()}


class _Sums:
    """Sums over the rows of layers that share an input, batch by batch.

    Args:
        group: the layers.
        stream: that the batches are of.
        first_held: the first window that is held out.
        root, extra_rows: see `summed`.
    """

    def __init__(
        self, group: tuple[Layer, ...], stream: Stream, first_held: int, root: bool, extra_rows: int | None
    ) -> None:
        self.group, self._stream, self._first_held, self._most = group, stream, first_held, extra_rows
        self._fitted, self._held, self._extra = MomentSums(rooted=root), MomentSums(rooted=root), ExtraRows()

    def add(self, batch: int, rows: Rows) -> None:
        """Add what a batch showed; batches come in order."""
        stream, size = self._stream, self._stream.sizes[batch]
        if batch >= stream.fitted:
            expected = len(rows.X_hat) * sum(stream.sizes[stream.fitted :]) // size  # of all extra windows
            some = slice(None, None, max(1, -(-expected // (self._most or expected or 1))))
            self._extra.add(rows.X_hat[some], None if rows.X is None else rows.X[some])
            return
        before = sum(stream.sizes[:batch])
        cut = rows.before(Fraction(min(max(self._first_held - before, 0), size), size))
        outputs = _lost_outputs(rows, self.group)
        crossed = len(outputs) < len(self.group)
        for sums, part in ((self._fitted, slice(0, cut)), (self._held, slice(cut, None))):
            lost = {name: difference[part] for name, difference in outputs.items()}
            sums.add(rows.X_hat[part], None if rows.X is None else rows.X[part], lost, crossed=crossed)

    def observed(self, split: bool) -> Observed:
        """Return the layers with what was summed, which is not summed on."""
        return _observed(self.group, self._fitted, self._held, self._extra, split)


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


def _observed(group: tuple[Layer, ...], fitted: MomentSums, held: MomentSums, rows: ExtraRows, split: bool) -> Observed:
    split = split and fitted.tokens > 0 and held.tokens > 0  # an expert may be reached by the ones or the others alone
    fitting_root = fitted.triangle() if split else None
    fitted.absorb(held)
    total, apart, extra = fitted.means(sum_), held.means(sum_, held.dtype) if split else None, rows.together()
    names = ", ".join(layer.name for layer in group)
    if not total.tokens:
        raise unreached(names)
    sums = (
        ("quantized", total.H),
        ("quantized", None if extra is None else extra.X_hat.square()),
        ("original", total.C),
        ("original", None if extra is None or extra.X is None else extra.X.square()),
    )
    for which, tensor in (*sums, *(("original", lost) for lost in total.lost.values())):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise CalibrationError(
                f"The input of {names} holds NaN or Inf (in the {which} network, or its square overflows). "
                f"Check the checkpoint, or compute in a wider dtype."
            )
    moments = {layer.name: replace(total.of(layer.name, apart, fitting_root), extra=extra) for layer in group}
    return Observed(layers=group, moments=moments)


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
