"""Layers: views of one weight matrix, for every way in which modules store and apply it.

Experts, which share one parameter, are in `experts.py`; here they are only found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from nearplane.models.conversion import Weights

# attributes that a subclass of Linear may define without computing something else
ATTRIBUTES = {"__init__", "extra_repr", "__module__", "__doc__", "__qualname__", "__annotations__", "__constants__"}
ATTRIBUTES |= {"__static_attributes__", "__firstlineno__"}
LINEAR_SUBCLASSES = {
    "transformers.models.falcon.modeling_falcon.FalconLinear"
}  # subclasses with their own forward, which computes the same as Linear's
NOT_RUN = {"torch.nn.modules.linear.NonDynamicallyQuantizableLinear"}  # torch's attention only reads their weights
ROWS_CLASS = "Llama4TextExperts"  # class of transformers whose forward takes rows and is not in `ExpertsInterface`
STACK_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "config")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """View of one weight matrix in a module: `output rows = rows(x) @ read().T + bias`.

    A subclass is a kind of layer: it defines where the matrix lies in the parameter and which rows it multiplies.

    Args:
        name: Name of the layer in the whole model, "model.layers.0.self_attn.q_proj".
        shape: (out, in) of the matrix.
        module: The module with the matrix; on the meta device while the weights are on disk.
        calls: Number of runs of the module in one forward pass; 1 until calibration observes it.
        adds: Whether the output is added unchanged to a residual stream; False until calibration observes it.

    Attributes:
        kind: Type of the module.
        convolves: Whether inputs and outputs are (images, channels, height, width) instead of rows in the last
            dimension.
        routed: Whether this is one of several experts, to some of which every token is routed; see `experts.py`.
    """

    name: str
    shape: tuple[int, int]
    module: nn.Module
    calls: int = 1
    adds: bool = False

    kind: ClassVar[Literal["Linear", "Conv1D", "Conv2d", "Embedding", "Expert"]]
    convolves: ClassVar[bool] = False
    routed: ClassVar[bool] = False

    @property
    def parameter(self) -> str:
        """The name of the parameter that holds the matrix, in the whole model."""
        return f"{self.name}.weight"

    @property
    def weight(self) -> Tensor:
        """The parameter itself, as the module stores it."""
        stored = self.module.weight
        assert isinstance(stored, Tensor)
        return stored

    def written(self, weights: Weights) -> str:
        """Return the name of the layer in the checkpoint of the quantized model."""
        return weights.written_name(self.parameter).removesuffix(".weight")

    def copies(self, weights: Weights) -> list[str]:
        """Return the stored names of the matrix in the original model; several if tied weights are stored twice."""
        return weights.copies(self.parameter)

    def stored_alone(self, weights: Weights) -> bool:
        """Return whether the checkpoint of the quantized model can store the layer under a name of its own."""
        return weights.stored_alone(self.parameter)

    def matrix(self) -> Tensor:
        """Return the (out, in) matrix, in the memory of the parameter wherever possible."""
        return self.weight

    def arranged(self, values: Tensor) -> Tensor:
        """Return (out, in) `values` in the shape of the parameter, the inverse of `matrix`."""
        return values.view(self.weight.shape)

    def read(self) -> Tensor:
        """Return a copy of the weights: (out, in) float32, or float64 if the module has that dtype."""
        values = self.matrix().detach()
        wide = torch.promote_types(values.dtype, torch.float32)
        return values.to(wide, copy=True, memory_format=torch.contiguous_format)

    def write(self, values: Tensor) -> None:
        """Write (out, in) `values` into the module, in its dtype."""
        self.weight.data.copy_(self.arranged(values))

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows (tokens, in) that the matrix multiplies for the module's input `x`, in its order."""
        return x.reshape(-1, x.shape[-1])

    def outputs_of(self, output: Tensor) -> Tensor:
        """Return the rows (tokens, out) of the module's output, or of its gradient."""
        return output.reshape(-1, self.shape[0])

    def share(self, x: Tensor, hidden: Tensor) -> float:
        """Return the rows of `x` per token of the block's input; not an integer if `x` has only some of the tokens.

        It is 1 for convolutions, whose rows are not tokens, and for experts, whose input has all tokens with their
        routing.
        """
        if self.convolves or self.routed:
            return 1.0
        return x.shape[:-1].numel() / hidden.shape[:-1].numel()

    def same_input(self, x: Tensor) -> tuple[Any, ...]:
        """Return a key of the input `x`: layers with equal keys multiply the same rows."""
        return (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)

    def before(self, see: Callable[[Layer, Tensor], None]) -> RemovableHandle:
        """Call `see(layer, input)` whenever the layer is about to run, until the handle is removed."""
        return self.module.register_forward_pre_hook(
            lambda module, args, kwargs: see(self, args[0] if args else kwargs["input"]), prepend=True, with_kwargs=True
        )

    def replacing(self, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Let the layer multiply `change(input)`, until the handle is removed; `before` gives the input itself."""

        def replaced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["input"]
            x[..., :0]  # torch function modes see that the input is used; the original network has no further operation
            with torch._C.DisableTorchFunction():
                changed = change(x)
            return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"input": changed})

        return self.module.register_forward_pre_hook(replaced, with_kwargs=True)

    def after(self, see: Callable[[Layer, Tensor], None]) -> RemovableHandle:
        """Call `see(layer, output)` whenever the layer has run."""
        return self.module.register_forward_hook(lambda module, args, output: see(self, output))

    def under(self, root: nn.Module, prefix: str) -> Self:
        """Return this view in a copy of a submodule, whose name with a dot at the end is `prefix`; "": the model."""
        return replace(self, module=root.get_submodule(self.parameter.removeprefix(prefix).rpartition(".")[0]))


class LinearLayer(Layer):
    """View of a Linear, or of a module that computes the same; see `is_linear`."""

    __slots__ = ()
    kind = "Linear"


class EmbeddingLayer(Layer):
    """View of embeddings (vocabulary, hidden), whose rows are looked up."""

    __slots__ = ()
    kind = "Embedding"


class Conv1DLayer(Layer):
    """View of GPT-2's Conv1D, a Linear that stores (in, out)."""

    __slots__ = ()
    kind = "Conv1D"

    def matrix(self) -> Tensor:
        """Return the transpose of the parameter."""
        return self.weight.T

    def arranged(self, values: Tensor) -> Tensor:
        """Return the transpose of `values`."""
        return values.T


class Conv2dLayer(Layer):
    """View of a zero-padded Conv2d with one group: each output position multiplies a patch of the image."""

    __slots__ = ()
    kind = "Conv2d"
    convolves = True

    def matrix(self) -> Tensor:
        """Return the (out, channels * height * width) matrix."""
        return self.weight.flatten(1)

    def rows(self, x: Tensor) -> Tensor:
        """Return the patches, one per row."""
        patches = nn.functional.unfold(x, *self._unfolding)
        return patches.transpose(1, 2).reshape(-1, self.shape[1])  # patches: (images, in, positions)

    def outputs_of(self, output: Tensor) -> Tensor:
        """Return the outputs of all positions, one per row."""
        return output.movedim(1, -1).reshape(-1, self.shape[0])

    def same_input(self, x: Tensor) -> tuple[Any, ...]:
        """Return the key of the input together with the arguments of unfolding."""
        return (*Layer.same_input(self, x), self._unfolding)

    @property
    def _unfolding(self) -> tuple[Any, ...]:
        conv: Any = self.module
        return (conv.kernel_size, conv.dilation, conv.padding, conv.stride)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes the same as Linear: a subclass must be known to, or define no methods.

    Routers, for example, are subclasses of Linear that compute something else.
    """
    kind = type(module)
    class_name = f"{kind.__module__}.{kind.__qualname__}"
    if not issubclass(kind, nn.Linear) or class_name in NOT_RUN:
        return False
    subclasses = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    return class_name in LINEAR_SUBCLASSES or all(vars(each).keys() <= ATTRIBUTES for each in subclasses)


def as_layer(name: str, module: Any) -> Layer | None:
    """View a module as one matrix; None if its type is not supported."""
    if is_linear(module):
        return LinearLayer(name=name, shape=tuple(module.weight.shape), module=module)
    if type(module) is Conv1D:
        return Conv1DLayer(name=name, shape=tuple(module.weight.shape[::-1]), module=module)
    if type(module) is nn.Conv2d and (module.groups, module.padding_mode, type(module.padding)) == (1, "zeros", tuple):
        return Conv2dLayer(name=name, shape=(len(module.weight), module.weight[0].numel()), module=module)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Storage of the matrices in a module of experts.

    Args:
        up: Name of the parameter that multiplies hidden states: "gate_up_proj" if it holds gate and up.
        transposed: Whether slices are (in, out).
        halves: Whether the outputs of gate come before those of up; else they alternate.
        called_with: Arguments of its forward: hidden states and routing, or one row per expert and token, which is 0 if
            the token is not routed to the expert.
    """

    up: str
    transposed: bool
    halves: bool
    called_with: Literal["routing", "rows"]


def layout_of(module: nn.Module) -> Layout | None:
    """Return the storage of experts whose forward can be replaced; None for any other module."""
    stack: Any = module
    if type(module).__name__ == ROWS_CLASS:
        layout = Layout(up="gate_up_proj", transposed=True, halves=True, called_with="rows")
    elif all(hasattr(module, mark) for mark in STACK_ATTRIBUTES):
        layout = Layout(
            up="gate_up_proj" if stack.has_gate else "up_proj",
            transposed=stack.is_transposed,
            halves=stack.is_concatenated,
            called_with="routing",
        )
    else:
        return None
    parts: dict[str, nn.Parameter] = dict(module.named_parameters(recurse=False))
    return layout if all(name in parts and parts[name].dim() == 3 for name in (layout.up, "down_proj")) else None


def is_stack(module: nn.Module) -> bool:
    """Whether a module holds experts whose forward can be replaced."""
    return layout_of(module) is not None


def unwatched(name: str, root: nn.Module) -> str:
    """Return the name of a submodule with stacked matrices that cannot be observed; "" if there is none.

    Args:
        name: Name of the module.
        root: The module.
    """
    for path, module in root.named_modules():
        stacked = any(p.dim() >= 3 and min(p.shape) > 1 for p in module.parameters(recurse=False))
        if stacked and not isinstance(module, _ConvNd) and not is_stack(module):
            return f"{name}.{path}" if path else name
    return ""
