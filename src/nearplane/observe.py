"""The second moments of what layers see: rows that `models/calibrate.py` hands out, summed by `lattice/moments.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nearplane.errors import CalibrationError
from nearplane.lattice.moments import ExtraSums, Moments, MomentSums
from nearplane.matrix.inputs import Inputs
from nearplane.models.activations import Stream
from nearplane.models.calibrate import Rows, seen, unreached
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.parallel import sum_, world

HELD_OUT = 0.2  # of the windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Layers with the same input, bound to the quantized block, and the moments of that input.

    Args:
        layers: in module order.
        moments: by layer name; H and C are the same tensors for all, S is each layer's own.
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
) -> list[Observed]:
    """Sum the second moments of the inputs of some groups of layers, as the block is now.

    This is a pass of its own; see `seen` for `last`, and `summed` for the sums.

    Args:
        block: in memory, with its original if `correct`.
        groups: from `stages`; often one of them.
        stream: standing before the block.
        correct: whether to compare with the original network: C, S and held-out moments.
        held_out, root: see `summed`.
        residual: whether to form S for layers whose output is added to a residual stream.
        last: no other groups of this block follow: the original stream moves on to the next block in the same pass.

    Raises:
        CalibrationError: as `summed`, or a layer sees different tokens in the two networks.
    """
    looked = seen(block, groups, stream, correct=correct, residual=residual, last=last)
    return summed(groups, looked, stream, correct=correct, held_out=held_out, root=root)


@torch.no_grad()
def summed(
    groups: Sequence[tuple[Layer, ...]],
    looked: Iterable[list[Rows]],
    stream: Stream,
    *,
    correct: bool,
    held_out: float = HELD_OUT,
    root: bool = False,
) -> list[Observed]:
    """Sum the second moments of the inputs of some groups of layers over all batches.

        H = X_hat^T X_hat / tokens        C = X^T X_hat / tokens        S = (r - r_hat)^T X_hat / tokens

    Products are taken in float32 (float64 if the activations are) batch by batch and summed in float64. A root of H is
    not made from them: it is the R of a QR decomposition of X_hat in float64, to which rows are added as they come. Extra windows
    enter none of this; their moments are given apart, see `Extra`.

    Args:
        groups: of layers that share an input.
        looked: of every batch, its rows of the input of each group.
        stream: that the batches are of.
        correct: whether rows of the original network are among them.
        held_out: fraction of the windows, the last ones, whose moments are also given apart; at least one window.
        root: whether to decompose the quantized network's inputs besides: about four times what summing H takes.

    Raises:
        CalibrationError: an input is not finite, or roots are asked for on several ranks.
    """
    if root and world() > 1:
        raise CalibrationError(f"--factor qr runs on one rank, and this run has {world()}: start one, or leave it out.")
    windows = sum(stream.sizes[: stream.fitted])
    split = correct and held_out > 0 and windows > 1
    first_held = windows - min(windows - 1, max(1, round(held_out * windows))) if split else windows
    fitted, held = [[MomentSums(rooted=root) for _ in groups] for _ in range(2)]
    extra = [ExtraSums() for _ in groups]
    before = 0  # windows of earlier batches
    for batch, (size, shown) in enumerate(zip(stream.sizes, looked, strict=True)):
        for index, rows in enumerate(shown):
            if batch >= stream.fitted:
                extra[index].add(rows.X_hat, rows.X)
                continue
            cut = len(rows.X_hat) * min(max(first_held - before, 0), size) // size
            for sums, part in ((fitted[index], slice(0, cut)), (held[index], slice(cut, None))):
                residuals = {name: difference[part] for name, difference in rows.residual.items()}
                sums.add(rows.X_hat[part], None if rows.X is None else rows.X[part], residuals)
        before += size
    return [_observed(*of, split) for of in zip(groups, fitted, held, extra, strict=True)]


def _observed(
    group: tuple[Layer, ...], fitted: MomentSums, held: MomentSums, beside: ExtraSums, split: bool
) -> Observed:
    split = split and fitted.tokens > 0 and held.tokens > 0  # an expert may be reached by the ones or the others alone
    fitting_root = fitted.triangle() if split else None
    fitted.absorb(held)
    total, apart, extra = fitted.means(sum_), held.means(sum_) if split else None, beside.means(sum_)
    names = ", ".join(layer.name for layer in group)
    if not total.tokens:
        raise unreached(names)
    sums = (
        ("quantized", total.H),
        ("quantized", None if extra is None else extra.H),
        ("original", total.C),
        ("original", None if extra is None else extra.Q),
    )
    for which, tensor in (*sums, *(("original", S) for S in total.S.values())):
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
