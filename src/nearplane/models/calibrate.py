"""What the layers of a network see: activations pass through one block at a time, second moments are summed on the way.

Two streams run side by side, of the original and of the quantized network. With four stages in a block (q/k/v, o, gate/up,
down) each stage needs a pass of both; every pass stops as soon as it has seen what it is for, and the original stream's last
pass is also its way to the next block. In multiplications by weights that is 4.33 forwards of a Llama block (attention 1/3 of
the weights): 0 + 1/3 + 1/3 + 1 for each stream and 1 for the quantized stream's way on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nearplane.errors import CalibrationError, ModelError
from nearplane.models.layers import Layer
from nearplane.models.statistics import Statistics
from nearplane.models.stream import Block, Model
from nearplane.parallel import sum_


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How the network calls a block for one batch, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positional: bool  # whether the hidden states are the first argument, or `hidden_states=`


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Layers with the same input, bound to the quantized block, and what calibration saw of it.

    Args:
        layers: in module order.
        statistics: by layer name; H and C are the same tensors for all, S is each layer's own.
    """

    layers: tuple[Layer, ...]
    statistics: dict[str, Statistics]


class Stream:
    """Hidden states on their way through the network, batch by batch: (windows, seqlen, hidden) each.

    Attributes:
        quantized: inputs of the next block in the quantized network.
        original: the same in the original one; None if only one stream runs. Before the first block both are the same tensors.
        calls: {block name: its other arguments, by batch}.
        ahead: whether `original` has passed the block that `quantized` still stands before.
    """

    def __init__(self, hidden: list[Tensor], calls: dict[str, list[Call]], *, two_streams: bool) -> None:
        self.quantized = hidden
        self.original = list(hidden) if two_streams else None
        self.calls, self.ahead = calls, False
        self.sizes = [len(x) for x in hidden]  # windows of each batch

    def forward(self, block: Block, module: nn.Module, batch: int, hidden: Tensor) -> Tensor:
        """Run a copy of a block on one batch and return the hidden states that come out."""
        call = self.calls[block.name][batch]
        hidden = hidden.clone()  # a block may work in place
        if call.positional:
            output = module(hidden, *call.args, **call.kwargs)
        else:
            output = module(hidden_states=hidden, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Move both streams past a block; each batch of the old hidden states is freed as the new one is there.

        Raises:
            CalibrationError: what comes out is not finite.
        """
        for batch in range(len(self.sizes)):
            self.quantized[batch] = _finite(self.forward(block, block.quantized, batch, self.quantized[batch]), block)
            if self.original is not None and not self.ahead:
                self.original[batch] = _finite(self.forward(block, block.original, batch, self.original[batch]), block)
        self.ahead = False
        del self.calls[block.name]


@torch.no_grad()
def skeleton(
    model: Model, tokens: Tensor, *, device: torch.device | str, dtype: torch.dtype, batch: int = 8, two_streams: bool = True
) -> Stream:
    """Run the network without its blocks: learn the inputs of the first one and the other arguments of all.

    Every block is replaced by a recorder that returns its input, so embeddings, masks and rotary tables are computed as the
    model does; they are in memory only for this.

    Args:
        model: whose blocks are to be calibrated.
        tokens: (windows, seqlen) int64.
        device, dtype: where and in what to compute; hidden states stay there.
        batch: windows at a time.
        two_streams: keep hidden states of the original network beside those of the quantized one.

    Raises:
        ModelError: the blocks do not run one after the other, each on what the one before returned.
    """
    place = torch.device(device)
    tape = _Tape([block.name for block in model.blocks])
    recorders = [_Recorder(block.empty, index, tape) for index, block in enumerate(model.blocks)]
    network = model.around(recorders, place, dtype)
    if (head := network.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(_stop)
    with model.blocks[0].on(place, dtype, original=False) as first:
        tape.probe = first.quantized
        _until_stopped(lambda: network(tokens[:1].to(place), use_cache=False))
        tape.probe = None
    for part in tokens.split(batch):
        tape.begin()
        _until_stopped(lambda part=part: network(part.to(place), use_cache=False))
        tape.check()
    return Stream(tape.hidden, tape.calls, two_streams=two_streams)


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
    additions = _Additions()

    def entering(layer: Layer, x: Tensor) -> None:
        inputs.setdefault(layer.name, []).append(_identity(layer, x))
        held.append(x)

    with additions, _Hooks() as hooks:
        for layer in layers:
            hooks.before(layer, entering)
            hooks.after(layer, additions.watch)
        stream.forward(block, block.quantized, 0, stream.quantized[0])
        additions.finish()
    if unseen := [layer.name for layer in layers if layer.name not in inputs]:
        raise CalibrationError(f"No token reached {', '.join(unseen)}; leave them out with --ignore or calibrate on more text.")
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
    last: bool = False,
) -> list[Observed]:
    """Sum the second moments of the inputs of some groups of layers, as the block is now.

        H = X_hat^T X_hat / tokens        C = X^T X_hat / tokens        S = (r - r_hat)^T X_hat / tokens

    Products are taken in float32 (float64 if the activations are) batch by batch and summed in float64.

    Args:
        block: in memory, with its original if `correct`.
        groups: from `stages`; often one of them.
        stream: standing before the block.
        correct: whether to compare with the original network: C, S and held-out moments.
        held_out: fraction of the windows, the last ones, whose moments are also given apart; at least one window.
        residual: whether to form S for layers whose output is added to a residual stream.
        last: no other groups of this block follow: the original stream moves on to the next block in the same pass.

    Raises:
        CalibrationError: an input is not finite, or a layer sees different tokens in the two networks.
    """
    assert not correct or (stream.original is not None and not stream.ahead), "correction needs the original stream"
    windows = sum(stream.sizes)
    split = correct and held_out > 0 and windows > 1
    first_held = windows - min(windows - 1, max(1, round(held_out * windows))) if split else windows
    fitted, held = [[_Moments() for _ in groups] for _ in range(2)]
    look = _Look(block, groups, stream, residual=correct and residual)
    before = 0  # windows of earlier batches
    for batch, size in enumerate(stream.sizes):
        original = None
        if correct:
            original, output = look(block.original, batch, stream.original[batch], to_the_end=last)
            if last:
                stream.original[batch] = _finite(output, block)
        quantized, _ = look(block.quantized, batch, stream.quantized[batch])
        for index, seen in enumerate(quantized):
            cut = seen.tokens * min(max(first_held - before, 0), size) // size
            pair = None if original is None else original[index]
            fitted[index].add(seen, pair, slice(0, cut))
            held[index].add(seen, pair, slice(cut, seen.tokens))
        before += size
    stream.ahead = correct and last
    return [_observed(group, a, b, split) for group, a, b in zip(groups, fitted, held, strict=True)]


def _observed(group: tuple[Layer, ...], fitted: _Moments, held: _Moments, split: bool) -> Observed:
    total, held = (fitted + held).summed(), held.summed() if split else None
    names = ", ".join(layer.name for layer in group)
    if not total.tokens:
        raise CalibrationError(f"No token reached {names}; leave them out with --ignore or calibrate on more text.")
    for which, tensor in (("quantized", total.H), ("original", total.C), *(("original", S) for S in total.S.values())):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise CalibrationError(
                f"The input of {names} holds NaN or Inf (in the {which} network, or its square overflows). "
                f"Check the checkpoint, or compute in a wider dtype."
            )
    return Observed(layers=group, statistics={layer.name: total.of(layer.name, held) for layer in group})


@dataclass(slots=True)
class _Seen:
    """What one pass saw of one group: rows of its input, and what is added to the outputs of its layers."""

    rows: list[Tensor] = field(default_factory=list)  # (tokens, in) each
    added: dict[str, Tensor] = field(default_factory=dict)  # layer name: (tokens, out)

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self.rows)


@dataclass(slots=True)
class _Moments:
    """Sums, not yet divided by tokens."""

    H: Tensor | None = None
    C: Tensor | None = None
    S: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, quantized: _Seen, original: _Seen | None, part: slice) -> None:
        """Add some rows of a batch."""
        if part.start == part.stop:
            return
        X_hat = torch.cat(quantized.rows)[part]
        self.tokens += len(X_hat)
        self.H = _plus(self.H, X_hat.T @ X_hat)
        if original is not None:
            self.C = _plus(self.C, torch.cat(original.rows)[part].T @ X_hat)
            for name, r_hat in quantized.added.items():
                self.S[name] = _plus(self.S.get(name), (original.added[name] - r_hat)[part].T @ X_hat)

    def __add__(self, other: _Moments) -> _Moments:
        S = {name: self._sum(self.S.get(name), other.S.get(name)) for name in self.S | other.S}
        return _Moments(self._sum(self.H, other.H), self._sum(self.C, other.C), S, self.tokens + other.tokens)

    @staticmethod
    def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return b if a is None else a if b is None else a + b

    def summed(self) -> _Moments:
        """Return the means over the tokens of all ranks."""
        tokens = int(sum_(torch.tensor(self.tokens)))

        def mean(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else sum_(tensor) / tokens

        return _Moments(mean(self.H), mean(self.C), {name: mean(S) for name, S in self.S.items()}, tokens)

    def of(self, name: str, held: _Moments | None) -> Statistics:
        """Return what is known of one layer."""
        return Statistics(
            H=self.H, C=self.C, S=self.S.get(name), tokens=self.tokens, held_out=None if held is None else held.of(name, None)
        )


class _Look:
    """Runs copies of a block just far enough to see the inputs of some groups, and what is added to their outputs."""

    def __init__(self, block: Block, groups: Sequence[tuple[Layer, ...]], stream: Stream, *, residual: bool) -> None:
        self.block, self.groups, self.stream, self.residual = block, groups, stream, residual
        self.adding = {layer.name for group in groups for layer in group if layer.adds} if residual else set()

    def __call__(
        self, module: nn.Module, batch: int, hidden: Tensor, *, to_the_end: bool = False
    ) -> tuple[list[_Seen], Tensor | None]:
        seen = [_Seen() for _ in self.groups]
        here = {layer.name: layer for layer in self.block.layers_of(module)}
        missing = {group[0].name: group[0].calls for group in self.groups}  # inputs still to be seen

        def done() -> None:
            if not to_the_end and not any(missing.values()) and self.adding <= additions.found.keys():
                raise _Stop

        additions = _Additions(done)
        with additions, _Hooks() as hooks:
            for group, record in zip(self.groups, seen, strict=True):

                def entering(layer: Layer, x: Tensor, record: _Seen = record) -> None:
                    record.rows.append(_wide(layer.rows(x)))
                    missing[layer.name] -= 1
                    done()

                hooks.before(here[group[0].name], entering)
                for layer in group:
                    if layer.name in self.adding:
                        hooks.after(here[layer.name], additions.watch)
            output = _until_stopped(lambda: self.stream.forward(self.block, module, batch, hidden))
            additions.finish()
        for group, record in zip(self.groups, seen, strict=True):
            for layer in group:
                if layer.name in additions.found:
                    record.added[layer.name] = additions.found[layer.name].reshape(-1, layer.shape[0])
        return seen, output


class _Additions(TorchFunctionMode):
    """Sees what is added to the outputs of some layers, by watching every addition.

    The other operand of the addition that consumes an output is `r`. As long as the sum goes straight into another addition
    (`mlp + attention + hidden`), that operand joins `r`; the first other use of the sum ends it.
    """

    ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})

    def __init__(self, done: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self._done = done
        self._open: dict[str, tuple[Tensor, Tensor | None]] = {}  # the output or the sum so far, and r so far

    def watch(self, layer: Layer, output: Tensor) -> None:
        """Look out for the addition that consumes this output."""
        if layer.kind != "Conv2d" and isinstance(output, Tensor):
            self._open[layer.name] = (output, None)

    def finish(self) -> None:
        """The block has ended: sums that went into no other addition are complete."""
        self.found |= {name: r for name, (_, r) in self._open.items() if r is not None}
        self._open.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._open:
            return func(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        plain = kwargs.get("alpha", 1) == 1 and "out" not in kwargs and len(tensors) == 2
        others: dict[str, Tensor] = {}  # copies, made before the addition may overwrite them
        touched = {name for name, (now, _) in self._open.items() if any(_same(value, now) for value in tensors)}
        if getattr(func, "__name__", "") in self.ADDITIONS and plain and tensors[0].shape == tensors[1].shape:
            for name in touched:
                other = tensors[1] if _same(tensors[0], self._open[name][0]) else tensors[0]
                others[name] = _wide(other)
        result = func(*args, **kwargs)
        if not isinstance(result, (Tensor, tuple, list)):
            return result  # a question about the tensor, not a use of it
        for name in touched:
            now, r = self._open[name]
            if name in others:
                self._open[name] = (result, others[name] if r is None else r + others[name].view_as(r))
            elif r is not None and not (isinstance(result, Tensor) and _same(result, now)):
                self.found[name] = r
                del self._open[name]
                self._done()
        return result


class _Hooks:
    """Hooks on modules, removed at the end."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __enter__(self) -> _Hooks:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def before(self, layer: Layer, see: Callable[[Layer, Tensor], None]) -> None:
        """Call `see(layer, input)` when the layer is about to run."""
        self._handles.append(
            layer.module.register_forward_pre_hook(
                lambda module, args, kwargs: see(layer, args[0] if args else kwargs["input"]), with_kwargs=True
            )
        )

    def after(self, layer: Layer, see: Callable[[Layer, Tensor], None]) -> None:
        """Call `see(layer, output)` when the layer has run."""
        self._handles.append(layer.module.register_forward_hook(lambda module, args, output: see(layer, output)))


class _Tape:
    """What the recorders write on: the first block's inputs and every block's calls."""

    def __init__(self, names: list[str]) -> None:
        self.hidden: list[Tensor] = []
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self.probe: nn.Module | None = None
        self._names = names
        self._extra: tuple[Any, ...] | None = None  # what a block returns beside hidden states; None if no tuple
        self._pool: dict[tuple[Any, ...], Tensor] = {}  # arguments that are equal in all batches are kept once
        self.begin()

    def begin(self) -> None:
        """A new batch begins."""
        self._next = 0
        self._current: Tensor | None = None
        self._given: list[Tensor] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id: (tensor of this batch, what is kept for it)

    def record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep a block's arguments and return its input the way the block would return its output."""
        hidden, args, named, positional = _taken_apart(args, kwargs)
        if self.probe is not None:
            output = self.probe(hidden, *args, **named) if positional else self.probe(hidden_states=hidden, **named)
            self._extra = output[1:] if isinstance(output, tuple) else None
            raise _Stop
        name = self._names[index]
        if index != self._next:
            raise ModelError(f"{name} runs out of turn: nearplane needs blocks that run once each, in order.")
        if index and not _same(hidden, self._current):
            raise ModelError(f"The model changes hidden states before {name}: nearplane needs blocks that follow each other.")
        if not index:
            self.hidden.append(hidden)
        leaf = iter(range(1_000_000))
        keep = lambda value: self._keep(name, index, next(leaf), value)  # noqa: E731
        self.calls[name].append(Call(args=_mapped(keep, args), kwargs=_mapped(keep, named), positional=positional))
        self._next, self._current = index + 1, hidden
        if self._next == len(self._names):
            raise _Stop
        if self._extra is None:
            return hidden
        extra = _mapped(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, self._extra)
        _mapped(lambda value: self._given.append(value) if isinstance(value, Tensor) else None, extra)
        return (hidden, *extra)

    def check(self) -> None:
        """Raise unless every block has run."""
        if self._next != len(self._names):
            raise ModelError(f"{self._names[self._next]} did not run: nearplane needs blocks that run once each, in order.")

    def _keep(self, name: str, index: int, leaf: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if any(value is given for given in self._given):
            raise ModelError(f"{name} is given more than hidden states by the block before it; that cannot be replayed.")
        if id(value) not in self._kept:
            first = self._pool.setdefault((index, leaf, value.shape, value.dtype), value)
            self._kept[id(value)] = (value, first if first is value or torch.equal(first, value) else value)
        return self._kept[id(value)][1]


class _Recorder(nn.Module):
    """Stands in for a block; has all its other attributes."""

    def __init__(self, block: nn.Module, index: int, tape: _Tape) -> None:
        super().__init__()
        for name, value in (("block", block), ("index", index), ("tape", tape)):
            object.__setattr__(self, name, value)  # the block is no submodule: its weights stay on disk

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tape.record(self.index, args, kwargs)


class _Stop(Exception):  # noqa: N818  (it ends a forward that has shown what it was run for)
    """All there was to see has been seen."""


def _stop(*_: Any) -> None:
    raise _Stop


def _until_stopped(run: Callable[[], Any]) -> Any:
    """Run; None if it was stopped."""
    try:
        return run()
    except _Stop:
        return None


def _taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any], bool]:
    """Split a block's arguments: (hidden states, other args, other kwargs, whether they came by position)."""
    if args:
        return args[0], args[1:], kwargs, True
    return kwargs["hidden_states"], (), {name: value for name, value in kwargs.items() if name != "hidden_states"}, False


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to everything inside tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    return function(value)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of all of the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype and not a.is_meta)


def _identity(layer: Layer, x: Tensor) -> tuple[Any, ...]:
    """What two layers have in common if they multiply the same rows."""
    conv = layer.module
    unfolding = (conv.kernel_size, conv.dilation, conv.padding, conv.stride) if layer.kind == "Conv2d" else None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version, unfolding)


def _wide(x: Tensor) -> Tensor:
    """Copy to float32, or float64 if it is that."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True)


def _plus(total: Tensor | None, product: Tensor) -> Tensor:
    return product.double() if total is None else total.add_(product)


def _finite(hidden: Tensor, block: Block) -> Tensor:
    if not torch.isfinite(hidden).all():
        raise CalibrationError(f"{block.name} returns NaN or Inf. Check the checkpoint, or compute in a wider dtype.")
    return hidden
