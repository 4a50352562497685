"""Rows of the inputs of layers, seen in separate passes of both streams through a block, one for each stage.

A pass stops as soon as it has seen the inputs of its stage; the last pass of the original stream continues to the next
block. In multiplications by weights this is 4.33 forward passes of a Llama block (attention is a third of the weights):
0 + 1/3 + 1/3 + 1 for each stream, and 1 for the quantized stream to the next block. `one_forward.py` needs only 2 where
it applies.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from nearplane.calibration.activations import Stream
from nearplane.calibration.expert_rows import RoutedRows
from nearplane.calibration.recorder import Call, Stop
from nearplane.calibration.rows import Additions, Rows, Seen, total
from nearplane.calibration.second_moments import Observed, sum_moments
from nearplane.calibration.stages import rows_of
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.system.memory import release


@torch.no_grad()
def rows_by_batch(
    block: Block, groups: Sequence[tuple[Layer, ...]], stream: Stream, *, last: bool = False, onward: bool = False
) -> Iterator[list[Rows | RoutedRows]]:
    """Yield for each batch the rows of the inputs of groups of layers, one entry per group, in the current block.

    Args:
        block: The block in memory, with its original if there are two streams.
        groups: Groups from `stages`; often one of them.
        stream: The streams before the block.
        last: Whether these are the last groups of the block; the original stream then passes the block as well.
        onward: Whether the quantized stream passes the block as well, with its current weights.

    Raises:
        CalibrationError: A layer receives different tokens in the two networks.
    """
    original, rounding = stream.original, stream.rounding
    assert not stream.ahead, "the original stream has passed the block"
    adding = {layer.name for group in groups for layer in group if layer.adds and original is not None}

    def look(module: nn.Module | None, states: MutableSequence[Tensor], batch: int, to_the_end: bool) -> list[Seen]:
        """Run a copy of the block until all inputs of the groups, and all tensors added to their outputs, are seen."""
        rounded = None if rounding is None or module is not block.quantized else rounding.rounded
        layers = {layer.name: layer for layer in block.layers_of(module)}
        places = [layers[group[0].name].weight.device for group in groups]
        records = [
            Seen(inputs=group[0].shape[1], device=place, rounded=rounded)
            for group, place in zip(groups, places, strict=True)
        ]
        missing = {group[0].name: group[0].calls for group in groups}  # number of inputs still to be seen

        def done() -> None:
            if not to_the_end and not any(missing.values()) and adding <= additions.found.keys():
                raise Stop

        def entering(record: Seen, group: Sequence[Layer], layer: Layer, x: Any) -> None:
            record.add(group, x)
            missing[layer.name] -= 1
            done()

        additions = Additions(done)
        with additions, ExitStack() as hooks:
            for group, record in zip(groups, records, strict=True):
                hooks.enter_context(layers[group[0].name].before(partial(entering, record, group)))
                for layer in group:
                    if layer.name in adding:
                        hooks.enter_context(layers[layer.name].after(additions.watch))
            with suppress(Stop):
                output = stream.forward(block, module, batch, states[batch])
            additions.finish()
        for group, record in zip(groups, records, strict=True):
            for layer in group:
                if layer.name in additions.found:
                    record.added[layer.name] = total(additions.found.pop(layer.name)).reshape(-1, layer.shape[0])
        if to_the_end:
            states[batch] = stream.noted(output)
        return records

    if rounding is not None and any(map(rounding.measures, groups)):
        peaks = [0.0] * len(groups)
        for batch in range(stream.dealt.fitted):
            seen = look(block.quantized, stream.quantized, batch, False)
            peaks = [max(peak, each.peak) for peak, each in zip(peaks, seen, strict=True)]
        peaks = [max(of_ranks) for of_ranks in zip(*stream.dealt.ranks.gather(peaks), strict=True)]
        for group, peak in zip(groups, peaks, strict=True):
            rounding.measured(group, peak)
    for batch in range(len(stream.sizes)):
        originals = repeat(None) if original is None else look(block.original, original, batch, last)
        quantized = look(block.quantized, stream.quantized, batch, onward)
        yield [rows_of(group[0].name, q, o) for group, q, o in zip(groups, quantized, originals, strict=False)]
        del originals, quantized
        release()  # memory that the forward passes freed is scattered among kept rows
    stream.ahead = last and original is not None


@torch.no_grad()
def observe(
    block: Block, groups: Sequence[tuple[Layer, ...]], stream: Stream, *, last: bool = False, onward: bool = False
) -> list[Observed]:
    """Sum the second moments of the inputs of groups of layers in a separate pass; see `sum_moments`.

    Args:
        block: The block in memory, with its original if there are two streams.
        groups: Groups from `stages`; often one of them.
        stream: The streams before the block.
        last, onward: Whether the original and the quantized stream pass the block; see `rows_by_batch`.

    Raises:
        CalibrationError: As in `sum_moments`, or a layer receives different tokens in the two networks.
    """
    return [*sum_moments(groups, rows_by_batch(block, groups, stream, last=last, onward=onward), stream)]


def observations_of_the_head(block: Block, stream: Stream | None) -> Iterator[Observed]:
    """Yield the head, in memory, with the second moments of its inputs; without a stream there are none."""
    if stream is None:
        yield Observed(layers=tuple(block.quantized_layers()), moments={})
        return
    stream.calls[block.name] = [Call(args=(), kwargs={}, positional=True) for _ in stream.sizes]
    block.original = block.quantized  # both passes stop before the head multiplies
    yield observe(block, [tuple(block.quantized_layers())], stream).pop()
