"""Inputs of the layers of a block: the stages of layers that share one input, and the rows of each batch at a stage.

Two streams run, of the original and of the quantized network. `first_look` finds the stages (q/k/v, o, gate/up, down).
Each stage is a separate pass of both streams, which stops as soon as it has seen the inputs of that stage; the last
pass of the original stream continues to the next block. In multiplications by weights this is 4.33 forward passes of a
Llama block (attention is a third of the weights): 0 + 1/3 + 1/3 + 1 for each stream, and 1 for the quantized stream to
the next block. `one_forward.py` needs only 2 where it applies. `second_moments.py` sums the rows.

Before anything is solved, a trial of one window through one block of each kind finds unsupported networks.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.additions import Additions, Results, total
from nearplane.calibration.recorder import Call, Stop
from nearplane.calibration.rows import RoutedRows, Rows, Seen, rows_of
from nearplane.errors import CalibrationError, ModelError, NearplaneError, first_few, first_line
from nearplane.models.ignored import pattern_of
from nearplane.models.layers import Layer, unwatched
from nearplane.models.model import NOT_IN_MEMORY, Block, Model
from nearplane.system.device import Device
from nearplane.system.memory import is_out_of_memory, is_refused, release


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """State of a forward pass at the moment when it enters a layer.

    Args:
        same: Key of the layer's input; layers with equal keys multiply the same rows.
        rows: Rows of the input per token of the block's input (or per encoder position); not an integer if the layer
            receives only some of the tokens.
        computed: Number of results numbered so far, see `Results`.
        alive: Bytes of all activations in memory.
        routed: Bytes of the input of experts: shared by all experts, and with one row per pair of token and expert.
            None for other layers.
    """

    same: tuple[Any, ...]
    rows: float
    computed: int
    alive: int
    routed: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLook:
    """Observations of the first batch in a block.

    Args:
        groups: Layers grouped by the input that they share, in the order they run.
        entered: {layer: one `Entered` per run of the layer}.
        operands: {layer: numbers of the results to whose sum its output is added}; None for a result without number.
        unwatched: Name of a module whose operations depend on the tokens, which makes result numbers useless; or "".
    """

    groups: tuple[tuple[Layer, ...], ...]
    entered: dict[str, list[Entered]]
    operands: dict[str, tuple[int | None, ...]]
    unwatched: str


def stages(block: Block, stream: Stream) -> list[tuple[Layer, ...]]:
    """Group the layers of a block by the input that they share; see `first_look`."""
    return [*first_look(block, stream).groups]


@torch.no_grad()
def first_look(block: Block, stream: Stream) -> FirstLook:
    """Run one batch through a block and group its layers by the input that they share: q/k/v, then o, gate/up, down.

    Two inputs are the same if they are the same memory and were not written to in between. Groups are in running order.

    Raises:
        CalibrationError: Some layers did not run; the message names them.
    """
    module, hidden = block.quantized, stream.block_input(block, 0)
    encoded = stream.calls[block.name][0].encoder_positions
    block_inputs = [hidden] if encoded is None else [hidden, stream.quantized[0][:, encoded]]
    assert module is not None, NOT_IN_MEMORY
    layers = block.quantized_layers()
    entered: dict[str, list[Entered]] = {}
    kept_alive: list[Any] = []  # so that no other tensor reuses their memory
    results = Results(hidden)
    additions = Additions(results=results)
    weights = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}

    def entering(layer: Layer, x: Any) -> None:
        entered.setdefault(layer.name, []).append(
            Entered(
                same=layer.same_input(x),
                rows=min((layer.share(x, states) for states in block_inputs), key=lambda share: share % 1),
                computed=len(results.numbered),
                alive=results.bytes_alive(but=weights),
                routed=x.sizes if layer.routed else None,
            )
        )
        kept_alive.append(x.untyped_storage())

    with additions, ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.before(entering))
            if not layer.routed:
                hooks.enter_context(layer.after(additions.watch))
        stream.forward(block, module, 0, stream.quantized[0])
        additions.finish()
    if missing := [layer.name for layer in layers if layer.name not in entered]:
        raise unreached(", ".join(missing))
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    by_name = {layer.name: layer for layer in layers}
    for name, runs in entered.items():
        layer = replace(by_name[name], calls=len(runs), adds=name in additions.found and len(runs) == 1)
        groups.setdefault(tuple(run.same for run in runs), []).append(layer)
    return FirstLook(
        groups=tuple(map(tuple, groups.values())),
        entered=entered,
        operands=additions.found,
        unwatched=unwatched(block.name, module),
    )


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


def before_the_head(block: Block, stream: Stream) -> tuple[Layer, ...]:
    """Prepare a pass that sees the inputs of the head; return the head as a group.

    Args:
        block: The head, in memory.
        stream: The streams after `finish`.
    """
    stream.calls[block.name] = [Call(args=(), kwargs={}, positional=True) for _ in stream.sizes]
    block.original = block.quantized  # both passes stop before the head multiplies
    return tuple(block.quantized_layers())


def unreached(names: str) -> CalibrationError:
    return CalibrationError(
        f"No token reached {names}. The block does not run them on this text. Leave them unquantized with --ignore."
    )


def try_blocks(model: Model, tokens: Tensor, device: Device) -> dict[str, FirstLook]:
    """Run the first window through one block of each kind; return {block name: `FirstLook`}.

    A kind of block is absent if the window does not reach all of its experts.

    Args:
        model: The model to calibrate.
        tokens: (windows, seqlen) calibration tokens.
        device: The device of the computation.

    Raises:
        ModelError: The network does not run block by block, or not on windows of this length.
        CalibrationError: A layer never runs, whatever the text.
    """
    dtype = device.compute_dtype(model.dtype)
    looks: dict[str, FirstLook] = {}
    try:
        stream = skeleton(model, [tokens[:1]], device=device.place, dtype=dtype)
        for block in (blocks[0] for blocks in blocks_by_kind(model) if blocks[0].layers):
            with block.on(device.place, dtype, original=False):
                try:
                    looks[block.name] = first_look(block, stream)
                except CalibrationError:  # some layers did not run
                    if never := never_run(model, block, stream):
                        raise CalibrationError(never) from None
        return looks
    except NearplaneError:
        raise
    except Exception as error:  # the code of a model may raise anything
        if is_out_of_memory(error) or is_refused(error):
            raise
        raise ModelError(
            f"{type(model.network).__name__} does not run on a window of {tokens.shape[1]} tokens ({first_line(error)}). Use "
            f"another --seqlen, or --solver round-to-nearest, which does not run the model."
        ) from error


def blocks_by_kind(model: Model) -> list[list[Block]]:
    """Return the blocks grouped by kind; blocks of one kind have the same names and types of modules."""
    groups: dict[frozenset[tuple[str, type]], list[Block]] = {}
    for block in model.blocks:
        groups.setdefault(frozenset((name, type(part)) for name, part in block.empty.named_modules()), []).append(block)
    return list(groups.values())


@torch.no_grad()
def never_run(model: Model, block: Block, stream: Stream) -> str:
    """Return a message about layers that do not run, nor any layer that differs only by a number (experts); or ""."""
    reached: set[str] = set()
    layers = block.quantized_layers()
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.before(lambda layer, x: reached.add(pattern_of(block.name, layer.name))))
        stream.forward(block, block.quantized, 0, stream.quantized[0])
    never = {layer.name: kind for layer in layers if (kind := pattern_of(block.name, layer.name)) not in reached}
    if not never:
        return ""
    patterns = " ".join(f"'{pattern}'" for pattern in dict.fromkeys(never.values()))
    return (
        f"{type(model.network).__name__} never runs {first_few([*never])} as separate layers, so their inputs are not "
        f"observable. Leave these layers unquantized with --ignore {patterns}."
    )
