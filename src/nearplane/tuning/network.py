"""Quantized network as a function of its trained tensors: divergence from the original model, and its gradient.

Codes, steps and small tensors of all blocks are in memory. Weights are decoded for one block at a time, in the forward pass and,
from hidden states kept before each block, in the backward pass. The original model has run before, block by block from disk; its
last hidden states are kept. Optimizer steps are taken in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearplane.calibration.activations import skeleton
from nearplane.calibration.network_ends import readout
from nearplane.calibration.recorder import tensors_within
from nearplane.calibration.shared_states import has_place_for_shared
from nearplane.calibration.states_on_disk import Keep
from nearplane.errors import CalibrationError, ModelError, RecipeError
from nearplane.models.divergence import Divergence, divergence
from nearplane.models.experts import make_observable, parameter_of
from nearplane.models.layers import Layer
from nearplane.models.model import NOT_IN_MEMORY, Block, Model
from nearplane.models.structure import is_norm
from nearplane.system.device import repeatable_backward
from nearplane.tuning.parameters import Tuned, TunedLayer, TunedVector
from nearplane.tuning.settings import Split
from nearplane.tuning.straight import through

MAX_LOGITS = 2**23  # logits in memory at a time, unless a single token has more


class TunedNetwork:
    """Quantized network with trained tensors.

    Args:
        model: The original model, on disk.
        matrices: Matrices of its layers, by name; their device is used, in float32.
        vectors: Weights of its norms, by name of the parameter.
        cut: Windows and batch size.
        ends: Values of quantized embeddings and head, by name of the parameter; they are not trained.
        inputs: Rounding of the inputs of layers by their names, as runtimes do it; gradients pass straight through it.
        hold: Whether weights and activations of all blocks are kept in memory during a step, which saves a quarter of the work.
        keep: Function that makes the lists of hidden states.
    """

    def __init__(
        self,
        model: Model,
        matrices: Mapping[str, TunedLayer],
        vectors: Mapping[str, TunedVector],
        cut: Split,
        *,
        ends: Mapping[str, Tensor] | None = None,
        inputs: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        hold: bool = False,
        keep: Keep = list,
    ) -> None:
        self._model, self._hold, self._keep, self._tokens = model, hold, keep, cut.windows.split(cut.batch)
        self._device = device = next(iter(matrices.values())).device
        self._ends = dict(ends or {})
        first = None if model.embeddings is None else self._ends.get(f"{model.embeddings.name}.weight")
        stream = skeleton(model, self._tokens, device=device, dtype=torch.float32, embeddings=first, keep=keep)
        floats = any(each.is_floating_point() for each in tensors_within(list(stream.extra)))
        if stream.shares and (floats or any(has_place_for_shared(calls[0]) for calls in stream.calls.values())):
            raise RecipeError(
                f"{type(model.network).__name__} cannot be tuned: its blocks hand more than hidden states to later ones, through "
                f"which tuning does not follow gradients. Use the checkpoint as it is."
            )
        self._stream, self._entering = stream, stream.quantized
        self._blocks: list[_Block] = []
        self._original = stream.original or keep(self._entering)  # hidden states of the original model
        for block in model.in_turn(model.blocks, device):
            with torch.no_grad(), block.on(device, torch.float32, original=False):
                module = block.quantized
                for i, x in enumerate(self._original):
                    self._original[i] = stream.noted(stream.forward(block, module, i, x))
                stream.check(block)
                self._blocks.append(_Block(block, matrices, vectors, inputs or {}))
        self._after = {name: each for name, each in vectors.items() if not any(name in b.vectors for b in self._blocks)}
        self._logits: Callable[..., Tensor] | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Hold the modules after the last block in memory; the other methods work only within this context."""
        with readout(self._model, self._stream, device=self._device, dtype=torch.float32) as logits:
            self._logits = logits
            yield
        self._logits = None

    @torch.no_grad()
    def divergences(self, batches: Iterable[int]) -> list[list[Divergence]]:
        """Return how far the quantized network's predictions are from the original model's: of each batch, part by part."""
        numbers = list(batches)
        hidden = self._keep(self._entering[i] for i in numbers)
        for block in self._blocks:
            tensors = block.tensors()
            for at, i in enumerate(numbers):
                hidden[at] = self.forward(block, tensors, i, hidden[at])
        after, found = self._values_after(), list[list[Divergence]]()
        for i, x in zip(numbers, hidden, strict=True):
            original = self._original[i]
            found.append(
                [
                    divergence(self._predicted(i, part, original[part]), self._predicted(i, part, x[part], after))
                    for part in self._parts(i)
                ]
            )
        return found

    def backward(self, batch: int) -> Divergence:
        """Add the gradient of the mean KL over a batch's tokens to the trained tensors; return the divergence.

        Raises:
            CalibrationError: Predictions or gradients are not finite.
        """
        with repeatable_backward(self._device):
            return self._backward(batch)

    def _backward(self, batch: int) -> Divergence:
        passes, hidden, total = [], self._entering[batch], Divergence()
        for block in self._blocks:
            passes.append(_Pass(self, block, batch, hidden, hold=self._hold))
            hidden = passes[-1].forward()
        predicted = self._tokens[batch][:, 1:].numel()
        after, original, gradient = _Leaves(self._values_after()), self._original[batch], torch.zeros_like(hidden)
        for part in self._parts(batch):
            with torch.no_grad():
                expected = self._predicted(batch, part, original[part])
            leaf = hidden.detach()[part].requires_grad_()
            log_probs = self._predicted(batch, part, leaf, after.leaves)
            kl = (expected.exp() * (expected - log_probs)).sum() / predicted
            gradient[part] = after.back(kl, leaf)
            total += divergence(expected, log_probs.detach())
        after.end()
        finite = {"the head": torch.isfinite(gradient).all()}
        while passes:
            name = passes[-1].name
            gradient = passes.pop().backward(gradient)
            finite[name] = torch.isfinite(gradient).all()
        for name, fine in zip(finite, torch.stack([*finite.values()]).tolist(), strict=True):  # a device waits once
            if not fine:
                raise CalibrationError(
                    f"Gradients are NaN or Inf before {name}, so the network cannot be tuned on this text."
                )
        return total

    def forward(self, block: _Block, tensors: Mapping[str, Tensor], batch: int, hidden: Tensor) -> Tensor:
        """Run a block with given tensors on one batch of hidden states."""

        def module(*args: Any, **kwargs: Any) -> Any:
            with block.rounding():
                return functional_call(block.block.empty, dict(tensors), args, kwargs)

        return self._stream.forward(block.block, module, batch, hidden)

    def _values_after(self) -> dict[str, Tensor]:
        """Return norms after the last block, and quantized embeddings and head."""
        return {name: each.values() for name, each in self._after.items()} | self._ends

    def _parts(self, batch: int) -> Iterator[tuple[slice, slice]]:
        """Yield parts of a batch whose logits are in memory together: its windows, and positions but the last, in slices."""
        windows, predicting = self._tokens[batch].shape[0], self._tokens[batch].shape[1] - 1
        most = tokens_at_once(self._model)
        across, along = max(1, most // predicting), min(most, predicting)
        for window in range(0, windows, across):
            for start in range(0, predicting, along):
                yield slice(window, window + across), slice(start, min(start + along, predicting))

    def _predicted(
        self, batch: int, part: tuple[slice, slice], hidden: Tensor, given: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return (windows, positions, vocabulary) log-probabilities of a part, float32."""
        assert self._logits is not None, "only within `with network.ready()`"
        return self._logits(self._tokens[batch][part], hidden, given).float().log_softmax(-1)


def tokens_at_once(model: Model) -> int:
    """Return the number of tokens whose logits are in memory together."""
    return max(1, MAX_LOGITS // int(model.network.get_input_embeddings().weight.shape[0]))


class _Block:
    """A block whose weights are decoded from codes and steps on demand; created while the block is in memory."""

    def __init__(
        self,
        block: Block,
        matrices: Mapping[str, TunedLayer],
        vectors: Mapping[str, TunedVector],
        inputs: Mapping[str, Callable[[Tensor], Tensor]],
    ) -> None:
        module, start = block.quantized, len(block.name) + 1
        assert module is not None, NOT_IN_MEMORY
        self.block = block
        self._rounded = [(layer, inputs[layer.name]) for layer in block.layers if layer.name in inputs]
        if any(layer.routed for layer, _ in self._rounded):
            make_observable(block.empty)
        self._layers: dict[str, list[tuple[Layer, TunedLayer]]] = {}  # by parameter, which experts may share
        for layer in block.quantized_layers():
            if layer.name in matrices:
                self._layers.setdefault(layer.parameter[start:], []).append((layer, matrices[layer.name]))
                matrices[layer.name].lean(layer.read())
        held = dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        )
        self.vectors = {
            name: each for name, each in vectors.items() if name[start:] in held and name.startswith(f"{block.name}.")
        }
        self._named: dict[str, Tuned] = {name[start:]: each for name, each in self.vectors.items()}
        decoded = self._layers.keys() | self._named.keys()
        self._small = {name: tensor.detach() for name, tensor in held.items() if name not in decoded}

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Let the layers of the block without weights multiply rounded inputs in this context."""
        with ExitStack() as hooks:
            for layer, change in self._rounded:
                hooks.enter_context(layer.replacing(partial(_straight, change)))
            yield

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, by name within the block."""
        decoded = {
            name: parameter_of([layer for layer, _ in both], [matrix.values() for _, matrix in both])
            for name, both in self._layers.items()
        }
        return self._small | decoded | {name: each.values() for name, each in self._named.items()}


def _straight(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return rounded inputs, with the gradient of those that are not."""
    return through(change(x.detach()), x)


class _Pass:
    """Forward and backward pass of a batch through a block.

    Args:
        network, block: The network and its block.
        batch, hidden: Number of the batch, and the hidden states (windows, seqlen, hidden) before the block.
        hold: Whether the forward pass keeps what the backward pass needs; else the block runs again.
    """

    def __init__(self, network: TunedNetwork, block: _Block, batch: int, hidden: Tensor, *, hold: bool) -> None:
        self._network, self._block, self._batch, self._hold = network, block, batch, hold
        self.name = block.block.name
        self._leaf = hidden.detach().requires_grad_()
        self._kept: tuple[_Leaves, Tensor] | None = None

    def forward(self) -> Tensor:
        """Return the hidden states after the block."""
        with torch.set_grad_enabled(self._hold):
            values, output = self._run()
        self._kept = (values, output) if self._hold else None
        return output.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        """Propagate a gradient back through the block, and add to the gradients of its trained tensors."""
        values, output = self._kept or self._run()
        before = values.back(output, self._leaf, gradient)
        values.end()
        return before

    def _run(self) -> tuple[_Leaves, Tensor]:
        values = _Leaves(self._block.tensors())
        return values, self._network.forward(self._block, values.leaves, self._batch, self._leaf)


class _Leaves:
    """Copies of computed tensors as leaves, which sum the gradients of a batch's parts before propagating them further."""

    def __init__(self, computed: dict[str, Tensor]) -> None:
        self._computed = computed
        self.leaves = {name: each.detach().requires_grad_(each.requires_grad) for name, each in computed.items()}
        self._trained = [name for name, leaf in self.leaves.items() if leaf.requires_grad]
        self._sums: dict[str, Tensor] = {}

    def back(self, output: Tensor, leaf: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Return the gradient of an output by `leaf`, and add its gradients by the leaves to their sums."""
        inputs = [leaf, *(self.leaves[name] for name in self._trained)]
        first, *others = torch.autograd.grad(output, inputs, gradient, allow_unused=True)
        for name, each in zip(self._trained, others, strict=True):
            if each is not None:
                self._sums[name] = self._sums[name].add_(each) if name in self._sums else each
        if first is None:
            raise ModelError("The predictions do not depend on hidden states, so the network cannot be tuned.")
        return first

    def end(self) -> None:
        """Propagate the sums to the tensors from which the computed tensors were made."""
        names = [name for name in self._trained if name in self._sums]
        if names:
            torch.autograd.backward([self._computed[name] for name in names], [self._sums[name] for name in names])


def norms_of(network: nn.Module) -> list[str]:
    """Return the names of norms' parameters, see `is_norm`."""
    names = []
    for path, module in network.named_modules():
        if is_norm(module):
            names += [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
    return names
