"""Search for channel scales to fold from norms into weights, before inputs are rounded to four bits.

The original network runs on a few windows. A channel whose outputs of a norm have the root mean square r gets the power of two
nearest to c / sqrt(r). That halves the range of magnitudes within the groups that share a step, and leaves the other half to
the weights, whose rounding the solver makes up for. A fold counts only if the block's outputs stay the same to the bit, which
finds out what else uses a norm's outputs: a residual stream, a weight that is 1 + what is stored.
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
from nearplane.models.folded import back, columns_of, scaled, scales_of, stored_scales
from nearplane.models.model import DTYPES, NOT_IN_MEMORY, Block, Model
from nearplane.models.structure import is_norm
from nearplane.number_formats import InputRounding
from nearplane.record.fold import Fold
from nearplane.system.device import Device
from nearplane.system.progress import Progress, phase, silent
from nearplane.system.sizes import counted

WINDOWS = 8  # that are looked at
BITS = 4  # of rounded inputs that gain by it
LARGEST = 12  # exponent, see `Fold`

log = logging.getLogger("nearplane")


@torch.no_grad()
def fold(
    model: Model,
    windows: Windows,
    device: Device,
    inputs: Callable[[str], InputRounding | None],
    progress: Progress = silent,
) -> None:
    """Read a network from now on with the channel scales that leave it as it is, where they even out rounded inputs.

    Args:
        model: The original model, without folds.
        windows: Calibration windows, of which the first few are used; without, nothing is folded.
        device: Device of the computation.
        inputs: Function from the name of a layer to the numbers to which its inputs are rounded; None: they are not. Norms
            without a layer behind them whose inputs have four bits stay as they are.
        progress: See `quantize`.
    """
    names = {layer.name for layer in model.layers if (how := inputs(layer.name)) is not None and how.bits == BITS}
    if windows.fitted is None or not names:
        return
    found, left = list[Fold](), list[str]()
    with phase(progress, "looking at the channels of inputs"):
        for block, seen, stays in _blocks(model, windows.fitted, device):
            rounded = {layer.parameter for layer in block.layers if layer.name in names}
            for norm, weights in seen.weights.items():
                new = Fold.of(norm, tuple(weights), powers_of(seen.squares[norm]))
                if rounded.isdisjoint(weights) or not any(new.powers):
                    continue
                if stays(new):
                    found.append(new)
                else:
                    left.append(norm)
    rest = f"; not those of {counted(len(left), 'norm')}, as the network would change" if left else ""
    log.info("channel scales of %s are folded into the weights behind them%s", counted(len(found), "norm"), rest)
    model.fold(found)


@torch.no_grad()
def changing(model: Model, windows: Windows, device: Device) -> list[str]:
    """Return the norms whose folded scales change the network; see `fold` for the arguments."""
    assert windows.fitted is not None, "scales are folded in runs with windows"
    folds, wrong = model.folds, list[str]()
    model.fold(())  # `_blocks` folds the blocks in memory
    for block, _, stays in _blocks(model, windows.fitted, device):
        wrong += [each.norm for each in folds if each.norm.startswith(f"{block.name}.") and not stays(each)]
    model.fold(folds)
    return wrong


def _blocks(model: Model, windows: Tensor, device: Device) -> Iterator[tuple[Block, _Seen, Callable[[Fold], bool]]]:
    """Yield the blocks of the original in memory, with what was seen in them and a function that tries a fold, see `_stays`."""
    dtype = device.compute_dtype(model.dtype)
    batches = windows[:WINDOWS].split(default_batch(windows.shape[1]))
    stream = skeleton(model, batches, device=device.place, dtype=dtype)
    for block in model.in_turn(model.blocks, device.place):
        with block.on(device.place, dtype, original=False):
            seen = _Seen(block)
            outputs = [seen.passed(stream, batch) for batch in range(len(batches))]
            yield block, seen, partial(_stays, model, block, stream, outputs[0])
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


class _Seen:
    """What is seen of norms while batches pass a block.

    Attributes:
        squares: {name of a norm: (channels,) sums of the squares of its outputs}.
        weights: {name of a norm: names of the parameters that multiply its outputs}.
    """

    def __init__(self, block: Block) -> None:
        self.squares: dict[str, Tensor] = {}
        self.weights: dict[str, dict[str, None]] = {}
        self._block = block
        self._made: dict[int, tuple[str, Tensor]] = {}  # by address

    def passed(self, stream: Stream, batch: int) -> Tensor:
        """Return the output of the block for a batch."""
        module = self._block.quantized
        assert module is not None, NOT_IN_MEMORY
        with ExitStack() as hooks:
            for path, part in module.named_modules():
                name = f"{self._block.name}.{path}"
                if is_norm(part):
                    hooks.enter_context(part.register_forward_hook(partial(self._leaving, name)))
                elif columns := {
                    f"{name}.{key}": part.get_parameter(key).shape[dim] for key, dim in columns_of(part).items()
                }:
                    hooks.enter_context(
                        part.register_forward_pre_hook(partial(self._entering, columns), with_kwargs=True)
                    )
            output = stream.noted(stream.forward(self._block, module, batch, stream.quantized[batch]))
        self._made.clear()
        return output

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


def _stays(model: Model, block: Block, stream: Stream, before: Tensor, new: Fold) -> bool:
    """Fold the block in memory and return whether its output for the first batch stays the same to the bit; if not, undo it.

    It also fails if a tensor is not stored for itself, or is to be written in a dtype that does not hold it.
    """
    module = block.quantized
    assert module is not None, NOT_IN_MEMORY
    try:
        stored_scales(model.network, model.weights, [new])
    except ModelError:
        return False
    scales = scales_of(model.network, new)
    parts = {name: module.get_parameter(name.removeprefix(f"{block.name}.")) for name in scales}
    for name, x in parts.items():
        (source, *_) = model.weights.copies(name)
        kind = DTYPES[model.reader.dtype(source)]
        if source not in model.quantized_names and scaled(x.to(kind), scales[name]).dtype != kind:
            return False
    for name, x in parts.items():
        x.copy_(scaled(x, scales[name]))
    if torch.equal(stream.forward(block, module, 0, stream.quantized[0], trial=True), before):
        return True
    for name, x in parts.items():
        x.copy_(scaled(x, back(scales[name])))
    return False
