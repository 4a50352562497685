"""Launches of one layer on a pretended GPU, by function of the package: `python layer_launches.py OUT IN [SCHEME]`.

The kernels that CUDA has are one launch each; their stand-ins here compute on the CPU. `before` as a last word counts
the torch forms instead, which have one launch for every operation.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nearplane.lattice import kernels, polish, solvers
from nearplane.lattice.kernels_torch import Columns, Rounding, Spans, State, Tally
from nearplane.lattice.moments import Extra, Moments
from nearplane.lattice.scale import StepStorage
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.on_grid import joined
from nearplane.planning.solve_stage import solve_layer
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.layer_plan import LayerPlan
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.schemes import AnyScheme, GridScheme
from pretended import Gpu, Pretend, pretended
from pretended_cards import KIND, here

SCHEMES: dict[str, AnyScheme] = {
    "4 bits": GridScheme(bits=4, group_size=128),
    "q4_k": BlockScheme(grid="q4_k"),
    "rate": RateScheme(rate=3.0),
}


def solve_pass(columns: Columns, U: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
    """Sweep all columns on the CPU; the errors are not filled."""
    return solvers._sweep_blocks(columns, U, tally, 128), torch.empty_like(columns.W)


def descend_pass(state: State, W: Tensor, spans: Spans, rounding: Rounding | None, *, begins: bool) -> None:
    """Take a pass of coordinate descent on the CPU."""
    starts, firsts, group = spans.starts.tolist(), spans.firsts.tolist(), state.group
    if begins:
        state.E.copy_(W.T - polish.in_steps(state, 0, len(state.E)) * state.scale[group])
    fit = None if rounding is None else Rounded(rounding)
    for a, b in pairwise(starts[i] for i in firsts):
        polish._pass(state, a, b, fit, 128)


class Rounded(polish.PlainFit):
    """The fit of steps stored as floats of 16 bits."""

    def __init__(self, rounding: Any) -> None:
        super().__init__(torch.float16)
        assert rounding == self.rounding, "only float16 is counted"


def one_launch(kernel: Callable[..., Any], name: str, launches: Counter[str]) -> Callable[..., Any]:
    """Return a kernel of the CPU that takes tensors on the card, as one launch."""

    def launched(*args: Any, **options: Any) -> Any:
        here().launches += 1
        launches[name] += 1
        found = kernel(*map(held, args), **options)
        return tree_map_only(Tensor, lambda each: Pretend(each, 0), found)

    return launched


def held(argument: Any) -> Any:
    """Return an argument of a kernel with the tensors that the card holds, in their memory."""
    if isinstance(argument, State):
        return replace(argument, **{each.name: held(getattr(argument, each.name)) for each in fields(State)})
    return tree_map_only(Pretend, lambda each: each.held, argument)


@contextmanager
def kernels_of_cuda() -> Iterator[Counter[str]]:
    """Let the card have the kernels that CUDA has, each as one launch; yield their launches."""
    launches: Counter[str] = Counter()
    made = kernels.KERNELS["cpu"]()
    passes = dict(solve_pass=solve_pass, descend_pass=descend_pass)
    own = dict(sweep=made.sweep, search=made.search) | passes
    own = {name: one_launch(kernel, name, launches) for name, kernel in own.items()}
    wrapped = replace(kernels.torch_kernels(), **own)
    with mock.patch.dict(kernels.KERNELS, {KIND: lambda: wrapped}):
        yield launches


def statistics(columns: int, place: bool) -> Moments:
    """Return moments of inputs that the quantized network changes, and extra rows, on the card or on the CPU."""
    g = torch.Generator().manual_seed(0)
    tokens = 2 * columns
    X = torch.randn(tokens, columns, generator=g) * (1 + torch.arange(columns) % 7)
    X[:, 1:] += 0.5 * X[:, :-1]
    X_hat = X + 0.05 * torch.randn(X.shape, generator=g)

    def of(rows: slice, dtype: torch.dtype) -> Moments:
        x, x_hat = X[rows], X_hat[rows]
        H, C = ((each.T @ x_hat / len(x)).to(dtype) for each in (x_hat, x))
        return Moments(H=H, C=C, tokens=len(x), alive=torch.ones(columns, dtype=torch.bool))

    held = of(slice(tokens - tokens // 5, None), torch.float32)
    extra = Extra(X_hat=X_hat[:64], X=X[:64])
    moments = replace(of(slice(None), torch.float64), held_out=held, extra=extra)
    return tree_of(moments) if place else moments


def tree_of(moments: Moments) -> Moments:
    """Return moments on the card."""
    held, extra = moments.held_out, moments.extra
    parts = {
        name: Pretend(getattr(moments, name), 0) for name in ("H", "C", "alive") if getattr(moments, name) is not None
    }
    if extra is not None:
        extra = Extra(X_hat=Pretend(extra.X_hat, 0), X=None if extra.X is None else Pretend(extra.X, 0))
    return replace(moments, **parts, held_out=None if held is None else tree_of(held), extra=extra)


def count(out: int, columns: int, scheme: AnyScheme) -> Gpu:
    """Solve a layer on a pretended GPU, the first of its stage, and send it to the CPU; return what was counted."""
    W = torch.randn(out, columns, generator=torch.Generator().manual_seed(1)) / columns**0.5
    with pretended(memory=1 << 45) as gpu:
        inputs, there = LayerInput.of(statistics(columns, True)), Pretend(W, 0)
        gpu.forget()
        target, storage = corrected(there, inputs, scheme), StepStorage(torch.float16)
        rows = solve_layer("a layer", there, target, inputs, LayerPlan(scheme=scheme), storage)
        joined([rows], inputs, scheme, name="a layer")[0].to("cpu")
    return gpu


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, columns, scheme, *words = *map(int, sys.argv[1:3]), *sys.argv[3:]
    if words == ["before"]:
        gpu = count(out, columns, SCHEMES[scheme])
    else:
        with kernels_of_cuda():
            gpu = count(out, columns, SCHEMES[scheme])
    print(f"{gpu.total.launches:,} launches, {gpu.total.synchronizations + gpu.total.to_host} waits")
    for name, traffic in sorted(gpu.traffic.items(), key=lambda row: -row[1].launches):
        print(f"{traffic.launches:8,} {name}")
