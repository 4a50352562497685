"""Experts in stacked parameters: every matrix of every expert as a layer, and the rows that it multiplies.

transformers keeps the experts of a block in one module with 3-D parameters whose forward can be replaced
(`ExpertsInterface`). The forward here computes the same as transformers' own. On the way it calls observers twice with
all rows and their routing: before gate and up of all experts, and before down of all. Only blocks in memory run it, see
`make_observable`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers.integrations.moe import ExpertsInterface

from nearplane.errors import RecipeError
from nearplane.models.conversion import Weights
from nearplane.models.expert_names import Names
from nearplane.models.layers import Layer, Layout, layout_of
from nearplane.system.matmul_library import repeatable_threads

NAME = "nearplane"  # name of the forward here among transformers' implementations of experts
Side = Literal["up", "down"]  # the two products of an expert: from hidden states (gate and up), and back to them


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Inputs of the experts of a block in one batch, with their routing.

    Args:
        x: (tokens, in) rows, from which each expert takes its own; (pairs, in) if `apart`.
        token: (pairs,) token of every pair of a token and an expert to which it is routed; by expert, then ascending.
        expert: (pairs,) expert of every pair.
        ends: Index after the last pair of every expert.
        tokens: Number of tokens in the batch.
        apart: Whether `x` has one row per pair.
    """

    x: Tensor
    token: Tensor
    expert: Tensor
    ends: tuple[int, ...]
    tokens: int
    apart: bool

    def count(self, expert: int) -> int:
        """Return the number of tokens that are routed to an expert."""
        return self.ends[expert] - (self.ends[expert - 1] if expert else 0)

    def of(self, expert: int) -> slice:
        """Return the slice of an expert's pairs."""
        return slice(self.ends[expert - 1] if expert else 0, self.ends[expert])

    def rows(self, expert: int) -> Tensor:
        """Return the rows (pairs, in) that an expert multiplies."""
        return self.at(self.of(expert))

    def at(self, pairs: slice | Tensor) -> Tensor:
        """Return the rows (pairs, in) of some pairs."""
        return self.x[pairs] if self.apart else self.x[self.token[pairs]]

    @property
    def keys(self) -> Tensor:
        """(pairs,) number of every pair among all tokens of all experts; ascending."""
        return self.expert * self.tokens + self.token

    def only(self, experts: Sequence[int]) -> Routed:
        """Return a copy with the pairs of some experts only."""
        counts = [self.count(expert) if expert in experts else 0 for expert in range(len(self.ends))]
        if sum(counts) == self.ends[-1]:
            return replace(self, x=self.x.clone())
        token, number = (torch.cat([each[self.of(e)] for e in experts]) for each in (self.token, self.expert))
        rows = torch.cat([self.rows(expert) for expert in experts])
        return replace(self, x=rows, token=token, expert=number, ends=tuple(accumulate(counts)), apart=True)

    @property
    def peak(self) -> float:
        """Largest magnitude of the rows."""
        return float(self.x.abs().max()) if self.x.numel() else 0.0

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of `x`, and bytes of one row per pair."""
        return self.x.nbytes, self.ends[-1] * self.x.shape[1] * self.x.itemsize

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the rows."""
        return self.x.untyped_storage()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLayer(Layer):
    """View of one matrix of one expert: some rows or columns of a slice of a 3-D parameter.

    Args:
        stored: Name of the matrix in a checkpoint of the quantized model.
        sources: Names of the original model's tensors that hold it: one of its own, or one of all experts.
        holder: Name of the 3-D parameter in the whole model.
        expert: Number of the expert.
        outputs: Outputs of the slice that belong to this matrix.
        transposed: Whether the slice is (in, out).
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
        """Return the name of the matrix in a checkpoint of the quantized model."""
        return self.stored

    def copies(self, weights: Weights) -> list[str]:
        """Return the stored names of the original tensors that hold it."""
        return list(self.sources)

    def stored_alone(self, weights: Weights) -> bool:
        """Return True: the matrix always has a name, even if not every format's reader knows it."""
        return True

    @property
    def side(self) -> Side:
        """The product of the expert to which this matrix belongs."""
        return "down" if self.holder.endswith("down_proj") else "up"

    @property
    def weight(self) -> Tensor:
        """The 3-D parameter itself."""
        return self.module.get_parameter(self.holder.rpartition(".")[2])

    def matrix(self) -> Tensor:
        """Return the (out, in) part of the parameter that is this matrix."""
        part = self.weight[self.expert]
        return (part.T if self.transposed else part)[self.outputs]

    def write(self, values: Tensor) -> None:
        """Write (out, in) `values` into the parameter."""
        self.matrix().detach().copy_(values)

    def rows(self, x: Any) -> Any:
        """Return the rows that this expert multiplies."""
        return x.rows(self.expert)

    def same_input(self, x: Any) -> tuple[Any, ...]:
        """Return the key that all experts of a block share before this side: their inputs are observed together."""
        return ("experts", self.side, x.x.data_ptr(), id(self.module))

    def before(self, see: Callable[[Layer, Any], None]) -> RemovableHandle:
        """Call `see(layer, routed)` whenever this side of the experts is about to run."""
        return self._watch(self.side, lambda routed: see(self, routed))

    def after(self, see: Callable[[Layer, Tensor], None]) -> RemovableHandle:
        """Call `see(layer, output)` whenever this expert has run, with all outputs of the slice."""
        return self._watch((self.side, self.expert), lambda output: see(self, output))

    def replacing(self, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Let this side of this expert multiply `change(rows)`; matrices that share the rows must agree on it."""
        return self._watch((self.side, self.expert, "rows"), change)

    def _watch(self, key: Any, call: Callable[[Any], Any]) -> RemovableHandle:
        module: Any = self.module
        assert hasattr(module, "watched"), "only experts of blocks in memory are observed"
        callbacks = module.watched.setdefault(key, OrderedDict())
        handle = RemovableHandle(callbacks)
        callbacks[handle.id] = call
        return handle

    def outputs_of(self, output: Tensor) -> Tensor:
        """Return the (rows, out) outputs of this matrix."""
        return output[:, self.outputs]


def parameter_of(layers: Sequence[Layer], values: Sequence[Tensor]) -> Tensor:
    """Return the parameter of some layers, assembled from their values; differentiable with respect to them.

    Args:
        layers: All layers of the parameter: one, or every matrix of every expert.
        values: (out, in) values of each layer.
    """
    experts: dict[int, list[tuple[ExpertLayer, Tensor]]] = {}
    for layer, value in zip(layers, values, strict=True):
        if not isinstance(layer, ExpertLayer):
            return layer.arranged(value)
        experts.setdefault(layer.expert, []).append((layer, value))
    return torch.stack([_slice(experts[number]) for number in sorted(experts)])


def _slice(parts: Sequence[tuple[ExpertLayer, Tensor]]) -> Tensor:
    """Return one expert's slice of a parameter, assembled from the values of its matrices."""
    rows = torch.cat([value for _, value in parts])
    in_order = torch.arange(len(rows), device=rows.device)
    position = torch.cat([in_order[layer.outputs] for layer, _ in parts])  # of every row
    if not torch.equal(position, in_order):
        rows = rows[position.argsort()]
    return rows.T if parts[0][0].transposed else rows


def make_observable(root: nn.Module) -> None:
    """Replace the forward of all experts in a part of a network by the one here; other copies keep theirs."""
    for module in root.modules():
        layout, stack = layout_of(module), cast(Any, module)
        if layout is None or hasattr(module, "watched"):
            continue
        stack.watched = {}  # {side, or (side, expert): observers; (side, expert, "rows"): what replaces its rows}
        if layout.called_with == "rows":
            stack.forward = MethodType(forward_of_rows, module)
            continue
        stack.config = copy(stack.config)
        stack.config._experts_implementation_internal = NAME
        if NAME not in ExpertsInterface._global_mapping:
            ExpertsInterface.register(NAME, forward)


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute (tokens, hidden) outputs of the experts, as transformers' own implementations do.

    Args:
        self: The module of the experts.
        hidden_states: (tokens, hidden) inputs.
        top_k_index: (tokens, k) experts to which each token is routed.
        top_k_weights: (tokens, k) weights of their outputs.
    """
    tokens, k = top_k_index.shape
    experts = len(self.down_proj)
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)  # (pairs,)
    numbers = torch.arange(experts, dtype=expert.dtype, device=expert.device)
    ends = tuple(torch.searchsorted(expert, numbers, right=True).tolist())  # the only time a device is waited for
    token, expert = order[: ends[-1]] // k, expert[: ends[-1]]
    routed = Routed(x=hidden_states, token=token, expert=expert, ends=ends, tokens=tokens, apart=False)
    y = _expert_outputs(self, routed)
    none = hidden_states.new_zeros(tokens * k - ends[-1], hidden_states.shape[1])  # pairs without an expert
    weighted = torch.cat([*y, none]) * top_k_weights.reshape(-1)[order, None]
    return weighted[order.argsort()].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def forward_of_rows(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute (experts * tokens, hidden) outputs of experts that take a row for every token.

    Args:
        self: The module of the experts.
        hidden_states: (experts * tokens, hidden) rows by expert; 0 where a token is not routed to the expert.
    """
    rows = hidden_states.view(len(self.down_proj), -1, hidden_states.shape[-1])
    chosen = rows.any(-1)  # (experts, tokens)
    expert, token = chosen.nonzero(as_tuple=True)
    ends = tuple(chosen.sum(1).cumsum(0).tolist())
    x, tokens = rows[expert, token], rows.shape[1]
    y = _expert_outputs(self, Routed(x=x, token=token, expert=expert, ends=ends, tokens=tokens, apart=True))
    outputs = torch.zeros_like(rows).index_put((expert, token), torch.cat(y))
    return outputs.view_as(hidden_states)


def _expert_outputs(self: Any, routed_input: Routed) -> list[Tensor]:
    """Return (rows, hidden) outputs of every expert, not weighted; calls the observers on the way.

    Torch function modes are off while an expert computes: the number of calls depends on the tokens.
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
                rows = routed.rows(expert)
                for change in [*self.watched.get((side, expert, "rows"), {}).values()][:1]:
                    rows = change(rows)
                with repeatable_threads(rows):
                    outputs.append(linear(rows, W.T if layout.transposed else W, b))
        for expert, output in enumerate(outputs):
            for see in (*self.watched.get((side, expert), {}).values(),):
                see(output)
        return outputs

    up = multiplied("up", layout.up, routed_input)
    with torch._C.DisableTorchFunction():
        inner = [_activated(self, layout, x) for x in up]
    h = torch.cat(inner)  # (pairs, intermediate)
    del up, inner
    y = multiplied("down", "down_proj", replace(routed_input, x=h, apart=True))
    if getattr(self, "has_post_expert_norm", False):
        with torch._C.DisableTorchFunction():
            y = [self.post_expert_norm(x) for x in y]
    return y


def _activated(self: Any, layout: Layout, x: Tensor) -> Any:
    """Return the input of down from the outputs of gate and up, or of up alone."""
    if layout.up != "gate_up_proj":
        return self.act_fn(x)
    if layout.called_with == "routing":
        return self._apply_gate(x)
    gate, up = x.chunk(2, dim=-1)
    return up * self.act_fn(gate)


def stacked_layers(name: str, module: nn.Module, names: Callable[[str, int, int], Names]) -> Iterator[ExpertLayer]:
    """Yield every matrix of every expert of a module: gate and up of one expert after the other, then down.

    Args:
        name: Name of the module.
        module: A module for which `is_stack` is true.
        names: Function from parameter name, number of parts and number of experts to the names of the matrices.
    """
    layout = layout_of(module)
    assert layout is not None, "only stacks have expert layers"
    for attribute in (layout.up, "down_proj"):
        weight: Tensor = getattr(module, attribute)
        experts, *sides = weight.shape
        out, columns = sides[::-1] if layout.transposed else sides
        parts = 2 if attribute == "gate_up_proj" else 1
        holder = f"{name}.{attribute}"
        matrix_names = names(holder, parts, experts)
        for expert in range(experts):
            for part in range(parts):
                half = slice(part * (out // parts), (part + 1) * (out // parts))
                yield ExpertLayer(
                    name=matrix_names.layers[part][expert],
                    shape=(out // parts, columns),
                    module=module,
                    stored=matrix_names.stored[part][expert],
                    sources=matrix_names.sources[part][expert],
                    holder=holder,
                    expert=expert,
                    outputs=half if parts == 1 or layout.halves else slice(part, None, parts),
                    transposed=layout.transposed,
                )


def refuse_parts(stacked: Sequence[Layer], kept: Sequence[Layer]) -> None:
    """Refuse to quantize only some of the matrices in one parameter.

    Args:
        stacked: All layers of a module.
        kept: The layers to quantize.

    Raises:
        RecipeError: Only some of the matrices are to be quantized; the message names the parameter.
    """
    whole, counts = (Counter(layer.parameter for layer in some) for some in (stacked, kept))
    for parameter, count in counts.items():
        if count < whole[parameter]:
            raise RecipeError(
                f"--ignore leaves out {whole[parameter] - count} of the {whole[parameter]} matrices in {parameter}, which can "
                f"only be quantized together. Leave all of them unquantized with --ignore "
                f"'{re.escape(parameter.rpartition('.')[0])}'."
            )


def by_expert(group: Sequence[Layer]) -> dict[int, tuple[Layer, ...]]:
    """Return {expert: its layers in the group}, in the order of the group."""
    experts: dict[int, list[Layer]] = {}
    for layer in group:
        assert isinstance(layer, ExpertLayer), "a group holds experts only, or none"
        experts.setdefault(layer.expert, []).append(layer)
    return {expert: tuple(layers) for expert, layers in experts.items()}
