"""Sensitivity of the network's predictions to errors in each output of each layer, from one backward pass.

One block is in memory at a time, forwards and then backwards. The quantization of weights plays no part here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.network_ends import finish, readout
from nearplane.calibration.positions import PositionWeights, octaves
from nearplane.calibration.states_on_disk import StatesOnDisk
from nearplane.calibration.walk import Followed
from nearplane.errors import CalibrationError
from nearplane.models.divergence import NOTHING_TO_MEASURE, predicts_always_the_same
from nearplane.models.kinds import continues_text, has_head
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.system.device import repeatable_backward
from nearplane.system.matmul_choice import Library
from nearplane.system.matmul_library import library_in_use, using_library
from nearplane.system.memory import release
from nearplane.system.progress import Progress, Tracked, in_steps, silent
from nearplane.system.ranks import ONE_PROCESS, Ranks

MAX_TOKENS, MIN_TOKENS, MIN_WINDOWS = 16384, 2048, 4
# at least, which suffice for weights of positions; docs/log.md has the measurements
POSITION_TOKENS, POSITION_WINDOWS = 1024, 2
BATCH_TOKENS, BATCH_WINDOWS = 1024, 8  # largest batch of a forward pass
LOGITS = 2**24  # in memory at a time, where a network predicts token by token
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Cost of errors in nats of KL(original || quantized) per token, to second order.

    Args:
        outputs: {layer: (out,) `E[g_i^2]`}. Independent errors `e` in the outputs cost `1/2 sum_i E[g_i^2] e_i^2`. For
            embeddings: the frequency of every row. Layers that did not run, or whose outputs do not depend on hidden
            states, are absent.
        embeddings: (hidden, hidden) matrix G if embeddings are quantized: errors `e` of a row cost `1/2 e G e^T` per
            use. For tied embeddings G includes the cost in the head, and `outputs` has the head's under their name.
        positions: {layer: weights of positions}. Only layers in blocks that multiply the same number of tokens of every window.
    """

    outputs: dict[str, Tensor]
    embeddings: Tensor | None = None
    positions: dict[str, PositionWeights] = field(default_factory=dict)


@dataclass(slots=True)
class _Squares:
    """Sums over tokens of squared gradients, by layer, in float64.

    Attributes:
        outputs: (out,) each.
        octaves: (octaves,) each, of all outputs together, by octave of positions.
        lengths: Number of tokens of each window that a layer multiplies; 0 where this is not the same for all.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    octaves: dict[str, Tensor] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, squares: Tensor) -> None:
        """Add (out,) sums over tokens."""
        self.outputs[name] = self.outputs[name] + squares if name in self.outputs else squares

    def place(self, name: str, squares: Tensor, windows: int) -> None:
        """Add (tokens,) sums over outputs, of so many windows; 0: tokens have no known places in windows."""
        if not windows or len(squares) % windows:
            self.lengths[name] = 0
            return
        by_position = squares.view(windows, -1).sum(0)
        length = len(by_position)
        self._join(name, length, torch.stack([by_position[part].sum() for part in octaves(length)]))

    def add(self, other: _Squares) -> _Squares:
        """Add the sums of another batch to these, and return these."""
        for name, each in other.outputs.items():
            self.count(name, each)
        for name, length in other.lengths.items():
            self._join(name, length, other.octaves.get(name))
        return self

    def to(self, device: torch.device) -> _Squares:
        """Return the sums on a device."""
        outputs, sums = (
            {name: each.to(device) for name, each in part.items()} for part in (self.outputs, self.octaves)
        )
        return _Squares(outputs, sums, self.lengths)

    def by_position(self) -> dict[str, PositionWeights]:
        """Return the weights of positions by layer."""
        lengths = self.lengths.items()
        return {name: PositionWeights.measured(self.octaves[name], length) for name, length in lengths if length}

    def _join(self, name: str, length: int, sums: Tensor | None) -> None:
        if self.lengths.setdefault(name, length) != length:
            self.lengths[name] = 0
        elif sums is not None:
            self.octaves[name] = self.octaves[name] + sums if name in self.octaves else sums


def sensitivity(
    model: Model,
    tokens: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    positions: bool = False,
    ranks: Ranks = ONE_PROCESS,
    progress: Progress = silent,
) -> Sensitivity:
    """Measure the diagonal `E[g_i^2]` of the Fisher information of every layer's outputs; g: log-likelihood's gradient.

    Labels are drawn from the network's own predictions. For a network without head, hidden states are drawn from a
    normal distribution around the last ones, whose standard deviation is their root mean square. For the outputs of the
    head, the expectation over labels is computed exactly: `E[p_i (1 - p_i)]`.

    The time is that of about four forward passes of a sixteenth of the tokens, at least 2048 and at most 16384; with
    quantized embeddings an eighth, at least 4096; of four windows in any case. With `positions` it is that of two windows,
    or of 1024 tokens.
    The hidden states between all blocks are kept in a file, in the compute dtype, so that memory does not grow with the
    number of blocks.

    On several processes each takes some of the batches, if it is the diagonal of a network with a head, without embeddings.

    Args:
        model: The original model.
        tokens: (windows, seqlen) calibration tokens; the windows used are spread evenly.
        device, dtype: Device and dtype of the computation; float32 replaces float16, in which gradients underflow.
        seed: Seed of the labels.
        positions: Whether only the weights of positions are used.
        ranks: Processes of the run.
        progress: Display of the blocks, each of which is passed forwards and backwards.

    Raises:
        CalibrationError: A token is not in the vocabulary, or hidden states or gradients are not finite.
        FormatError: The folder for temporary files is full.
    """
    dtype = torch.float32 if dtype == torch.float16 else dtype
    count = sensitivity_windows(model, tokens, positions=positions)
    windows = tokens[torch.linspace(0, len(tokens) - 1, count).long()]
    every = windows.split(backward_batch(windows.shape[1]))
    divided = model.embeddings is None and has_head(model.network)
    if divided and ranks.others:
        ranks.start(_FollowedSensitivity(tokens, dtype, seed, library_in_use()))
    share = ranks.share(len(every)) if divided else range(len(every))
    batches = every[share.start : share.stop]
    blocks = model.blocks if batches else ()  # of few batches some ranks have none
    with torch.no_grad():
        stream = skeleton(model, batches or every[:1], device=device, dtype=dtype)
    # sums over tokens of squared gradients: of each batch where ranks add them in the order of batches, else of all in one
    apart, everything = divided and ranks.world > 1, _Squares()
    sums = [_Squares() if apart else everything for _ in batches]
    total = 2 * len(blocks)
    tracked = Tracked(range(total), "measuring which errors matter", total, work=_work(blocks), short=False)
    with (
        closing(StatesOnDisk()) as block_inputs,  # of all blocks, batch by batch
        in_steps(progress, tracked) as passed,
        torch.no_grad(),
    ):
        last_states = stream.quantized[: len(batches)]
        for block in model.in_turn(blocks, device):
            block_inputs.extend(last_states)
            with block.on(device, dtype, original=False):
                last_states = [
                    stream.noted(stream.forward(block, block.quantized, i, x)) for i, x in enumerate(last_states)
                ]
                stream.check(block)
            passed(1)
        gradients: list[Tensor] = []
        varies = False
        if batches:
            generator = torch.Generator().manual_seed(seed)
            for part in every[: share.start]:
                torch.rand(part.numel(), generator=generator)  # for labels of other ranks
            gradients, varies = _from_predictions(model, stream, batches, last_states, generator, sums)
        if has_head(model.network) and not any(ranks.gather(varies) if divided else [varies]):
            raise CalibrationError(NOTHING_TO_MEASURE)
        for block in model.in_turn(blocks[::-1], device):
            states = [block_inputs.pop() for _ in gradients][::-1]
            with block.on(device, dtype, original=False):
                gradients = _back(block, stream, states, gradients, sums)
            release()  # else the C library keeps freed activations of every block
            passed(1)
    if apart:
        gathered = [each for some in ranks.gather([one.to(CPU) for one in sums]) for each in some]
        everything = reduce(_Squares.add, gathered, everything).to(device)
    outputs = {name: total / windows.numel() for name, total in everything.outputs.items()}
    # gradients through keys and values that later blocks use are left out
    weights = {} if stream.shares else everything.by_position()
    if model.embeddings is None:
        return Sensitivity(outputs=outputs, positions=weights)
    if not model.tied:
        vocabulary = model.embeddings.layers[0].shape[0]
        counts = tokens.flatten().cpu().bincount(minlength=vocabulary) + 1
        outputs[model.embeddings.name] = (counts / (tokens.numel() + vocabulary)).to(device)
    G = second_moment(gradients) * _embedding_scale(model.embeddings, stream.quantized, batches) ** 2
    if model.tied:
        finish(model, Stream(last_states, {}, extra=stream.extra), windows, dtype)
        G += second_moment(last_states)
    return Sensitivity(outputs=outputs, embeddings=G, positions=weights)


def _work(blocks: Sequence[Block]) -> list[int]:
    """Return the work of passing the blocks forwards and then backwards, which takes about twice as long."""
    weights = [sum(parameter.numel() for parameter in block.empty.parameters()) for block in blocks]
    return weights + [2 * number for number in reversed(weights)]


@dataclass(frozen=True, slots=True)
class _FollowedSensitivity:
    """A measurement of rank 0, in which another rank takes part: it passes its share of the batches."""

    tokens: Tensor
    dtype: torch.dtype
    seed: int
    library: Library

    def __call__(self, followed: Followed) -> None:
        with using_library(self.library):
            place, ranks = followed.device.place, followed.device.ranks
            sensitivity(followed.model, self.tokens, device=place, dtype=self.dtype, seed=self.seed, ranks=ranks)


def sensitivity_windows(model: Model, tokens: Tensor, *, positions: bool = False) -> int:
    """Return the number of windows of (windows, seqlen) `tokens` that `sensitivity` uses; see there."""
    multiple = 1 if model.embeddings is None else 2  # embeddings have a matrix of moments, outputs one number each
    if tokens.dim() > 2:  # images
        return min(len(tokens), max(MIN_WINDOWS, multiple * len(tokens) // 16))
    if positions:
        return min(len(tokens), max(POSITION_WINDOWS, POSITION_TOKENS // tokens.shape[1]))
    count = min(max(multiple * tokens.numel() // 16, multiple * MIN_TOKENS), MAX_TOKENS)
    return min(len(tokens), max(MIN_WINDOWS, count // tokens.shape[1]))


def backward_batch(seqlen: int) -> int:
    """Return the number of windows that pass backwards at once: a pass keeps all activations of a block."""
    return max(1, min(BATCH_WINDOWS, BATCH_TOKENS // seqlen))


def second_moment(states: Sequence[Tensor]) -> Tensor:
    """Return (hidden, hidden) float64 `E[x x^T]` over all tokens of batches (windows, seqlen, hidden)."""
    rows = [x.flatten(0, 1).double() for x in states]
    total = torch.zeros(rows[0].shape[1], rows[0].shape[1], dtype=torch.float64, device=rows[0].device)
    for x in rows:
        total += x.T @ x
    return total / sum(len(x) for x in rows)


def _embedding_scale(embeddings: Block, hidden: Sequence[Tensor], tokens: Sequence[Tensor]) -> float:
    """Return the factor by which some networks scale the embeddings before the first block."""
    with embeddings.on(hidden[0].device, hidden[0].dtype, original=False) as block:
        rows = block.quantized_layers()[0].read()
        pairs = [(rows[part.to(x.device)], x.to(rows)) for part, x in zip(tokens, hidden, strict=True)]
    return float(sum((row * x).sum() for row, x in pairs) / sum(row.square().sum() for row, _ in pairs))


def _from_predictions(
    model: Model,
    stream: Stream,
    tokens: Sequence[Tensor],
    hidden: Sequence[Tensor],
    generator: torch.Generator,
    sums: Sequence[_Squares],
) -> tuple[list[Tensor], bool]:
    """Return the gradients of drawn labels' log-likelihood with respect to the hidden states after the last block.

    If the head is quantized, the squared gradients of its outputs are added to `sums` of each batch. Also returns whether
    predictions vary.
    """
    head, device = model.embeddings if model.tied else model.head, hidden[0].device
    gradients, varies = [], False
    with readout(model, stream, device=device, dtype=hidden[0].dtype) as logits, torch.enable_grad():
        for part, x, squares in zip(tokens, hidden, sums, strict=True):
            rows = []
            for window, state in zip(part, x, strict=True):
                if not has_head(model.network):
                    leaf = state[None].detach().requires_grad_()
                    output = logits(window[None], leaf)[0].float()
                    drawn = torch.randn(output.shape, generator=generator).to(device)
                    drawn /= output.detach().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-15)
                    rows.append(torch.autograd.grad((output * drawn).sum(), leaf)[0])
                    continue
                outputs, step = len(window), predicted_at_once(model, len(window))
                if step < outputs and not _predicts_token_by_token(logits, window, state):
                    step = outputs
                uniform, of_window = torch.rand(outputs, 1, generator=generator).to(device), []
                for start in range(0, outputs, step):  # logits are large
                    here = slice(start, start + step)
                    leaf = state[None] if step == outputs else state[None, here]
                    leaf = leaf.detach().requires_grad_()
                    part_of = window[None] if step == outputs else window[None, here]  # sound goes with whole windows
                    predicted = logits(part_of, leaf)[0].float().log_softmax(-1)
                    if not start:
                        varies |= not predicts_always_the_same(predicted.detach())
                    p = predicted.detach().exp()
                    if head is not None:
                        squares.count(head.name, (p * (1 - p)).sum(0).double())
                    likelihood = predicted.gather(-1, draw_labels(p, uniform[here])).sum()
                    of_window.append(torch.autograd.grad(likelihood, leaf)[0])
                    del predicted, p, likelihood
                rows.append(torch.cat(of_window, 1))
            gradients.append(torch.cat(rows))
    return _finite(gradients, "the head" if has_head(model.network) else "the end"), varies


@torch.no_grad()
def _predicts_token_by_token(logits: Callable[..., Tensor], window: Tensor, state: Tensor) -> bool:
    """Return whether the end of a network predicts a token of a window (tokens,) by its hidden state alone."""
    if state.shape[:-1] != window.shape:
        return False
    two, one = (logits(window[None, a:2], state[None, a:2])[0, -1].float() for a in (0, 1))
    return torch.allclose(two, one, rtol=1e-3, atol=1e-3 * float(two.abs().max()))


def predicted_at_once(model: Model, tokens: int) -> int:
    """Return how many tokens of a window are predicted at once: all, where a network may look at whole windows at its end."""
    if not continues_text(model.network):
        return tokens
    return min(tokens, max(1, LOGITS // len(model.network.get_input_embeddings().weight)))


def draw_labels(p: Tensor, uniform: Tensor) -> Tensor:
    """Return (tokens, 1) int64 labels that follow probabilities p (tokens, vocabulary), by uniform (tokens, 1) in [0, 1).

    A GPU adds floats in an order that is not fixed, so that labels might differ from run to run; it adds integers.
    """
    if p.device.type == "cpu":
        return torch.searchsorted(p.cumsum(-1), uniform).clamp(max=p.shape[-1] - 1)
    sums = (p.double() * 2**40).long().cumsum(-1)
    return torch.searchsorted(sums, (uniform.double() * sums[:, -1:]).long(), right=True)


def _finite(gradients: list[Tensor], name: str) -> list[Tensor]:
    """Return gradients if all are finite, for which a device is waited for once; else raise CalibrationError."""
    if not torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all():
        raise CalibrationError(
            f"Gradients are NaN or Inf before {name}. Check the weights. Where they are right, --rows equal at a rate and "
            f'positions="equal" in Python need no gradients.'
        )
    return gradients


def _back(
    block: Block, stream: Stream, inputs: list[Tensor], gradients: list[Tensor], sums: Sequence[_Squares]
) -> list[Tensor]:
    """Propagate gradients from the outputs of a block to its inputs.

    Squared output gradients of each layer are added to `sums` of each batch.
    """
    now: list[tuple[int, _Squares]] = []  # windows of the batch that passes, and its sums, come last

    def count(layer: Layer, gradient: Tensor) -> None:
        rows, (windows, squares) = layer.outputs_of(gradient).double(), now[-1]  # (tokens, out)
        square = rows.square()
        squares.count(layer.name, square.sum(0))
        squares.place(layer.name, square.sum(1), 0 if layer.routed else windows)

    def after(layer: Layer, output: Tensor) -> None:
        if output.requires_grad:  # false if independent of the hidden states (projections of positions)
            output.register_hook(partial(count, layer))

    input_gradients = []
    with ExitStack() as hooks, torch.enable_grad(), repeatable_backward(inputs[0].device):
        for layer in block.quantized_layers():
            hooks.enter_context(layer.after(after))
        for i, (x, gradient, squares) in enumerate(zip(inputs, gradients, sums, strict=True)):
            now.append((len(x), squares))
            leaf = x.detach().requires_grad_()
            output = stream.forward(block, block.quantized, i, leaf)
            input_gradients.append(torch.autograd.grad(output, leaf, gradient)[0])
    return _finite(input_gradients, block.name)
