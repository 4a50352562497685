"""Looking into a forward while it runs: hooks on layers, the additions that consume their outputs, stopping early.

Knows modules and tensors; not what is computed from what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nearplane.models.layers import Layer


class Stop(Exception):  # noqa: N818  (it ends a forward that has shown what it was run for)
    """All there was to see has been seen."""


def stop(*_: Any) -> None:
    raise Stop


def until_stopped(run: Callable[[], Any]) -> Any:
    """Run; None if it was stopped."""
    try:
        return run()
    except Stop:
        return None


class Hooks:
    """Hooks on modules, removed at the end."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def before(self, layer: Layer, see: Callable[[Layer, Tensor], None]) -> None:
        """Call `see(layer, input)` when the layer is about to run."""
        self._handles.append(layer.before(see))

    def after(self, layer: Layer, see: Callable[[Layer, Tensor], None]) -> None:
        """Call `see(layer, output)` when the layer has run."""
        self._handles.append(layer.after(see))


class Results:
    """Numbers the tensors that a block computes in the order they come: the same one of another batch has the same number.

    Holds none of them in memory. Only tensors with as many rows as the hidden states, as long as theirs, are numbered;
    what enters the block is the first of them, as it is a copy. What is computed of parameters and of integers made of
    nothing (positions) is not: it does not grow with the batch, and has as many rows in one batch by chance.

    Args:
        hidden: the hidden states, or others of their shape.
    """

    def __init__(self, hidden: Tensor) -> None:
        self._size, self._width = hidden.numel(), hidden.shape[-1]
        self._all: list[ref[Tensor]] = []
        self._fixed: dict[int, ref[Tensor]] = {}  # by id, what is the same in every batch
        self._numbered: list[tuple[ref[Tensor], int]] = []  # with the version: how often it had been written to

    @property
    def count(self) -> int:
        """How many have a number so far."""
        return len(self._numbered)

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
                self._numbered.append((ref(x), x._version))

    def _is_fixed(self, x: Tensor) -> bool:
        known = self._fixed.get(id(x))
        return isinstance(x, nn.Parameter) or (known is not None and known() is x)

    def number(self, x: Tensor) -> int | None:
        """Return the number of a tensor as it is now; None if it has none, or was written to since it was noted."""
        for number, (known, version) in reversed([*enumerate(self._numbered)]):
            tensor = known()
            if tensor is not None and same(tensor, x):
                return number if version == x._version else None
        return None

    def get(self, number: int) -> Tensor | None:
        """Return the tensor of a number; None if there is none yet, or no more."""
        return self._numbered[number][0]() if number < len(self._numbered) else None

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
    r = operands[0]
    for operand in operands[1:]:
        r = r + operand.view_as(r)
    return r


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of all of the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype and not a.is_meta)


def wide(x: Tensor) -> Tensor:
    """Copy to float32, or float64 if it is that."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True)
