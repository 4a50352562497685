"""A quantized network as a function of what is trained of it: its divergence from the original, and the gradient of that.

Codes, steps and small tensors of all blocks are in memory; weights are made for one block at a time, forwards and, from the hidden
states kept before each, backwards. The original has run before, block by block from disk: what it leaves behind its last block is
kept. Knows blocks; not how steps are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearplane.calibration.activations import finite, readout, skeleton
from nearplane.errors import CalibrationError, ModelError
from nearplane.models.experts import parameter_of
from nearplane.models.kinds import Divergence, divergence
from nearplane.models.layers import Layer
from nearplane.models.model import ABSENT, Block, Model
from nearplane.tuning.parameters import Tuned, TunedLayer, TunedVector
from nearplane.tuning.settings import Split

ACTIVATIONS = 40  # numbers that a block keeps for the way back, for every number of its hidden states
FIXED, MOVING = 2, 18  # bytes of a code that stays, at most, and of one that is trained
LOGITS = 2**24  # numbers of logits that are in memory at a time: windows are taken together while they have no more


class TunedNetwork:
    """The quantized network.

    Args:
        model: the original, on disk.
        matrices: of its layers, by name; where they are is computed, in float32.
        vectors: of its norms, by name of the parameter.
        cut: the windows, and how many of them pass together.
        ends: values of embeddings and head of the quantized network, where they are not the original's, by name of the
            parameter; they stay.
        hold: whether all blocks' weights and activations of a step are in memory at a time: a quarter of the work less.
    """

    def __init__(
        self,
        model: Model,
        matrices: Mapping[str, TunedLayer],
        vectors: Mapping[str, TunedVector],
        cut: Split,
        *,
        ends: Mapping[str, Tensor] | None = None,
        hold: bool = False,
    ) -> None:
        self._model, self._hold, self._tokens = model, hold, cut.windows.split(cut.batch)
        self._device = device = next(leaf.device for each in matrices.values() for leaf in each.trained().values())
        self._ends = dict(ends or {})
        first = None if model.embeddings is None else self._ends.get(f"{model.embeddings.name}.weight")
        self._stream = skeleton(model, self._tokens, device=device, dtype=torch.float32, embeddings=first)
        self._entering = list(self._stream.quantized)
        self._blocks: list[_Block] = []
        self._behind = list(self._stream.original or self._entering)  # of the original
        for block in model.blocks:
            with torch.no_grad(), block.on(device, torch.float32, original=False):
                module = block.quantized
                self._behind = [
                    finite(self._stream.forward(block, module, i, x), block) for i, x in enumerate(self._behind)
                ]
                self._blocks.append(_Block(block, matrices, vectors))
        self._after = {name: each for name, each in vectors.items() if not any(name in b.vectors for b in self._blocks)}
        self._logits: Callable[..., Tensor] | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Hold what follows the last block in memory; the other methods work within."""
        with readout(self._model, self._stream, device=self._device, dtype=torch.float32) as logits:
            self._logits = logits
            yield
        self._logits = None

    @torch.no_grad()
    def divergence(self, batches: Iterable[int]) -> Divergence:
        """Compare the predictions of the quantized network with the original's."""
        numbers = list(batches)
        hidden = [self._entering[i] for i in numbers]
        for block in self._blocks:
            tensors = block.tensors()
            hidden = [self.forward(block, tensors, i, x) for i, x in zip(numbers, hidden, strict=True)]
        after, total = self._values_after(), Divergence()
        for i, x in zip(numbers, hidden, strict=True):
            for part in self._parts(i):
                total += divergence(
                    self._predicted(i, part, self._behind[i][part]), self._predicted(i, part, x[part], after)
                )
        return total

    def backward(self, batch: int) -> Divergence:
        """Add to the gradients of what is trained those of the mean KL over the tokens of a batch; return what it is.

        Raises:
            CalibrationError: predictions or gradients are not finite.
        """
        passes, hidden, total = [], self._entering[batch], Divergence()
        for block in self._blocks:
            passes.append(_Pass(self, block, batch, hidden, hold=self._hold))
            hidden = passes[-1].forward()
        predicted = self._tokens[batch][:, 1:].numel()
        after, parts = _Leaves(self._values_after()), []
        for part in self._parts(batch):
            with torch.no_grad():
                expected = self._predicted(batch, part, self._behind[batch][part])
            leaf = hidden.detach()[part].requires_grad_()
            found = self._predicted(batch, part, leaf, after.leaves)
            kl = (expected.exp() * (expected - found)).sum() / predicted
            parts.append(after.back(kl, leaf))
            total += divergence(expected, found.detach())
        gradient = _checked(torch.cat(parts), "the head")
        after.end()
        while passes:
            gradient = passes.pop().backward(gradient)
        return total

    def forward(self, block: _Block, tensors: Mapping[str, Tensor], batch: int, hidden: Tensor) -> Tensor:
        """Run a block with given tensors on one batch of hidden states."""

        def module(*args: Any, **kwargs: Any) -> Any:
            return functional_call(block.block.empty, dict(tensors), args, kwargs)

        return self._stream.forward(block.block, module, batch, hidden)

    def _values_after(self) -> dict[str, Tensor]:
        """Return the norms behind the last block, and what the quantized network has of embeddings and head."""
        return {name: each.values() for name, each in self._after.items()} | self._ends

    def _parts(self, batch: int) -> list[slice]:
        """Return the windows of a batch whose logits are in memory together."""
        windows, seqlen = self._tokens[batch].shape
        most = max(1, LOGITS // (seqlen * self._model.network.get_input_embeddings().weight.shape[0]))
        return [slice(start, start + most) for start in range(0, windows, most)]

    def _predicted(self, batch: int, part: slice, hidden: Tensor, given: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return (windows, seqlen - 1, vocabulary) float32 log-probabilities."""
        assert self._logits is not None, "only within `with network.ready()`"
        logits = self._logits(self._tokens[batch][part], hidden, given)
        return logits[:, :-1].float().log_softmax(-1)


class _Block:
    """A block whose weights are made from codes and steps when they are asked for; bound while the block is in memory."""

    def __init__(self, block: Block, matrices: Mapping[str, TunedLayer], vectors: Mapping[str, TunedVector]) -> None:
        module, start = block.quantized, len(block.name) + 1
        assert module is not None, ABSENT
        self.block = block
        self._layers: dict[str, list[tuple[Layer, TunedLayer]]] = {}  # by parameter, of which experts share one
        for layer in block.quantized_layers():
            if layer.name in matrices:
                self._layers.setdefault(layer.parameter[start:], []).append((layer, matrices[layer.name]))
                matrices[layer.name].lean(layer.read())
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        self.vectors = {
            name: each for name, each in vectors.items() if name[start:] in own and name.startswith(f"{block.name}.")
        }
        self._named: dict[str, Tuned] = {name[start:]: each for name, each in self.vectors.items()}
        made = self._layers.keys() | self._named.keys()
        self._small = {name: tensor.detach() for name, tensor in own.items() if name not in made}

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by their name in the block."""
        made = {
            name: parameter_of([layer for layer, _ in both], [matrix.values() for _, matrix in both])
            for name, both in self._layers.items()
        }
        return self._small | made | {name: each.values() for name, each in self._named.items()}


class _Pass:
    """A batch on its way through a block, forwards and back.

    Args:
        network, block: whose.
        batch, hidden: its number, and the hidden states (windows, seqlen, hidden) that enter the block.
        hold: whether all that the way back needs is kept on the way forwards; else the block runs again.
    """

    def __init__(self, network: TunedNetwork, block: _Block, batch: int, hidden: Tensor, *, hold: bool) -> None:
        self._network, self._block, self._batch, self._hold = network, block, batch, hold
        self._leaf = hidden.detach().requires_grad_()
        self._kept: tuple[_Leaves, Tensor] | None = None

    def forward(self) -> Tensor:
        """Return the hidden states behind the block."""
        with torch.set_grad_enabled(self._hold):
            values, output = self._run()
        self._kept = (values, output) if self._hold else None
        return output.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        """Take a gradient from behind the block to before it, and add to those of what is trained in it."""
        values, output = self._kept or self._run()
        before = _checked(values.back(output, self._leaf, gradient), self._block.block.name)
        values.end()
        return before

    def _run(self) -> tuple[_Leaves, Tensor]:
        values = _Leaves(self._block.tensors())
        return values, self._network.forward(self._block, values.leaves, self._batch, self._leaf)


class _Leaves:
    """Tensors cut from what they are made of, so that parts of a batch add to their gradients before these go on."""

    def __init__(self, made: dict[str, Tensor]) -> None:
        self._made = made
        self.leaves = {name: each.detach().requires_grad_(each.requires_grad) for name, each in made.items()}
        self._wanted = [name for name, leaf in self.leaves.items() if leaf.requires_grad]
        self._sums: dict[str, Tensor] = {}

    def back(self, output: Tensor, leaf: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Take a gradient from an output to a leaf, which is returned, and add that to the tensors'."""
        inputs = [leaf, *(self.leaves[name] for name in self._wanted)]
        first, *rest = torch.autograd.grad(output, inputs, gradient, allow_unused=True)
        for name, found in zip(self._wanted, rest, strict=True):
            if found is not None:
                self._sums[name] = self._sums[name].add_(found) if name in self._sums else found
        if first is None:
            raise ModelError("The predictions do not depend on hidden states: the network cannot be tuned.")
        return first

    def end(self) -> None:
        """Take the sums on to what the tensors are made of."""
        names = [name for name in self._wanted if name in self._sums]
        if names:
            torch.autograd.backward([self._made[name] for name in names], [self._sums[name] for name in names])


def _checked(gradient: Tensor, name: str) -> Tensor:
    """Return a gradient that came back through a part of the network, if it is finite."""
    if not torch.isfinite(gradient).all():
        raise CalibrationError(f"Gradients are NaN or Inf before {name}: the network cannot be tuned on this text.")
    return gradient


def needed(model: Model, windows: Tensor, *, batch: int, codes: int) -> tuple[int, int]:
    """Return about how many bytes of memory tuning takes: as blocks are streamed, and with all of them held; see `TunedNetwork`.

    Args:
        model: the original.
        windows: (windows, seqlen) tokens.
        batch: windows that pass together.
        codes: how many codes are trained.
    """
    blocks = [sum(layer.shape[0] * layer.shape[1] for layer in block.layers) for block in model.blocks]
    inside = sum(p.numel() for block in model.blocks for p in block.empty.parameters())
    ends = sum(p.numel() for p in model.network.parameters()) - inside
    width = model.network.get_input_embeddings().weight.shape[1]
    logits = min(LOGITS, batch * windows.shape[1] * model.network.get_input_embeddings().weight.shape[0])
    small = 4 * (ends + inside - sum(blocks))  # with what is in blocks and not quantized
    common = FIXED * sum(blocks) + (MOVING - FIXED) * codes + small + 8 * windows.numel() * width + 16 * logits
    passing = 4 * batch * windows.shape[1] * width * ACTIVATIONS
    return common + 12 * max(blocks) + passing, common + 12 * sum(blocks) + passing * len(blocks)


def norms_of(network: nn.Module) -> list[str]:
    """Return the names of the parameters of norms: of modules that have a weight, and of parameters nothing but vectors."""
    found = []
    for path, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if "weight" in own and all(each.dim() == 1 and each.is_floating_point() for each in own.values()):
            found += [f"{path}.{name}" for name in own]
    return found
