"""The kinds of layers: views of one weight matrix, however its module stores and applies it.

Knows modules; not what becomes of their weights. Experts, of which many lie in one parameter, are in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from nearplane.models.conversion import Weights

# what a subclass may have of its own and still compute the same
HARMLESS = {"__init__", "extra_repr", "__module__", "__doc__", "__qualname__", "__annotations__", "__constants__"}
HARMLESS |= {"__static_attributes__", "__firstlineno__"}
EQUAL = {
    "transformers.models.falcon.modeling_falcon.FalconLinear"
}  # have a forward of their own that is that of Linear
NOT_RUN = {"torch.nn.modules.linear.NonDynamicallyQuantizableLinear"}  # torch's attention takes their weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A view of one weight matrix, however its module stores it: `output rows = rows(x) @ read().T + bias`.

    A subclass is a kind of layer: it says how the matrix lies in the parameter and which rows it multiplies.

    Args:
        name: of the layer in the whole model, "model.layers.0.self_attn.q_proj".
        shape: (out, in).
        module: that holds it; on the meta device while the weights are on disk.
        calls: how often one forward runs the module, once calibration has looked.
        adds: whether the output is added to a residual stream as it is, once calibration has looked.

    Attributes:
        kind: how the module stores and applies it.
        convolves: whether the module is given (images, channels, places) and returns that, not rows along the last dimension.
        routed: whether it is one of several experts, of which every token takes some; see `experts.py`.
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
        """Return the name of the layer in a checkpoint made of this one."""
        return weights.written_name(self.parameter).removesuffix(".weight")

    def copies(self, weights: Weights) -> list[str]:
        """Return the names in the checkpoint of what holds it, several where what is tied is stored again."""
        return weights.copies(self.parameter)

    def stored_alone(self, weights: Weights) -> bool:
        """Return whether a checkpoint made of this one can hold it by a name of its own."""
        return weights.stored_alone(self.parameter)

    def matrix(self) -> Tensor:
        """Return the (out, in) matrix, in the memory of the parameter wherever that can be."""
        return self.weight

    def arranged(self, values: Tensor) -> Tensor:
        """Return (out, in) `values` in the shape of the parameter, the inverse of `matrix`."""
        return values.view(self.weight.shape)

    def read(self) -> Tensor:
        """Return the weights in memory of their own: (out, in) float32, or float64 if the module is."""
        values = self.matrix().detach()
        wide = torch.promote_types(values.dtype, torch.float32)
        return values.to(wide, copy=True, memory_format=torch.contiguous_format)

    def write(self, values: Tensor) -> None:
        """Put (out, in) `values` in the module, in its own dtype."""
        self.weight.data.copy_(self.arranged(values))

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows that the matrix multiplies when the module is given `x`: (tokens, in), in its order."""
        return x.reshape(-1, x.shape[-1])

    def outputs_of(self, output: Tensor) -> Tensor:
        """Return (tokens, out) the outputs of the matrix in what the module returned, or in a gradient by that."""
        return output.reshape(-1, self.shape[0])

    def share(self, x: Tensor, hidden: Tensor) -> float:
        """Return how often `x` holds a number for every token of the block's input; no integer: some tokens are left out.

        It is 1 of places of an image, which are no tokens, and of experts, of which all tokens are shown with their routing.
        """
        if self.convolves or self.routed:
            return 1.0
        return x.shape[:-1].numel() / hidden.shape[:-1].numel()

    def same_input(self, x: Tensor) -> tuple[Any, ...]:
        """Return what this layer, given `x`, has in common with others if they multiply the same rows."""
        return (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)

    def before(self, see: Callable[[Layer, Tensor], None]) -> RemovableHandle:
        """Call `see(layer, input)` whenever the layer is about to run, until the handle is removed."""
        return self.module.register_forward_pre_hook(
            lambda module, args, kwargs: see(self, args[0] if args else kwargs["input"]), with_kwargs=True
        )

    def after(self, see: Callable[[Layer, Tensor], None]) -> RemovableHandle:
        """Call `see(layer, output)` whenever the layer has run."""
        return self.module.register_forward_hook(lambda module, args, output: see(self, output))

    def within(self, root: nn.Module, prefix: str) -> Self:
        """Return the same view in a copy of a part of the model, whose name with a dot behind is `prefix`; "" for all of it."""
        return replace(self, module=root.get_submodule(self.parameter.removeprefix(prefix).rpartition(".")[0]))


class LinearLayer(Layer):
    """Of a Linear, or of what computes the same; see `is_linear`."""

    __slots__ = ()
    kind = "Linear"


class EmbeddingLayer(Layer):
    """Of embeddings, whose rows are looked up: (vocabulary, hidden)."""

    __slots__ = ()
    kind = "Embedding"


class Conv1DLayer(Layer):
    """Of GPT-2's Conv1D, a Linear that stores (in, out)."""

    __slots__ = ()
    kind = "Conv1D"

    def matrix(self) -> Tensor:
        """Return the transpose of the parameter."""
        return self.weight.T

    def arranged(self, values: Tensor) -> Tensor:
        """Return the transpose."""
        return values.T


class Conv2dLayer(Layer):
    """Of a Conv2d in one group, zero-padded: each output place multiplies a patch of the image."""

    __slots__ = ()
    kind = "Conv2d"
    convolves = True

    def matrix(self) -> Tensor:
        """Return (out, channels * height * width)."""
        return self.weight.flatten(1)

    def rows(self, x: Tensor) -> Tensor:
        """Return the patches, one a row."""
        patches = nn.functional.unfold(x, *self._unfolding)
        return patches.transpose(1, 2).reshape(-1, self.shape[1])  # patches: (images, in, places)

    def outputs_of(self, output: Tensor) -> Tensor:
        """Return the outputs of all places, one place a row."""
        return output.movedim(1, -1).reshape(-1, self.shape[0])

    def same_input(self, x: Tensor) -> tuple[Any, ...]:
        """Return also how patches are taken."""
        return (*Layer.same_input(self, x), self._unfolding)

    @property
    def _unfolding(self) -> tuple[Any, ...]:
        conv: Any = self.module
        return (conv.kernel_size, conv.dilation, conv.padding, conv.stride)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what a Linear does: it is one, or of a subclass that is known to or changes no method.

    Routers are of subclasses that do something else.
    """
    kind = type(module)
    called = f"{kind.__module__}.{kind.__qualname__}"
    if not issubclass(kind, nn.Linear) or called in NOT_RUN:
        return False
    between = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    return called in EQUAL or all(vars(each).keys() <= HARMLESS for each in between)


def as_layer(name: str, module: Any) -> Layer | None:
    """View a module as one matrix; None if it is of no type that is handled."""
    if is_linear(module):
        return LinearLayer(name=name, shape=tuple(module.weight.shape), module=module)
    if type(module) is Conv1D:
        return Conv1DLayer(name=name, shape=tuple(module.weight.shape[::-1]), module=module)
    if type(module) is nn.Conv2d and (module.groups, module.padding_mode, type(module.padding)) == (1, "zeros", tuple):
        return Conv2dLayer(name=name, shape=(len(module.weight), module.weight[0].numel()), module=module)
    return None
