"""What of a network can be quantized: its blocks, by structure, and the matrices in them, by exact type.

Knows modules; not where their weights come from, nor what becomes of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from nearplane.errors import ModelError

Kind = Literal["Linear", "Conv1D", "Conv2d", "Embedding"]
IGNORED = "ignored"
NOT_HANDLED = "is of no type that is handled"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer(ABC):
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
    """

    name: str
    shape: tuple[int, int]
    module: nn.Module
    calls: int = 1
    adds: bool = False

    kind: ClassVar[Kind]
    convolves: ClassVar[bool] = False

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

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return the (out, in) matrix, in the memory of the parameter wherever that can be."""

    def arranged(self, values: Tensor) -> Tensor:
        """Return (out, in) `values` in the shape of the parameter, the inverse of `matrix`."""
        return values.view(self.weight.shape)

    def read(self) -> Tensor:
        """Return the weights in memory of their own: (out, in) float32, or float64 if the module is."""
        values = self.matrix().detach()
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        return values.to(wide, copy=True, memory_format=torch.contiguous_format)

    def write(self, values: Tensor) -> None:
        """Put (out, in) `values` in the module, in its own dtype."""
        self.weight.data.copy_(self.arranged(values))

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows that the matrix multiplies when the module is given `x`: (tokens, in), in its order."""
        return x.reshape(-1, x.shape[-1])

    def share(self, x: Tensor, hidden: Tensor) -> float:
        """Return how often `x` holds a number for every token of the block's input; no integer: some tokens are left out."""
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
    """Of a Linear."""

    __slots__ = ()
    kind = "Linear"

    def matrix(self) -> Tensor:
        """Return the parameter, which is (out, in)."""
        return self.weight


class EmbeddingLayer(Layer):
    """Of embeddings, whose rows are looked up: (vocabulary, hidden)."""

    __slots__ = ()
    kind = "Embedding"

    def matrix(self) -> Tensor:
        """Return the parameter, which is (vocabulary, hidden)."""
        return self.weight


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

    def share(self, x: Tensor, hidden: Tensor) -> float:
        """Return 1: places are no tokens."""
        return 1.0

    def same_input(self, x: Tensor) -> tuple[Any, ...]:
        """Return also how patches are taken."""
        return (*Layer.same_input(self, x), self._unfolding)

    @property
    def _unfolding(self) -> tuple[Any, ...]:
        conv: Any = self.module
        return (conv.kernel_size, conv.dilation, conv.padding, conv.stride)


def as_layer(name: str, module: nn.Module) -> Layer | None:
    """View a module as one matrix; None if it is of no type that is handled. Subclasses (routers) are not."""
    kind, conv = type(module), cast(Any, module)
    weight: Any = getattr(module, "weight", None)
    if kind is nn.Linear:
        return LinearLayer(name=name, shape=tuple(weight.shape), module=module)
    if kind is Conv1D:
        return Conv1DLayer(name=name, shape=tuple(weight.shape[::-1]), module=module)
    if kind is nn.Conv2d and (conv.groups, conv.padding_mode, type(conv.padding)) == (1, "zeros", tuple):
        return Conv2dLayer(name=name, shape=(weight.shape[0], weight[0].numel()), module=module)
    return None


def find_layers(block: nn.Module, prefix: str, ignore: Sequence[str] = ()) -> tuple[list[Layer], list[tuple[str, str]]]:
    """Find the matrices of a block.

    Args:
        block: the module to look into.
        prefix: its name in the whole model.
        ignore: regular expressions; what one of them is found in (`re.search`, on the full name) stays as it is.

    Returns:
        The layers in module order, and (name, reason) of every other module with a floating-point weight of two or more
        dimensions of its own: the reason is its type, or `IGNORED`.
    """
    layers: list[Layer] = []
    skipped: list[tuple[str, str]] = []
    for path, module in block.named_modules():
        name = f"{prefix}.{path}" if path else prefix
        own = [p for p in module.parameters(recurse=False) if p.dim() >= 2 and p.is_floating_point()]
        if not own:
            continue
        layer = as_layer(name, module)
        if any(re.search(pattern, name) for pattern in ignore):
            skipped.append((name, IGNORED))
        elif layer is None:
            shapes = ", ".join("x".join(map(str, p.shape)) for p in own)
            skipped.append((name, f"{type(module).__name__} ({shapes}) {NOT_HANDLED}"))
        else:
            layers.append(layer)
    return layers, skipped


def find_ends(
    network: PreTrainedModel, ignore: Sequence[str] = (), *, embeddings: bool, head: bool
) -> tuple[Layer | None, Layer | None, list[tuple[str, str]]]:
    """Find the matrices before and behind the blocks: input embeddings, of which rows are looked up, and the head.

    Args:
        network: to look into.
        ignore: as for `find_layers`; of tied embeddings, the name of either leaves both out.
        embeddings, head: which are wanted. Where they are tied both are one matrix, which is found as the embeddings.

    Returns:
        Embeddings, head, and (name, reason) of what is wanted and not handled.
    """
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    names = {module: name for name, module in network.named_modules()}
    tied = outputs is not None and inputs.weight is outputs.weight
    found: list[Layer | None] = []
    left: list[tuple[str, str]] = []
    wanted = ((inputs, embeddings or (tied and head)), (outputs, head and not tied))
    for module, asked in wanted:
        name = names.get(module, "")
        layer: Layer | None = None
        called = (name, names[outputs]) if tied else (name,)
        if asked and any(re.search(pattern, each) for pattern in ignore for each in called):
            left.append((name, IGNORED))
        elif asked and isinstance(module, nn.Embedding):  # subclasses scale what was looked up
            layer = EmbeddingLayer(name=name, shape=(module.num_embeddings, module.embedding_dim), module=module)
        elif asked and (module is None or (layer := as_layer(name, module)) is None):
            left.append((name or "head", f"{type(module).__name__} {NOT_HANDLED}"))
        found.append(layer)
    return found[0], found[1], left


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of blocks that make up the depth of a network.

    It is the outermost ModuleList of transformers' GradientCheckpointingLayers, the largest one if there are several;
    without any, the ModuleList with the most parameters among those whose every member holds a matrix.

    Raises:
        ModelError: there is no such list.
    """
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    marked: list[tuple[str, nn.ModuleList]] = []
    for name, module in lists:  # named_modules goes from the outside in
        inside = any(name.startswith(f"{outer}.") for outer, _ in marked)
        if not inside and all(isinstance(member, GradientCheckpointingLayer) for member in module):
            marked.append((name, module))
    found = marked or [(name, module) for name, module in lists if all(find_layers(member, "")[0] for member in module)]
    if not found:
        raise ModelError(
            f"no blocks found in {type(model).__name__}: it has no list of modules that all hold a Linear, Conv1D or "
            f"Conv2d. nearplane quantizes models made of a stack of blocks."
        )
    return max(found, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
