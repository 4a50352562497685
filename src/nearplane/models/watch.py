"""Looking into a forward while it runs: hooks on layers, the additions that consume their outputs, stopping early.

Knows modules and tensors; not what is computed from what it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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
        self._handles.append(
            layer.module.register_forward_pre_hook(
                lambda module, args, kwargs: see(layer, args[0] if args else kwargs["input"]), with_kwargs=True
            )
        )

    def after(self, layer: Layer, see: Callable[[Layer, Tensor], None]) -> None:
        """Call `see(layer, output)` when the layer has run."""
        self._handles.append(layer.module.register_forward_hook(lambda module, args, output: see(layer, output)))


class Additions(TorchFunctionMode):
    """Sees what is added to the outputs of some layers, by watching every addition.

    The other operand of the addition that consumes an output is `r`. As long as the sum goes straight into another
    addition (`mlp + attention + hidden`), that operand joins `r`; the first other use of the sum ends it. An output
    that is put to another use before it is added (`x + 0.04 x^3` in an activation) does not count as added.
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
        touched = [name for name, (now, _) in self._open.items() if any(same(value, now) for value in tensors)]
        others: dict[str, Tensor] = {}  # copies, made before the addition may overwrite them
        if getattr(func, "__name__", "") in self.ADDITIONS and plain and tensors[0].shape == tensors[1].shape:
            a, b = tensors
            others = {name: wide(b if same(a, self._open[name][0]) else a) for name in touched}
        result = func(*args, **kwargs)
        if not any(isinstance(value, Tensor) for value in (result if isinstance(result, (tuple, list)) else (result,))):
            return result  # a question about the tensor (its shape), not a use of it
        for name in touched:
            now, r = self._open[name]
            if name in others:
                self._open[name] = (result, others[name] if r is None else r + others[name].view_as(r))
            elif not (isinstance(result, Tensor) and same(result, now)):
                del self._open[name]
                if r is not None:
                    self.found[name] = r
                    self._done()
        return result


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of all of the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype and not a.is_meta)


def wide(x: Tensor) -> Tensor:
    """Copy to float32, or float64 if it is that."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True)
