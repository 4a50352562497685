"""What the layers of a network see: activations pass through one block at a time, second moments are summed on the way.

Two streams run side by side, of the original and of the quantized network. With four stages in a block (q/k/v, o,
gate/up, down) each stage needs a pass of both; every pass stops as soon as it has seen what it is for, and the original
stream's last pass is also its way to the next block. In multiplications by weights that is 4.33 forwards of a Llama
block (attention a third of the weights): 0 + 1/3 + 1/3 + 1 for each stream and 1 for the quantized stream's way on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nearplane.errors import CalibrationError
from nearplane.lattice.root import TALL, append, combine
from nearplane.models.layers import Layer
from nearplane.models.skeleton import Call, Stream, finite, skeleton
from nearplane.models.statistics import Extra, Statistics
from nearplane.models.stream import Block
from nearplane.models.watch import Additions, Hooks, Stop, until_stopped, wide
from nearplane.parallel import sum_, world

__all__ = ["Observed", "Stream", "observe", "skeleton", "stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Layers with the same input, bound to the quantized block, and what calibration saw of it.

    Args:
        layers: in module order.
        statistics: by layer name; H and C are the same tensors for all, S is each layer's own.
    """

    layers: tuple[Layer, ...]
    statistics: dict[str, Statistics]


@torch.no_grad()
def stages(block: Block, stream: Stream) -> list[tuple[Layer, ...]]:
    """Group the layers of a block by the input that they share, in the order they run: q/k/v, then o, gate/up, down.

    One batch is run through the block; inputs are the same if they are the same memory, unchanged in between.

    Raises:
        CalibrationError: layers did not run; the message names them.
    """
    layers = block.quantized_layers()
    inputs: dict[str, list[tuple[Any, ...]]] = {}
    held: list[Tensor] = []  # while they live, no other tensor takes their memory
    additions = Additions()

    def entering(layer: Layer, x: Tensor) -> None:
        inputs.setdefault(layer.name, []).append(_identity(layer, x))
        held.append(x)

    with additions, Hooks() as hooks:
        for layer in layers:
            hooks.before(layer, entering)
            hooks.after(layer, additions.watch)
        stream.forward(block, block.quantized, 0, stream.quantized[0])
        additions.finish()
    if unseen := [layer.name for layer in layers if layer.name not in inputs]:
        raise _unreached(", ".join(unseen))
    known = {
        layer.name: replace(
            layer, calls=len(inputs[layer.name]), adds=layer.name in additions.found and len(inputs[layer.name]) == 1
        )
        for layer in layers
    }
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for name, seen in inputs.items():
        groups.setdefault(tuple(seen), []).append(known[name])
    return [tuple(group) for group in groups.values()]


@torch.no_grad()
def observe(
    block: Block,
    groups: Sequence[tuple[Layer, ...]],
    stream: Stream,
    *,
    correct: bool,
    held_out: float = 0.2,
    residual: bool = True,
    root: bool = False,
    last: bool = False,
) -> list[Observed]:
    """Sum the second moments of the inputs of some groups of layers, as the block is now.

        H = X_hat^T X_hat / tokens        C = X^T X_hat / tokens        S = (r - r_hat)^T X_hat / tokens

    Products are taken in float32 (float64 if the activations are) batch by batch and summed in float64. A root of H is
    not made from them: it is the R of a QR decomposition of X_hat in float64, to which rows are added as they come. Extra windows
    enter none of this; their moments are given apart, see `Extra`.

    Args:
        block: in memory, with its original if `correct`.
        groups: from `stages`; often one of them.
        stream: standing before the block.
        correct: whether to compare with the original network: C, S and held-out moments.
        held_out: fraction of the windows, the last ones, whose moments are also given apart; at least one window.
        residual: whether to form S for layers whose output is added to a residual stream.
        root: whether to decompose the quantized network's inputs besides: about four times what summing H takes.
        last: no other groups of this block follow: the original stream moves on to the next block in the same pass.

    Raises:
        CalibrationError: an input is not finite, a layer sees different tokens in the two networks, or roots are asked
            for on several ranks.
    """
    assert not correct or (stream.original is not None and not stream.ahead), "correction needs the original stream"
    if root and world() > 1:
        raise CalibrationError(f"--factor qr runs on one rank, and this run has {world()}: start one, or leave it out.")
    windows = sum(stream.sizes[: stream.fitted])
    split = correct and held_out > 0 and windows > 1
    first_held = windows - min(windows - 1, max(1, round(held_out * windows))) if split else windows
    fitted, held = [[_Moments(rooted=root) for _ in groups] for _ in range(2)]
    extra = [_Beside() for _ in groups]
    look = _Look(block, groups, stream, residual=correct and residual)
    before = 0  # windows of earlier batches
    for batch, size in enumerate(stream.sizes):
        original = None
        if correct:
            original, output = look(block.original, batch, stream.original[batch], to_the_end=last)
            if last:
                stream.original[batch] = finite(output, block)
        quantized, _ = look(block.quantized, batch, stream.quantized[batch])
        for index, seen in enumerate(quantized):
            pair = None if original is None else original[index]
            if pair is not None and pair.tokens != seen.tokens:
                raise CalibrationError(
                    f"{groups[index][0].name} sees {pair.tokens} tokens in the original network and {seen.tokens} in "
                    f"the quantized one (routed experts do): leave it out with --ignore, or do without correction."
                )
            if batch >= stream.fitted:
                extra[index].add(seen, pair)
                continue
            cut = seen.tokens * min(max(first_held - before, 0), size) // size
            fitted[index].add(seen, pair, slice(0, cut))
            held[index].add(seen, pair, slice(cut, seen.tokens))
        before += size
    stream.ahead = correct and last
    return [_observed(*of, split) for of in zip(groups, fitted, held, extra, strict=True)]


def observe_head(block: Block, stream: Stream | None, *, correct: bool, root: bool = False) -> Observed:
    """Sum the second moments of the head's inputs; see `observe`.

    Args:
        block: the head, in memory.
        stream: from `finish`; None: nothing is measured.
        correct: whether to compare with the original network.
        root: whether to decompose the inputs besides.
    """
    head = tuple(block.quantized_layers())
    if stream is None:
        return Observed(layers=head, statistics={})
    stream.calls[block.name] = [Call(args=(), kwargs={}, positional=True) for _ in stream.sizes]
    block.original = block.quantized  # only looked into; both stop before they multiply
    return observe(block, [head], stream, correct=correct, residual=False, root=root)[0]


def _observed(group: tuple[Layer, ...], fitted: _Moments, held: _Moments, beside: _Beside, split: bool) -> Observed:
    split = split and fitted.tokens > 0 and held.tokens > 0  # an expert may be reached by the ones or the others alone
    fitting_root = fitted.triangle() if split else None
    fitted.absorb(held)
    total, held, extra = fitted.summed(), held.summed() if split else None, beside.summed()
    names = ", ".join(layer.name for layer in group)
    if not total.tokens:
        raise _unreached(names)
    sums = (
        ("quantized", total.H),
        ("quantized", extra and extra.H),
        ("original", total.C),
        ("original", extra and extra.Q),
    )
    for which, tensor in (*sums, *(("original", S) for S in total.S.values())):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise CalibrationError(
                f"The input of {names} holds NaN or Inf (in the {which} network, or its square overflows). "
                f"Check the checkpoint, or compute in a wider dtype."
            )
    statistics = {layer.name: replace(total.of(layer.name, held, fitting_root), extra=extra) for layer in group}
    return Observed(layers=group, statistics=statistics)


@dataclass(slots=True)
class _Seen:
    """What one pass saw of one group: rows of its input, and what is added to the outputs of its layers."""

    rows: list[Tensor] = field(default_factory=list)  # (tokens, in) each
    added: dict[str, Tensor] = field(default_factory=dict)  # layer name: (tokens, out)

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self.rows)

    @property
    def stacked(self) -> Tensor:
        return self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)


@dataclass(slots=True)
class _Moments:
    """Sums, not yet divided by tokens; if `rooted` the root of H as well, with the rows that it has not taken in yet.

    `alive` counts the tokens of the original network at which an input was not 0.
    """

    H: Tensor | None = None
    alive: Tensor | None = None
    C: Tensor | None = None
    S: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    rooted: bool = False
    R: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)  # (rows, in) each

    def add(self, quantized: _Seen, original: _Seen | None, part: slice) -> None:
        """Add some rows of a batch."""
        if part.start == part.stop:
            return
        X_hat = quantized.stacked[part]
        self.tokens += len(X_hat)
        self.H = _plus(self.H, X_hat.T @ X_hat)
        if self.rooted:
            self.waiting.append(X_hat)
            if sum(map(len, self.waiting)) >= TALL * X_hat.shape[1]:
                self.triangle()
        if original is not None:
            X = original.stacked[part]
            self.C = _plus(self.C, X.T @ X_hat)
            self.alive = _plus(self.alive, X.count_nonzero(0))
            for name, r_hat in quantized.added.items():
                self.S[name] = _plus(self.S.get(name), (original.added[name] - r_hat)[part].T @ X_hat)

    def triangle(self) -> Tensor | None:
        """Return the root of all rows so far, after taking in those that wait for a block worth its decomposition."""
        if self.waiting:
            rows, self.waiting = self.waiting, []
            self.R = append(self.R, torch.cat(rows))
        return self.R

    def absorb(self, other: _Moments) -> None:
        """Add other sums to these, in place; the other root is handed over."""
        R, other.R = other.triangle(), None
        if R is not None:
            self.R = R if self.triangle() is None else combine(self.triangle(), R)
        self.H, self.C, self.alive = (
            self._sum(*pair) for pair in ((self.H, other.H), (self.C, other.C), (self.alive, other.alive))
        )
        self.S = {name: self._sum(self.S.get(name), other.S.get(name)) for name in self.S | other.S}
        self.tokens += other.tokens

    @staticmethod
    def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is b is None else b.clone() if a is None else a if b is None else a.add_(b)

    def summed(self) -> _Moments:
        """Return the means over the tokens of all ranks, in the memory of the sums."""
        tokens = int(sum_(torch.tensor(self.tokens)))

        def mean(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else sum_(tensor).div_(tokens)

        S = {name: mean(S) for name, S in self.S.items()}
        alive = mean(self.alive)
        return _Moments(H=mean(self.H), alive=alive, C=mean(self.C), S=S, tokens=tokens, R=self.triangle())

    def of(self, name: str, held: _Moments | None, fitting_root: Tensor | None = None) -> Statistics:
        """Return what is known of one layer."""
        apart = None if held is None else held.of(name, None)
        S, R = self.S.get(name), self.R
        return Statistics(
            H=self.H,
            C=self.C,
            S=S,
            tokens=self.tokens,
            held_out=apart,
            root=R,
            fitting_root=fitting_root,
            alive=self.alive,
        )


@dataclass(slots=True)
class _Beside:
    """Sums over extra windows, not yet divided by tokens."""

    H: Tensor | None = None
    K: Tensor | None = None
    Q: Tensor | None = None
    tokens: int = 0

    def add(self, quantized: _Seen, original: _Seen | None) -> None:
        """Add a batch."""
        if not quantized.tokens:
            return
        X_hat = quantized.stacked
        self.tokens += len(X_hat)
        self.H = _plus(self.H, X_hat.T @ X_hat)
        if original is not None:
            D = original.stacked - X_hat
            self.K, self.Q = _plus(self.K, D.T @ X_hat), _plus(self.Q, D.T @ D)

    def summed(self) -> Extra | None:
        """Return the means over the tokens of all ranks, in the memory of the sums; None if there were none."""
        tokens = int(sum_(torch.tensor(self.tokens)))
        H, K, Q = (None if x is None else sum_(x).div_(tokens) for x in (self.H, self.K, self.Q))
        return None if H is None else Extra(H=H, K=K, Q=Q)


class _Look:
    """Runs copies of a block just far enough to see the inputs of some groups, and what is added to their outputs."""

    def __init__(self, block: Block, groups: Sequence[tuple[Layer, ...]], stream: Stream, *, residual: bool) -> None:
        self.block, self.groups, self.stream = block, groups, stream
        self.adding = {layer.name for group in groups for layer in group if layer.adds} if residual else set()

    def __call__(
        self, module: nn.Module, batch: int, hidden: Tensor, *, to_the_end: bool = False
    ) -> tuple[list[_Seen], Tensor | None]:
        seen = [_Seen() for _ in self.groups]
        here = {layer.name: layer for layer in self.block.layers_of(module)}
        missing = {group[0].name: group[0].calls for group in self.groups}  # inputs still to be seen

        def done() -> None:
            if not to_the_end and not any(missing.values()) and self.adding <= additions.found.keys():
                raise Stop

        additions = Additions(done)
        with additions, Hooks() as hooks:
            for group, record in zip(self.groups, seen, strict=True):

                def entering(layer: Layer, x: Tensor, record: _Seen = record) -> None:
                    record.rows.append(wide(layer.rows(x)))
                    missing[layer.name] -= 1
                    done()

                hooks.before(here[group[0].name], entering)
                for layer in group:
                    if layer.name in self.adding:
                        hooks.after(here[layer.name], additions.watch)
            output = until_stopped(lambda: self.stream.forward(self.block, module, batch, hidden))
            additions.finish()
        for group, record in zip(self.groups, seen, strict=True):
            for layer in group:
                if layer.name in additions.found:
                    record.added[layer.name] = additions.found[layer.name].reshape(-1, layer.shape[0])
        return seen, output


def _unreached(names: str) -> CalibrationError:
    return CalibrationError(
        f"No token reached {names}: the block does not run them, or not on this text. Leave them out with --ignore."
    )


def _identity(layer: Layer, x: Tensor) -> tuple[Any, ...]:
    """What two layers have in common if they multiply the same rows."""
    conv = layer.module
    unfolding = (conv.kernel_size, conv.dilation, conv.padding, conv.stride) if layer.kind == "Conv2d" else None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version, unfolding)


def _plus(total: Tensor | None, product: Tensor) -> Tensor:
    return product.double() if total is None else total.add_(product)
