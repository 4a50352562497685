"""What a forward shows while it runs: rows that layers multiply, and the additions that consume their outputs; stopping early.

Knows modules and tensors; not what is computed from what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nearplane.errors import CalibrationError
from nearplane.models.experts import ExpertLayer, Routed
from nearplane.models.layers import Layer


class Stop(Exception):  # noqa: N818  (it ends a forward that has shown what it was run for)
    """All there was to see has been seen."""


def stop(*_: Any) -> None:
    raise Stop


class Results:
    """Numbers the tensors that a block computes in the order they come: the same one of another batch has the same number.

    Holds none of them in memory. Only tensors with as many rows as the hidden states, as long as theirs, are numbered;
    what enters the block is the first of them, as it is a copy. What is computed of parameters and of integers made of
    nothing (positions) is not: it does not grow with the batch, and has as many rows in one batch by chance.

    Args:
        hidden: the hidden states, or others of their shape.

    Attributes:
        numbered: those that have a number so far, in order.
    """

    def __init__(self, hidden: Tensor) -> None:
        self._size, self._width = hidden.numel(), hidden.shape[-1]
        self._all: list[ref[Tensor]] = []
        self._fixed: dict[int, ref[Tensor]] = {}  # by id, what is the same in every batch
        self.numbered: list[tuple[ref[Tensor], int]] = []  # with the version: how often it had been written to

    def note(self, result: Any, given: Iterable[Any]) -> None:
        """Number what a function that was given some arguments returned."""
        operands = tensors_in(given)
        same = all(self._is_fixed(x) for x in operands)
        for x in tensors_in((result,)):
            self._all.append(ref(x))
            fixed = same and (bool(operands) or not x.is_floating_point())
            if fixed:
                self._fixed[id(x)] = ref(x)
            elif x.numel() == self._size and x.shape[-1] == self._width:
                self.numbered.append((ref(x), x._version))

    def _is_fixed(self, x: Tensor) -> bool:
        known = self._fixed.get(id(x))
        return isinstance(x, nn.Parameter) or (known is not None and known() is x)

    def number(self, x: Tensor) -> int | None:
        """Return the number of a tensor as it is now; None if it has none, or was written to since it was noted."""
        for number, (known, version) in reversed([*enumerate(self.numbered)]):
            tensor = known()
            if tensor is not None and same(tensor, x):
                return number if version == x._version else None
        return None

    def get(self, number: int) -> Tensor | None:
        """Return the tensor of a number; None if there is none yet, or no more."""
        return self.numbered[number][0]() if number < len(self.numbered) else None

    def bytes_alive(self, *, but: set[int]) -> int:
        """Return how much memory hold tensors that still live; storages at the addresses `but` do not count."""
        tensors = (known() for known in self._all)
        storages = [x.untyped_storage() for x in tensors if x is not None]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in but}.values())


class Additions(TorchFunctionMode):
    """Sees what is added to the outputs of some layers, by watching every addition.

    The other operand of the addition that consumes an output is `r`. As long as the sum goes straight into another
    addition (`mlp + attention + hidden`), that operand joins `r`; the first other use of the sum ends it. An output
    that is put to another use before it is added (`x + 0.04 x^3` in an activation) does not count as added.

    Args:
        done: is called when `r` of a layer is complete.
        results: numbers all that is computed; `r` is then told by the numbers of its operands instead of copied.

    Attributes:
        found: {layer name: the operands whose sum is `r`}, copies or numbers; see `total`.
    """

    ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})

    def __init__(self, done: Callable[[], None] = lambda: None, results: Results | None = None) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, ...]] = {}
        self._done, self._results = done, results
        self._keep: Callable[[Tensor], Any] = wide if results is None else results.number
        self._open: dict[str, tuple[Tensor, tuple[Any, ...]]] = {}  # the output or the sum so far, and r so far

    def watch(self, layer: Layer, output: Tensor) -> None:
        """Look out for the addition that consumes this output."""
        if not layer.convolves and isinstance(output, Tensor):
            self._open[layer.name] = (output, ())

    def finish(self) -> None:
        """The block has ended: sums that went into no other addition are complete."""
        self.found |= {name: r for name, (_, r) in self._open.items() if r}
        self._open.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._watched(func, args, kwargs) if self._open else func(*args, **kwargs)
        if self._results is not None:
            self._results.note(result, (*args, *kwargs.values()))
        return result

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function while outputs wait for their addition."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        plain = kwargs.get("alpha", 1) == 1 and "out" not in kwargs and len(tensors) == 2
        touched = [name for name, (now, _) in self._open.items() if any(same(value, now) for value in tensors)]
        others: dict[str, Any] = {}  # looked at before the addition may overwrite them
        if getattr(func, "__name__", "") in self.ADDITIONS and plain and tensors[0].shape == tensors[1].shape:
            a, b = tensors
            others = {name: self._keep(b if same(a, self._open[name][0]) else a) for name in touched}
        result = func(*args, **kwargs)
        if not any(isinstance(value, Tensor) for value in (result if isinstance(result, (tuple, list)) else (result,))):
            return result  # a question about the tensor (its shape), not a use of it
        for name in touched:
            now, r = self._open[name]
            if name in others:
                self._open[name] = (result, (*r, others[name]))
            elif not (isinstance(result, Tensor) and same(result, now)):
                del self._open[name]
                if r:
                    self.found[name] = r
                    self._done()
        return result


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values, and in tuples and lists among them."""
    apart = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [x for part in apart for x in part if isinstance(x, Tensor)]


def total(operands: Sequence[Tensor]) -> Tensor:
    """Return the sum of operands in the order they were added, in the shape of the first."""
    return reduce(lambda r, operand: r + operand.view_as(r), operands)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of all of the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype and not a.is_meta)


def wide(x: Tensor) -> Tensor:
    """Copy to float32, or float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


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
        run: passes all batches through the block and yields what each shows of some groups of layers; see `stages.seen`.
        ends: whether the last of these passes is the last of the block.
    """

    parts: list[tuple[Layer, ...]]
    run: Callable[..., Iterator[list[Rows | RoutedRows]]]
    ends: bool

    def shown(self, layers: tuple[Layer, ...], *, last: bool) -> Iterator[RoutedRows]:
        """Yield what each batch shows of some layers, in a pass of its own; `last`: of all these passes."""
        for (rows,) in self.run([layers], last=self.ends and last):
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
    X_hat = quantized.stacked
    if original is None:
        return Rows(X_hat=X_hat)
    X = original.stacked
    if len(X) != len(X_hat):
        raise CalibrationError(
            f"{name} sees {len(X)} tokens in the original network and {len(X_hat)} in the quantized one (routed "
            f"experts do): leave it out with --ignore, or do without correction."
        )
    residual = {layer: original.added[layer] - r_hat for layer, r_hat in quantized.added.items()}
    return Rows(X_hat=X_hat, X=X, residual=residual)
