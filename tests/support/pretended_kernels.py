"""Kernels for the pretended GPU, whose launches are counted: those of the CPU, or Triton's in its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from nearplane.lattice import kernels
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


@contextmanager
def compiled() -> Iterator[None]:
    """Let the card use the kernels of the CPU, which are fast, each as one launch; those that CUDA lacks stay in torch."""
    made = replace(kernels.KERNELS["cpu"](), fit_steps=None, fit_octaves=None, least_squares=None)
    own = {field.name: getattr(made, field.name) for field in fields(made)}
    wrapped = replace(made, **{name: on_the_cpu(each) for name, each in own.items() if callable(each)})
    with mock.patch.dict(kernels.KERNELS, {KIND: lambda: wrapped}):
        yield


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the card use kernels of CUDA in Triton's interpreter; set TRITON_INTERPRET=1 before triton is imported."""
    import pretended_triton

    with pretended_triton.interpreted(), mock.patch.dict(kernels.KERNELS, {KIND: kernels.KERNELS["cuda"]}):
        yield
