"""Search for channel scales to fold from norms into weights, before inputs are rounded to four bits.

The original network runs on a few windows. A channel whose outputs of a norm have the root mean square r gets the power of two
nearest to c / sqrt(r). That halves the range of magnitudes within the groups that share a step, and leaves the other half to
the weights, whose rounding the solver makes up for. A fold counts only if the block's outputs stay the same, which finds out
what else uses a norm's outputs, such as a residual stream: to the bit, or for norms that multiply by 1 + their weight as nearly
as float32 computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.one_forward import default_batch
from nearplane.calibration.rows import tensors_in
from nearplane.calibration.windows import Windows
from nearplane.errors import ModelError
from nearplane.models.folded import columns_of, scaled, scales_of, stored_scales
from nearplane.models.model import NOT_IN_MEMORY, Block, Model
from nearplane.models.structure import is_norm
from nearplane.number_formats import InputRounding
from nearplane.record.fold import Fold
from nearplane.system.device import Device
from nearplane.system.progress import Progress, phase, silent
from nearplane.system.sizes import counted

WINDOWS = 8  # that are looked at
BITS = 4  # of rounded inputs that gain by it
LARGEST = 12  # exponent, see `Fold`
OFFSETS = (0.0, 1.0)  # what norms add to their weight before they multiply by it
TOLERANCE = 1e-4  # of a channel, for norms with an offset: float32 computes to about 1e-6, bfloat16 to 4e-3

log = logging.getLogger("nearplane")


@torch.no_grad()
def fold(
    model: Model,
    windows: Windows,
    device: Device,
    inputs: Callable[[str], InputRounding | None],
    progress: Progress = silent,
    batch: int | None = None,
) -> None:
    """Read a network from now on with the channel scales that leave it as it is, where they even out rounded inputs.

    Args:
        model: The original model, without folds.
        windows: Calibration windows, of which the first few are used; without, nothing is folded.
        device: Device of the computation.
        inputs: Function from the name of a layer to the numbers to which its inputs are rounded; None: they are not. Norms
            without a layer behind them whose inputs have four bits stay as they are.
        progress: See `quantize`.
        batch: Number of windows that run together; None: the default.
    """
    names = {layer.name for layer in model.layers if (how := inputs(layer.name)) is not None and how.bits == BITS}
    if windows.fitted is None or not names:
        return
    found, left = list[Fold](), list[str]()
    with phase(progress, "looking at the channels of inputs"):
        for block, looked in _blocks(model, windows.fitted, device, batch):
            rounded = {layer.parameter for layer in block.layers if layer.name in names}
            for norm, weights in looked.weights.items():
                powers = powers_of(looked.squares[norm])
                if rounded.isdisjoint(weights) or not any(powers):
                    continue
                tried = (Fold.of(norm, tuple(weights), powers, offset) for offset in OFFSETS)
                if (new := next(filter(looked.stays_with, tried), None)) is None:
                    left.append(norm)
                else:
                    found.append(new)
    dtype = str(device.compute_dtype(model.dtype)).removeprefix("torch.")
    rest = f"; not those of {counted(len(left), 'norm')}, as the network would change in {dtype}" if left else ""
    if found or left:
        log.info("channel scales of %s are folded into the weights behind them%s", counted(len(found), "norm"), rest)
    model.fold(found)


@torch.no_grad()
def changing(model: Model, windows: Windows, device: Device) -> list[str]:
    """Return the norms whose folded scales change the network; see `fold` for the arguments."""
    assert windows.fitted is not None, "scales are folded in runs with windows"
    (folds, tuned), wrong = (model.folds, model.tuned), list[str]()
    model.fold(())  # `_blocks` folds the blocks in memory
    model.tuned = {}
    alone = [each for each in folds if not any(_is_within(each, block) for block in model.blocks)]
    wrong += [each.norm for each in alone]  # of no block, or of several
    for block, looked in _blocks(model, windows.fitted, device):
        ours = (each for each in folds if _is_within(each, block))
        wrong += [each.norm for each in ours if not looked.stays_with(each)]
    model.fold(folds)
    model.tuned = tuned
    return wrong


def _is_within(one: Fold, block: Block) -> bool:
    return all(name.startswith(f"{block.name}.") for name in (one.norm, *one.weights))


def _blocks(model: Model, windows: Tensor, device: Device, batch: int | None = None) -> Iterator[tuple[Block, _Looked]]:
    """Yield the blocks of the original in memory, with what was seen in them."""
    dtype = device.compute_dtype(model.dtype)
    batches = windows[:WINDOWS].split(batch or default_batch(windows.shape[1]))
    stream = skeleton(model, batches, device=device.place, dtype=dtype)
    for block in model.in_turn(model.blocks, device.place):
        with block.on(device.place, dtype, original=False):
            looked = _Looked(model, block, stream)
            outputs = [looked.passed(number) for number in range(len(batches))]
            yield block, looked
        stream.quantized = outputs
        stream.passed(block)


def powers_of(squares: Tensor) -> list[int]:
    """Return the exponent of every channel from the sum of its squares; channels that are always 0 get 0.

    >>> powers_of(torch.tensor([1.0, 16.0, 256.0, 0.0]))
    [1, 0, -1, 0]
    """
    logs = squares.double().log2() / 2
    alive = logs.isfinite()
    powers = (logs[alive].mean() - logs).where(alive, 0.0) / 2
    return [int(each) for each in powers.round().clamp(-LARGEST, LARGEST).tolist()]


class _Looked:
    """What is seen of norms while batches pass a block, which is in memory.

    Attributes:
        squares: {name of a norm: (channels,) sums of the squares of its outputs}.
        weights: {name of a norm: names of the parameters that multiply its outputs}.
    """

    def __init__(self, model: Model, block: Block, stream: Stream) -> None:
        assert block.quantized is not None, NOT_IN_MEMORY
        self.squares: dict[str, Tensor] = {}
        self.weights: dict[str, dict[str, None]] = {}
        self._model, self._block, self._stream, self._module = model, block, stream, block.quantized
        self._made: dict[int, tuple[str, Tensor]] = {}  # outputs of norms in the present pass, by address
        self._before: Tensor | None = None  # output of the block for the first batch

    def passed(self, batch: int) -> Tensor:
        """Return the output of the block for a batch."""
        with ExitStack() as hooks:
            for path, part in self._module.named_modules():
                name = f"{self._block.name}.{path}"
                if is_norm(part):
                    hooks.enter_context(part.register_forward_hook(partial(self._leaving, name)))
                elif columns := {
                    f"{name}.{key}": part.get_parameter(key).shape[dim] for key, dim in columns_of(part).items()
                }:
                    hooks.enter_context(
                        part.register_forward_pre_hook(partial(self._entering, columns), with_kwargs=True)
                    )
            output = self._stream.noted(self._run(batch))
        self._made.clear()
        self._before = output if batch == 0 else self._before
        return output

    def _run(self, batch: int, *, trial: bool = False) -> Tensor:
        return self._stream.forward(self._block, self._module, batch, self._stream.quantized[batch], trial=trial)

    def _leaving(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._made[output.data_ptr()] = (name, output)  # keeps its memory, which no other tensor then has
            squares = output.double().square().flatten(0, -2).sum(0)
            self.squares[name] = self.squares[name] + squares if name in self.squares else squares

    def _entering(self, columns: Mapping[str, int], _: nn.Module, args: Any, kwargs: Any) -> None:
        for each in tensors_in((*args, *kwargs.values())):
            name, output = self._made.get(each.data_ptr(), ("", each))
            if name and each.numel() == output.numel():
                fits = [key for key, count in columns.items() if count == len(self.squares[name])]
                self.weights.setdefault(name, {}).update(dict.fromkeys(fits))

    def stays_with(self, new: Fold) -> bool:
        """Fold the block in memory and return whether its output for the first batch stays the same; if not, undo it.

        It also fails if a tensor cannot be written like that.
        """
        model, weights = self._model, self._model.weights
        assert self._before is not None, "a batch has passed"
        try:
            for source, each in stored_scales(model.network, weights, [new], model.quantized_names).items():
                if source not in model.quantized_names and not each.offset:
                    tensor = weights.reader.read([source])[source]
                    there_and_back = scaled(scaled(tensor, each), each._replace(factors=1 / each.factors))
                    if not torch.equal(there_and_back, tensor):
                        return False
            scales = scales_of(model.network, new, weights.stored)
        except ModelError:
            return False
        parts = {name: self._module.get_parameter(name.removeprefix(f"{self._block.name}.")) for name in scales}
        kept = {name: part.clone() for name, part in parts.items()}
        for name, part in parts.items():
            part.copy_(scaled(part if name in new.weights else weights.stored(name).to(part.device), scales[name]))
        output = self._run(0, trial=True)
        moved, size = (
            (x.double().square().flatten(0, -2).sum(0).sqrt()) for x in (output - self._before, self._before)
        )
        if torch.equal(output, self._before) or (new.offset and bool((moved <= TOLERANCE * size).all())):
            self._before = output
            return True
        for name, part in parts.items():
            part.copy_(kept[name])
        return False
