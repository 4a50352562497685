"""How much the network's predictions mind errors in each output of each layer: one pass back through the blocks.

One block is in memory at a time, forwards and then backwards; knows nothing of how weights are quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, finish, finite, readout, skeleton
from nearplane.calibration.states_on_disk import StatesOnDisk
from nearplane.errors import CalibrationError
from nearplane.models.kinds import has_head
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.system.memory import release

MOST_TOKENS, LEAST_TOKENS = 16384, 2048
BATCH = 8  # windows that pass through a block at a time
RUN_ROWS = 256  # outputs next to each other whose gradients are multiplied with each other, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What errors cost, in nats of KL(original || quantized) per token, to second order.

    Args:
        outputs: by layer (out,) `E[g_i^2]`: independent errors `e` in its outputs cost `1/2 sum_i E[g_i^2] e_i^2`. Of embeddings,
            how often every row is looked up. Layers that did not run, or whose outputs do not depend on hidden states, are absent.
        embeddings: (hidden, hidden), if the model has embeddings to quantize: errors `e` of a row cost `1/2 e G e^T` each time.
            If they are tied, with what they cost the head, whose outputs `outputs` then holds under their name.
        together: by layer, of every run of up to `RUN_ROWS` outputs next to each other, (run, run) `E[g g^T]`: errors `e` in them
            cost `1/2 e G e^T`. Only of layers in blocks, and where asked for.
    """

    outputs: dict[str, Tensor]
    embeddings: Tensor | None = None
    together: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)


def sensitivity(
    model: Model,
    tokens: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    together: Collection[str] = (),
) -> Sensitivity:
    """Measure the diagonal of the Fisher information of every layer's outputs: `E[g_i^2]`, g the gradient of the log-likelihood.

    Labels are drawn from the network's own predictions; of a network without head, hidden states are drawn from a normal
    distribution around its last ones, whose standard deviation is their root mean square. Of the head's outputs, the expectation
    over labels is `E[p_i (1 - p_i)]`.

    Takes about four forwards of a sixteenth of the tokens, at least 2048 and at most 16384 of them, of an eighth and 4096 if there
    are embeddings to quantize, of a quarter and 8192 if outputs are looked at together; the hidden states between all blocks are
    kept for the way back in a file, in the compute dtype: memory does not grow with the number of blocks.

    Args:
        model: on disk.
        tokens: (windows, seqlen) calibration tokens; windows are taken evenly from all of them.
        device, dtype: where and in what to compute; gradients underflow in float16, so that stands for float32.
        seed: of the labels.
        together: layers of whose outputs more than the diagonal is measured.

    Raises:
        CalibrationError: a token is not in the vocabulary, or hidden states or gradients are not finite.
        FormatError: the folder for temporary files is full.
    """
    dtype = torch.float32 if dtype == torch.float16 else dtype
    count = windows_of_the_pass(model, tokens, joined=bool(together))
    windows = tokens[torch.linspace(0, len(tokens) - 1, count).long()]
    batches = windows.split(BATCH)
    with torch.no_grad():
        stream = skeleton(model, batches, device=device, dtype=dtype)
    runs: dict[str, tuple[Tensor, ...]] = {}
    with closing(StatesOnDisk()) as entering, torch.no_grad():  # of all blocks, batch after batch
        behind = stream.quantized
        for block in model.blocks:
            entering.extend(behind)
            with block.on(device, dtype, original=False):
                behind = [finite(stream.forward(block, block.quantized, i, x), block) for i, x in enumerate(behind)]
        gradients, found = _from_predictions(model, stream, batches, behind, seed)
        for block in reversed(model.blocks):
            states = [entering.pop() for _ in gradients][::-1]
            with block.on(device, dtype, original=False):
                gradients, sums, products = _back(block, stream, states, gradients, together)
            release()  # activations in pieces, of which the C library would keep some of every block
            found |= sums
            runs |= {
                name: tuple((total / windows.numel()).float() for total in each) for name, each in products.items()
            }
    found = {name: total / windows.numel() for name, total in found.items()}
    if model.embeddings is None:
        return Sensitivity(outputs=found, together=runs)
    if not model.tied:
        vocabulary = model.embeddings.layers[0].shape[0]
        often = tokens.flatten().cpu().bincount(minlength=vocabulary) + 1
        found[model.embeddings.name] = (often / (tokens.numel() + vocabulary)).to(device)
    G = second_moment(gradients) * _looked_up(model.embeddings, stream.quantized, batches) ** 2
    if model.tied:
        finish(model, Stream(behind, {}, extra=stream.extra), windows, dtype)
        G += second_moment(behind)
    return Sensitivity(outputs=found, embeddings=G, together=runs)


def windows_of_the_pass(model: Model, tokens: Tensor, *, joined: bool = False) -> int:
    """Return how many of the windows (windows, seqlen) the pass takes; `joined`: outputs are looked at together."""
    more = 1 if model.embeddings is None else 2  # their moments are matrices, of outputs there is one number each
    more = 4 if joined else more  # matrices that are factored
    wanted = min(max(more * tokens.numel() // 16, more * LEAST_TOKENS), MOST_TOKENS)
    return min(len(tokens), max(1, wanted // tokens.shape[1]))


def second_moment(states: Sequence[Tensor]) -> Tensor:
    """Return (hidden, hidden) float64 `E[x x^T]` over all tokens of batches (windows, seqlen, hidden)."""
    rows = [x.flatten(0, 1).double() for x in states]
    total = torch.zeros(rows[0].shape[1], rows[0].shape[1], dtype=torch.float64, device=rows[0].device)
    for x in rows:
        total += x.T @ x
    return total / sum(len(x) for x in rows)


def _looked_up(embeddings: Block, hidden: Sequence[Tensor], tokens: Sequence[Tensor]) -> float:
    """Return the factor that some networks put on the embeddings that enter the first block."""
    with embeddings.on(hidden[0].device, hidden[0].dtype, original=False) as block:
        rows = block.quantized_layers()[0].read()
        pairs = [(rows[part.to(x.device)], x.to(rows)) for part, x in zip(tokens, hidden, strict=True)]
    return float(sum((row * x).sum() for row, x in pairs) / sum(row.square().sum() for row, _ in pairs))


def _from_predictions(
    model: Model, stream: Stream, tokens: tuple[Tensor, ...], hidden: Sequence[Tensor], seed: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the gradients of the log-likelihood of drawn labels by the hidden states behind the last block.

    Also, if the head is to be quantized, the sum over tokens of the squares by its outputs.
    """
    head, device = model.embeddings if model.tied else model.head, hidden[0].device
    sums = {} if head is None else {head.name: torch.zeros(head.layers[0].shape[0], dtype=torch.float64, device=device)}
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    with readout(model, stream, device=device, dtype=hidden[0].dtype) as logits, torch.enable_grad():
        for part, x in zip(tokens, hidden, strict=True):
            rows = []
            for window, state in zip(part, x, strict=True):  # one at a time: logits are large
                leaf = state[None].detach().requires_grad_()
                output = logits(window[None], leaf)[0].float()
                if has_head(model.network):
                    predicted = output.log_softmax(-1)
                    p = predicted.detach().exp()
                    for total in sums.values():
                        total += (p * (1 - p)).sum(0)
                    uniform = torch.rand(len(p), 1, generator=generator).to(device)
                    labels = torch.searchsorted(p.cumsum(-1), uniform).clamp(max=p.shape[-1] - 1)
                    likelihood, place = predicted.gather(-1, labels).sum(), "the head"
                else:
                    drawn = torch.randn(output.shape, generator=generator).to(device)
                    drawn /= output.detach().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-15)
                    likelihood, place = (output * drawn).sum(), "the end"
                rows.append(_finite(torch.autograd.grad(likelihood, leaf)[0], place))
            gradients.append(torch.cat(rows))
    return gradients, sums


def _finite(gradient: Tensor, name: str) -> Tensor:
    """Return a gradient that came back through a part of the network, if it is finite."""
    if not torch.isfinite(gradient).all():
        raise CalibrationError(
            f"Gradients are NaN or Inf before {name}. Check the checkpoint; --rows equal does without gradients."
        )
    return gradient


def _back(
    block: Block, stream: Stream, entering: list[Tensor], gradients: list[Tensor], together: Collection[str] = ()
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, list[Tensor]]]:
    """Take gradients from behind a block to before it.

    Also returns the sums over tokens of their squares by layer outputs, and of their products within runs of outputs.
    """
    sums: dict[str, Tensor] = {}
    products: dict[str, list[Tensor]] = {}

    def count(layer: Layer, gradient: Tensor) -> None:
        rows = layer.outputs_of(gradient).double()  # (tokens, out)
        square = rows.square().sum(0)
        sums[layer.name] = sums[layer.name] + square if layer.name in sums else square
        if layer.name in together:
            parts = [run.T @ run for run in rows.tensor_split(-(-layer.shape[0] // RUN_ROWS), dim=1)]
            before = products.get(layer.name)
            products[layer.name] = parts if before is None else [a + b for a, b in zip(before, parts, strict=True)]

    def after(layer: Layer, output: Tensor) -> None:
        if output.requires_grad:  # not so where it does not depend on the hidden states (projections of positions)
            output.register_hook(partial(count, layer))

    before = []
    with ExitStack() as hooks, torch.enable_grad():
        for layer in block.quantized_layers():
            hooks.enter_context(layer.after(after))
        for i, (x, gradient) in enumerate(zip(entering, gradients, strict=True)):
            leaf = x.detach().requires_grad_()
            output = stream.forward(block, block.quantized, i, leaf)
            before.append(_finite(torch.autograd.grad(output, leaf, gradient)[0], block.name))
    return before, sums, products
