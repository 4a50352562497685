"""Kernels for the pretended GPU, whose launches are counted: those of the CPU, or Triton's in its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from nearplane.lattice import kernels
from nearplane.lattice.kernels_torch import State
from pretended import Pretend
from pretended_cards import KIND, here


def on_the_cpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of the CPU that takes tensors of one card, as one launch there."""

    def launched(*args: Any, **keywords: Any) -> Any:
        here().launches += 1
        card = next(each.device.index for each in tree_leaves((args, keywords)) if isinstance(each, Pretend))
        args, keywords = tree_map_only(Pretend, lambda each: each.held, (args, keywords))
        return tree_map_only(Tensor, lambda each: Pretend(each, card), kernel(*args, **keywords))

    return launched


def fitting_on_the_cpu(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a fit of the CPU that takes the state of a descent on one card, as one launch there."""

    def launched(state: State, groups: Sequence[tuple[int, int, int]], EH: Tensor, limits: Any) -> None:
        here().launches += 1
        parts = {field.name: getattr(state, field.name) for field in fields(state)}
        held = {name: each.held for name, each in parts.items() if isinstance(each, Pretend)}
        kernel(replace(state, **held), groups, EH.held if isinstance(EH, Pretend) else EH, limits)

    return launched


@contextmanager
def compiled() -> Iterator[None]:
    """Let the card use the kernels of the CPU, which are fast, each as one launch."""
    made = kernels.KERNELS["cpu"]()
    own = {field.name: getattr(made, field.name) for field in fields(made)}
    wrapped = replace(made, **{name: on_the_cpu(each) for name, each in own.items() if callable(each)})
    fits = {name: fitting_on_the_cpu(own[name]) for name in ("fit_steps", "fit_octaves")}
    wrapped = replace(wrapped, **fits)
    with mock.patch.dict(kernels.KERNELS, {KIND: lambda: wrapped}):
        yield


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the card use kernels of CUDA in Triton's interpreter; set TRITON_INTERPRET=1 before triton is imported."""
    import pretended_triton

    with pretended_triton.interpreted(), mock.patch.dict(kernels.KERNELS, {KIND: kernels.KERNELS["cuda"]}):
        yield
