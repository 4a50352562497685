"""What is seen of layers while a block runs: the rows that they multiply, and tensors that are added to their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nearplane.models.experts import Routed, by_expert
from nearplane.models.layers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one batch that layers with one shared input multiply.

    Args:
        X_hat: (tokens, in) rows in the quantized network.
        X: (tokens, in) rows of the same tokens in the original network; None without a comparison.
        residual: {layer: (tokens, out) `r - r_hat`} of layers whose output is added to the residual stream.
        token: Of an expert: (rows,) index of each row's token in the batch, ascending, on the CPU; else None.
        tokens: Of an expert: number of tokens in the batch.
        alike: Of an expert: number of rows whose token the original network routes to this expert as well; in the other
            rows `X` equals `X_hat` before it is rounded, as there is nothing to compare with.
    """

    X_hat: Tensor
    X: Tensor | None = None
    residual: dict[str, Tensor] = field(default_factory=dict)
    token: Tensor | None = None
    tokens: int = 0
    alike: int = 0

    def before(self, share: Fraction) -> int:
        """Return the number of rows that belong to the first `share` of the batch's tokens."""
        if self.token is None:
            return int(len(self.X_hat) * share)
        return int((self.token < int(self.tokens * share)).sum())


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
            self.routed = x if waits else x.only([*by_expert(group)])
        else:
            rows = layer.rows(x)
            rows = rows if self.rounded is None else self.rounded(layer.name, rows)
            self.rows.append(rows if waits and rows.is_contiguous() else rows.clone())

    @property
    def peak(self) -> float:
        """Largest magnitude of the rows; of experts, of those of all that are seen."""
        if self.routed is not None:
            return self.routed.peak
        return max((float(rows.abs().max()) for rows in self.rows if rows.numel()), default=0.0)

    @property
    def stacked(self) -> Tensor:
        if not self.rows:
            return torch.empty(0, self.inputs, device=self.device)
        return self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)


class Results:
    """Numbers of the tensors that a block computes, in order: a result has the same number in every batch.

    Only tensors with as many rows as the hidden states and rows of the same length are numbered; the first is the input
    of the block, which is a copy. Tensors computed only from parameters, or from integers made without arguments
    (positions), are excluded: they do not grow with the batch and match the shape only by chance. No tensor is kept in
    memory.

    Args:
        hidden: Hidden states, or a tensor of their shape.

    Attributes:
        numbered: References to the numbered tensors so far, in order.
        watching: Whether results are noted; what only looks at a pass would be no result of it.
    """

    def __init__(self, hidden: Tensor) -> None:
        self._size, self._width = hidden.numel(), hidden.shape[-1]
        self._all: list[ref[Tensor]] = []
        self._own: dict[int, ref[Tensor]] = {}  # {id: tensor that the pass made of the hidden states}
        self._fixed: dict[int, ref[Tensor]] = {}  # {id: tensor that is the same in every batch}
        self.watching = True
        self.numbered: list[tuple[ref[Tensor], int]] = []  # with its version, which counts writes to the tensor

    def note(self, result: Any, given: Iterable[Any]) -> None:
        """Number the tensors in the `result` of a function with arguments `given`."""
        if not self.watching:
            return
        operands = tensors_in(given)
        same = all(self._is_fixed(x) for x in operands)
        own = not self._all or any(self._is_own(x) for x in operands)  # the first is a copy of the hidden states
        for x in tensors_in((result,)):
            self._all.append(ref(x))
            if own and not any(x is operand for operand in operands):  # some functions return what they were given
                self._own[id(x)] = ref(x)
            fixed = same and (bool(operands) or not x.is_floating_point())
            if fixed:
                self._fixed[id(x)] = ref(x)
            elif x.numel() == self._size and x.shape[-1] == self._width:
                self.numbered.append((ref(x), x._version))

    def _is_fixed(self, x: Tensor) -> bool:
        known = self._fixed.get(id(x))
        return isinstance(x, nn.Parameter) or (known is not None and known() is x)

    def _is_own(self, x: Tensor) -> bool:
        known = self._own.get(id(x))
        return known is not None and known() is x

    def number(self, x: Tensor) -> int | None:
        """Return the number of a tensor; None if it has none, or was written to since it was numbered."""
        for number, (known, version) in reversed([*enumerate(self.numbered)]):
            tensor = known()
            if tensor is not None and same(tensor, x):
                return number if version == x._version else None
        return None

    def get(self, number: int) -> Tensor | None:
        """Return the tensor of a number; None if it does not exist yet or no longer."""
        return self.numbered[number][0]() if number < len(self.numbered) else None

    @property
    def count(self) -> int:
        """Number of all results so far."""
        return len(self._all)

    def in_memory(self, *, but: set[int]) -> dict[int, UntypedStorage]:
        """Return the memory of the results that are alive by their place in the order, but for these addresses."""
        alive = ((place, known()) for place, known in enumerate(self._all))
        storages = {place: x.untyped_storage() for place, x in alive if x is not None}
        return {place: each for place, each in storages.items() if each.data_ptr() not in but}

    def own(self) -> set[int]:
        """Return the places of what the pass made of the hidden states; arguments, tables and caches serve other batches, too."""
        alive = ((place, known()) for place, known in enumerate(self._all))
        return {place for place, x in alive if x is not None and x.is_floating_point() and self._is_own(x)}

    def drop(self, places: Iterable[int]) -> None:
        """Free the memory of tensors that are not used again; code that uses one nevertheless finds NaN."""
        for place in places:
            if (x := self._all[place]()) is not None:
                x.data = x.new_full((), torch.nan).expand(x.shape)


class Uses(TorchDispatchMode):
    """Torch dispatch mode that records at which operation each address is last used.

    Attributes:
        count: Number of operations so far.
        last: {address of a storage: number of the last operation that used it}.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.last = 0, dict[int, float]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        for x in tensors_in((*args, *(kwargs or {}).values())):
            self.last[x.untyped_storage().data_ptr()] = self.count
        return func(*args, **(kwargs or {}))


class Additions(TorchFunctionMode):
    """Torch function mode that records the tensors added to the outputs of some layers.

    The other operand of the addition that consumes an output is `r`. As long as the sum goes straight into another
    addition (`mlp + attention + hidden`), that operand joins `r`; the first other use of the sum ends it. An output
    with another use before its addition (`x + 0.04 x^3` in an activation) does not count as added.

    Args:
        done: Function that is called when `r` of a layer is complete.
        results: Numbering of all results; `r` is then recorded as the numbers of its operands instead of copies.

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
        """Record the addition that consumes this output, when it comes."""
        if not layer.convolves and isinstance(output, Tensor):
            self._open[layer.name] = (output, ())

    def finish(self) -> None:
        """Complete all sums that went into no other addition: the block has ended."""
        self.found |= {name: r for name, (_, r) in self._open.items() if r}
        self._open.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = self._watched(func, args, kwargs) if self._open else func(*args, **kwargs)
        if self._results is not None:
            self._results.note(output, (*args, *kwargs.values()))
        return output

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function while outputs wait for their addition."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        plain = kwargs.get("alpha", 1) == 1 and "out" not in kwargs and len(tensors) == 2
        touched = [name for name, (current, _) in self._open.items() if any(same(value, current) for value in tensors)]
        others: dict[str, Any] = {}  # copied before an addition in place overwrites them
        if getattr(func, "__name__", "") in self.ADDITIONS and plain and tensors[0].shape == tensors[1].shape:
            a, b = tensors
            others = {name: self._keep(b if same(a, self._open[name][0]) else a) for name in touched}
        output = func(*args, **kwargs)
        if not any(isinstance(value, Tensor) for value in (output if isinstance(output, (tuple, list)) else (output,))):
            return output  # an attribute of the tensor (its shape), not a use of it
        for name in touched:
            current, r = self._open[name]
            if name in others:
                self._open[name] = (output, (*r, others[name]))
            elif not (isinstance(output, Tensor) and same(output, current)):
                del self._open[name]
                if r:
                    self.found[name] = r
                    self._done()
        return output


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among `values`, and in tuples and lists among them."""
    groups = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [x for group in groups for x in group if isinstance(x, Tensor)]


def total(operands: Sequence[Tensor]) -> Tensor:
    """Return the sum of operands in the order they were added, in the shape of the first."""
    return reduce(lambda r, operand: r + operand.view_as(r), operands)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same memory, in full."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype and not a.is_meta)


def wide(x: Tensor) -> Tensor:
    """Copy a tensor as float32, or as float64 if it has that dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
