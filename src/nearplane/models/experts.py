"""Experts whose matrices lie in stacked parameters: every matrix of every expert as a layer, and the rows that it multiplies.

transformers keeps the experts of a block in one module with 3-D parameters, and lets its forward be replaced: `ExpertsInterface`.
The forward here computes what transformers' own does and stops twice on the way, before gate and up of all experts and before down
of all, to show all rows with their routing. Blocks in memory run it, see `observable`; other copies of the network do not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle
from transformers.integrations.moe import ExpertsInterface

from nearplane.models.conversion import Names, Weights
from nearplane.models.layers import Layer

NAME = "nearplane"  # of the forward here, among transformers' implementations of experts
Side = Literal["up", "down"]  # of an expert: what is given hidden states (gate as well), and what gives them back


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What the experts of a block are about to multiply, for one batch.

    Args:
        x: (tokens, in) what all experts choose rows of; (pairs, in) where `apart`.
        token: (pairs,) token of every pair of a token and an expert that it is routed to; by expert, ascending within each.
        ends: where the pairs of every expert end.
        tokens: in the batch.
        apart: whether every pair has a row of its own.
    """

    x: Tensor
    token: Tensor
    ends: tuple[int, ...]
    tokens: int
    apart: bool

    def count(self, expert: int) -> int:
        """Return how many tokens are routed to an expert."""
        return self.ends[expert] - (self.ends[expert - 1] if expert else 0)

    def of(self, expert: int) -> slice:
        """Return which pairs are those of an expert."""
        return slice(self.ends[expert - 1] if expert else 0, self.ends[expert])

    def rows(self, expert: int) -> Tensor:
        """Return (pairs of an expert, in) the rows that it multiplies."""
        here = self.of(expert)
        return self.x[here] if self.apart else self.x[self.token[here]]

    def only(self, experts: Sequence[int]) -> Routed:
        """Return what some experts multiply, in memory of its own; of the others no pairs."""
        counts = [self.count(expert) if expert in experts else 0 for expert in range(len(self.ends))]
        if sum(counts) == self.ends[-1]:
            return replace(self, x=self.x.clone())
        token = torch.cat([self.token[self.of(expert)] for expert in experts])
        rows = torch.cat([self.rows(expert) for expert in experts])
        return replace(self, x=rows, token=token, ends=tuple(accumulate(counts)), apart=True)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many bytes it takes to keep what all experts multiply, and to keep a row for every pair."""
        return self.x.nbytes, self.ends[-1] * self.x.shape[1] * self.x.itemsize

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory that the rows lie in."""
        return self.x.untyped_storage()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLayer(Layer):
    """Of one matrix of one expert: some rows or columns of a slice of a 3-D parameter.

    Args:
        stored: name of the matrix in a checkpoint made of the one it comes from.
        sources: names in that one of what holds it: a tensor of its own, or one of all experts.
        holder: name of the parameter.
        expert: its number.
        outputs: which of the outputs of the slice are those of the matrix.
        transposed: whether the slice is (in, out).
    """

    kind = "Expert"
    routed = True

    stored: str
    sources: tuple[str, ...]
    holder: str
    expert: int
    outputs: slice
    transposed: bool

    @property
    def parameter(self) -> str:
        """The name of the 3-D parameter, in the whole model."""
        return self.holder

    def written(self, weights: Weights) -> str:
        """Return the name of the matrix in a checkpoint made of this one."""
        return self.stored

    def copies(self, weights: Weights) -> list[str]:
        """Return the names in the checkpoint of what holds it."""
        return list(self.sources)

    def stored_alone(self, weights: Weights) -> bool:
        """Return true: it has a name, if not every format's reader knows it."""
        return True

    @property
    def side(self) -> Side:
        """Which of the two products of an expert it is of."""
        return "down" if self.holder.endswith("down_proj") else "up"

    @property
    def weight(self) -> Tensor:
        """The 3-D parameter itself."""
        return self.module.get_parameter(self.holder.rpartition(".")[2])

    def matrix(self) -> Tensor:
        """Return the part of the parameter that is this matrix."""
        part = self.weight[self.expert]
        return (part.T if self.transposed else part)[self.outputs]

    def write(self, values: Tensor) -> None:
        """Put (out, in) `values` in their place in the parameter."""
        self.matrix().detach().copy_(values)

    def rows(self, x: Any) -> Any:
        """Return the rows that this expert multiplies."""
        return x.rows(self.expert)

    def same_input(self, x: Any) -> tuple[Any, ...]:
        """Return what all experts of a block have in common before this side: they are shown together."""
        return ("experts", self.side, x.x.data_ptr(), id(self.module))

    def before(self, see: Callable[[Layer, Any], None]) -> RemovableHandle:
        """Call `see(layer, routed)` whenever this side of the experts is about to run."""
        return self._watch(self.side, lambda routed: see(self, routed))

    def after(self, see: Callable[[Layer, Tensor], None]) -> RemovableHandle:
        """Call `see(layer, output)` whenever this expert has run on some rows, with all outputs of the slice."""
        return self._watch((self.side, self.expert), lambda output: see(self, output))

    def _watch(self, key: Any, call: Callable[[Any], None]) -> RemovableHandle:
        module: Any = self.module
        assert hasattr(module, "watched"), "only experts of blocks in memory are watched"
        callbacks = module.watched.setdefault(key, OrderedDict())
        handle = RemovableHandle(callbacks)
        callbacks[handle.id] = call
        return handle

    def outputs_of(self, output: Tensor) -> Tensor:
        """Return (rows, out) those of this matrix."""
        return output[:, self.outputs]


def parameter_of(layers: Sequence[Layer], values: Sequence[Tensor]) -> Tensor:
    """Return the parameter in which layers lie, made of their values; differentiable by these.

    Args:
        layers: all that lie in it: one, or every matrix of every expert.
        values: (out, in) of each.
    """
    experts: dict[int, list[tuple[ExpertLayer, Tensor]]] = {}
    for layer, value in zip(layers, values, strict=True):
        if not isinstance(layer, ExpertLayer):
            return layer.arranged(value)
        experts.setdefault(layer.expert, []).append((layer, value))
    return torch.stack([_slice(experts[number]) for number in sorted(experts)])


def _slice(parts: Sequence[tuple[ExpertLayer, Tensor]]) -> Tensor:
    """Return one expert's slice of a parameter, made of the values of its matrices."""
    rows = torch.cat([value for _, value in parts])
    places = torch.arange(len(rows), device=rows.device)
    place = torch.cat([places[layer.outputs] for layer, _ in parts])  # of every row
    if not torch.equal(place, places):
        rows = rows[place.argsort()]
    return rows.T if parts[0][0].transposed else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a module of experts stores their matrices.

    Args:
        up: name of the parameter of what multiplies hidden states, "gate_up_proj" if that is gate and up.
        transposed: whether slices are (in, out).
        halves: whether gate and up are one behind the other, not in turns.
        given: how its forward is called: with hidden states and routing, or with the rows of all tokens for every expert, which
            are 0 where a token is not routed to it.
    """

    up: str
    transposed: bool
    halves: bool
    given: Literal["routing", "rows"]


GIVEN_ROWS = "Llama4TextExperts"  # a class of transformers whose forward is not replaceable in its own way
MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "config")


def layout_of(module: nn.Module) -> Layout | None:
    """Return how a module stores experts whose forward can be replaced; None of all others."""
    stack: Any = module
    if type(module).__name__ == GIVEN_ROWS:
        found = Layout(up="gate_up_proj", transposed=True, halves=True, given="rows")
    elif all(hasattr(module, mark) for mark in MARKS):
        found = Layout(
            up="gate_up_proj" if stack.has_gate else "up_proj",
            transposed=stack.is_transposed,
            halves=stack.is_concatenated,
            given="routing",
        )
    else:
        return None
    parts: dict[str, nn.Parameter] = dict(module.named_parameters(recurse=False))
    return found if all(name in parts and parts[name].dim() == 3 for name in (found.up, "down_proj")) else None


def is_stack(module: nn.Module) -> bool:
    """Whether a module holds experts whose forward can be replaced."""
    return layout_of(module) is not None


def unwatched(name: str, root: nn.Module) -> str:
    """Return which part of a module runs the matrices of one parameter by itself, those that tokens reach; or nothing.

    Args:
        name: of the module.
        root: the module.
    """
    for path, module in root.named_modules():
        stacked = any(p.dim() >= 3 and min(p.shape) > 1 for p in module.parameters(recurse=False))
        if stacked and not isinstance(module, _ConvNd) and not is_stack(module):
            return f"{name}.{path}" if path else name
    return ""


def observable(root: nn.Module) -> None:
    """Let the experts in a part of a network run the forward here, which can be watched; changes nothing of other copies."""
    for module in root.modules():
        layout, stack = layout_of(module), cast(Any, module)
        if layout is None or hasattr(module, "watched"):
            continue
        stack.watched = {}  # who is called as they run: before a side with a `Routed`, after a matrix with its outputs
        if layout.given == "rows":
            stack.forward = MethodType(forward_of_rows, module)
            continue
        stack.config = copy(stack.config)
        stack.config._experts_implementation_internal = NAME
        if NAME not in ExpertsInterface._global_mapping:
            ExpertsInterface.register(NAME, forward)


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute (tokens, hidden) outputs of the experts, as transformers' own implementations do.

    Args:
        self: the module of the experts.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k) experts that each token is routed to.
        top_k_weights: (tokens, k) of their outputs.
    """
    tokens, k = top_k_index.shape
    experts = len(self.down_proj)
    order = torch.sort(top_k_index.reshape(-1), stable=True).indices  # (pairs,)
    counts = top_k_index.reshape(-1).bincount(minlength=experts)[:experts]
    ends = tuple(counts.cumsum(0).tolist())
    token = order[: ends[-1]] // k
    y = _computed(self, Routed(x=hidden_states, token=token, ends=ends, tokens=tokens, apart=False))
    none = hidden_states.new_zeros(tokens * k - ends[-1], hidden_states.shape[1])  # of pairs of no expert
    weighted = torch.cat([*y, none]) * top_k_weights.reshape(-1)[order, None]
    return weighted[order.argsort()].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def forward_of_rows(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute (experts * tokens, hidden) outputs of experts that are given a row for every token.

    Args:
        self: the module of the experts.
        hidden_states: (experts * tokens, hidden) rows by expert, 0 where a token is not routed to it.
    """
    rows = hidden_states.view(len(self.down_proj), -1, hidden_states.shape[-1])
    chosen = rows.any(-1)  # (experts, tokens)
    expert, token = chosen.nonzero(as_tuple=True)
    ends = tuple(chosen.sum(1).cumsum(0).tolist())
    y = _computed(self, Routed(x=rows[chosen], token=token, ends=ends, tokens=rows.shape[1], apart=True))
    found = torch.zeros_like(rows).index_put((expert, token), torch.cat(y))
    return found.view_as(hidden_states)


def _computed(self: Any, both: Routed) -> list[Tensor]:
    """Return (rows, hidden) outputs of every expert, not weighted; shows on the way what they multiply.

    What each expert computes is hidden from modes that watch functions: how much that is depends on the tokens.
    """
    layout = layout_of(self)
    assert layout is not None, "only stacks are made observable"
    biased = getattr(self, "has_bias", False)

    def multiplied(side: Side, name: str, routed: Routed) -> list[Tensor]:
        for see in (*self.watched.get(side, {}).values(),):
            see(routed)
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias") if biased else None
        outputs = []
        with torch._C.DisableTorchFunction():
            for expert in range(len(weight)):
                W, b = weight[expert], None if bias is None else bias[expert]
                outputs.append(linear(routed.rows(expert), W.T if layout.transposed else W, b))
        for expert, found in enumerate(outputs):
            for see in (*self.watched.get((side, expert), {}).values(),):
                see(found)
        return outputs

    up = multiplied("up", layout.up, both)
    with torch._C.DisableTorchFunction():
        inner = [_activated(self, layout, x) for x in up]
    h = torch.cat(inner)  # (pairs, intermediate)
    del up, inner
    y = multiplied("down", "down_proj", replace(both, x=h, apart=True))
    if getattr(self, "has_post_expert_norm", False):
        with torch._C.DisableTorchFunction():
            y = [self.post_expert_norm(x) for x in y]
    return y


def _activated(self: Any, layout: Layout, x: Tensor) -> Any:
    """Return what down multiplies, of the outputs of gate and up or of up alone."""
    if layout.up != "gate_up_proj":
        return self.act_fn(x)
    if layout.given == "routing":
        return self._apply_gate(x)
    gate, up = x.chunk(2, dim=-1)
    return up * self.act_fn(gate)


def stacked_layers(name: str, module: nn.Module, names: Callable[[str, int, int], Names]) -> Iterator[ExpertLayer]:
    """Yield every matrix of every expert of a module: gate and up of one expert after the other, then down.

    Args:
        name: of the module.
        module: for which `is_stack`.
        names: by parameter, the number of its parts, and that of the experts.
    """
    layout = layout_of(module)
    assert layout is not None, "only stacks have such layers"
    for attribute in (layout.up, "down_proj"):
        weight: Tensor = getattr(module, attribute)
        experts, *sides = weight.shape
        out, columns = sides[::-1] if layout.transposed else sides
        parts = 2 if attribute == "gate_up_proj" else 1
        holder = f"{name}.{attribute}"
        called = names(holder, parts, experts)
        for expert in range(experts):
            for part in range(parts):
                half = slice(part * (out // parts), (part + 1) * (out // parts))
                yield ExpertLayer(
                    name=called.layers[part][expert],
                    shape=(out // parts, columns),
                    module=module,
                    stored=called.stored[part][expert],
                    sources=called.sources[part][expert],
                    holder=holder,
                    expert=expert,
                    outputs=half if parts == 1 or layout.halves else slice(part, None, parts),
                    transposed=layout.transposed,
                )


def by_expert(group: Sequence[Layer]) -> dict[int, tuple[Layer, ...]]:
    """Return the layers of each expert in a group, in the order in which they come."""
    found: dict[int, list[Layer]] = {}
    for layer in group:
        assert isinstance(layer, ExpertLayer), "experts are shown apart from other layers"
        found.setdefault(layer.expert, []).append(layer)
    return {expert: tuple(layers) for expert, layers in found.items()}
