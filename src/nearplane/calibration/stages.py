"""What the layers of a network see: activations pass through one block at a time, and the rows of their inputs are handed out.

Two streams run side by side, of the original and of the quantized network. A first look finds which layers share an input: the
stages (q/k/v, o, gate/up, down). Here each stage is a pass of both streams, which stops as soon as it has seen what it is for; the
original stream's last pass is also its way to the next block. In multiplications by weights that is 4.33 forwards of a Llama
block (attention a third of the weights): 0 + 1/3 + 1/3 + 1 for each stream and 1 for the quantized stream's way on.
`one_forward.py` does it in 2 where it can. Knows modules and activations; what is summed over them is `second_moments.py`'s.

A trial of one window through one block of each kind, before anything is solved, finds networks that cannot be calibrated.
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

from nearplane.calibration.activations import Stream, finite, skeleton
from nearplane.calibration.recorder import Call
from nearplane.calibration.watch import Additions, Results, RoutedRows, Rows, Seen, Stop, rows_of, total
from nearplane.errors import CalibrationError, ModelError, NearplaneError, first_few, first_line
from nearplane.models.experts import unwatched
from nearplane.models.ignored import pattern_of
from nearplane.models.layers import Layer
from nearplane.models.model import ABSENT, Block, Model
from nearplane.system.device import Device
from nearplane.system.memory import release


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A layer as a forward came to it.

    Args:
        same: what it has in common with layers that multiply the same rows.
        rows: how often what it was given holds a number for every token, or every hidden state that the block sees of an encoder;
            no integer: some are left out.
        computed: how many results had a number, see `Results`.
        alive: bytes of all activations that were in memory.
        routed: of experts, what they were given, without its contents: how many bytes it takes to keep it for all of them, and a
            row for every pair of a token and an expert. None of other layers.
    """

    same: tuple[Any, ...]
    rows: float
    computed: int
    alive: int
    routed: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLook:
    """How the first batch ran through a block.

    Args:
        groups: layers by the input that they share, in the order they run.
        entered: of each layer, every time it ran.
        operands: {layer: numbers of the results whose sum its output is added to}, None where one has no number.
        unwatched: the module that runs other functions for other tokens, so that numbers of results say nothing; or empty.
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
    """Group the layers of a block by the input that they share, in the order they run: q/k/v, then o, gate/up, down.

    One batch is run through the block; inputs are the same if they are the same memory, unchanged in between.

    Raises:
        CalibrationError: layers did not run; the message names them.
    """
    module, hidden = block.quantized, stream.own(block, 0)
    encoded = stream.calls[block.name][0].seen
    given = [hidden] if encoded is None else [hidden, stream.quantized[0][:, encoded]]
    assert module is not None, ABSENT
    layers = block.quantized_layers()
    entered: dict[str, list[Entered]] = {}
    held: list[Any] = []  # while they live, no other tensor takes their memory
    results = Results(hidden)
    additions = Additions(results=results)
    weights = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}

    def entering(layer: Layer, x: Any) -> None:
        entered.setdefault(layer.name, []).append(
            Entered(
                same=layer.same_input(x),
                rows=min((layer.share(x, states) for states in given), key=lambda share: share % 1),
                computed=len(results.numbered),
                alive=results.bytes_alive(but=weights),
                routed=x.sizes if layer.routed else None,
            )
        )
        held.append(x.untyped_storage())

    with additions, ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.before(entering))
            if not layer.routed:
                hooks.enter_context(layer.after(additions.watch))
        stream.forward(block, module, 0, stream.quantized[0])
        additions.finish()
    if unseen := [layer.name for layer in layers if layer.name not in entered]:
        raise unreached(", ".join(unseen))
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    by_name = {layer.name: layer for layer in layers}
    for name, times in entered.items():
        known = replace(by_name[name], calls=len(times), adds=name in additions.found and len(times) == 1)
        groups.setdefault(tuple(each.same for each in times), []).append(known)
    return FirstLook(
        groups=tuple(map(tuple, groups.values())),
        entered=entered,
        operands=additions.found,
        unwatched=unwatched(block.name, module),
    )


@torch.no_grad()
def seen(
    block: Block, groups: Sequence[tuple[Layer, ...]], stream: Stream, *, last: bool = False, onward: bool = False
) -> Iterator[list[Rows | RoutedRows]]:
    """Yield for each batch what it shows of the inputs of some groups of layers, as the block is now.

    Args:
        block: in memory, with its original if the stream has two streams.
        groups: from `stages`; often one of them.
        stream: standing before the block.
        last: no other groups of this block follow: the original stream moves on to the next block in the same pass.
        onward: the quantized stream moves on as well, with the block as it is.

    Raises:
        CalibrationError: a layer sees different tokens in the two networks, or what comes out of the block is not finite.
    """
    original = stream.original
    assert not stream.ahead, "the original stream has passed the block"
    adding = {layer.name for group in groups for layer in group if layer.adds and original is not None}

    def look(module: nn.Module | None, states: MutableSequence[Tensor], batch: int, to_the_end: bool) -> list[Seen]:
        """Run a copy of the block just far enough to see the groups' inputs, and what is added to their outputs."""
        seen = [Seen(inputs=group[0].shape[1]) for group in groups]
        here = {layer.name: layer for layer in block.layers_of(module)}
        missing = {group[0].name: group[0].calls for group in groups}  # inputs still to be seen

        def done() -> None:
            if not to_the_end and not any(missing.values()) and adding <= additions.found.keys():
                raise Stop

        def entering(record: Seen, group: Sequence[Layer], layer: Layer, x: Any) -> None:
            record.add(group, x)
            missing[layer.name] -= 1
            done()

        additions = Additions(done)
        with additions, ExitStack() as hooks:
            for group, record in zip(groups, seen, strict=True):
                hooks.enter_context(here[group[0].name].before(partial(entering, record, group)))
                for layer in group:
                    if layer.name in adding:
                        hooks.enter_context(here[layer.name].after(additions.watch))
            with suppress(Stop):
                output = stream.forward(block, module, batch, states[batch])
            additions.finish()
        for group, record in zip(groups, seen, strict=True):
            for layer in group:
                if layer.name in additions.found:
                    record.added[layer.name] = total(additions.found[layer.name]).reshape(-1, layer.shape[0])
        if to_the_end:
            states[batch] = finite(output, block)
        return seen

    for batch in range(len(stream.sizes)):
        before = repeat(None) if original is None else look(block.original, original, batch, last)
        now = look(block.quantized, stream.quantized, batch, onward)
        yield [rows_of(group[0].name, one, other) for group, one, other in zip(groups, now, before, strict=False)]
        del before, now
        release()  # what the forwards took and freed lies among what is kept
    stream.ahead = last and original is not None


def before_the_head(block: Block, stream: Stream) -> tuple[Layer, ...]:
    """Prepare to look at the head's inputs; return it as a group.

    Args:
        block: the head, in memory.
        stream: from `finish`.
    """
    stream.calls[block.name] = [Call(args=(), kwargs={}, positional=True) for _ in stream.sizes]
    block.original = block.quantized  # only looked into; both stop before they multiply
    return tuple(block.quantized_layers())


def unreached(names: str) -> CalibrationError:
    return CalibrationError(
        f"No token reached {names}: the block does not run them, or not on this text. Leave them out with --ignore."
    )


def try_blocks(model: Model, tokens: Tensor, device: Device) -> dict[str, FirstLook]:
    """Run the first window through one block of each kind, as calibration will; return what was seen, by name of the block.

    Where the window does not reach every expert, nothing is returned of that kind.

    Args:
        model: to be calibrated.
        tokens: (windows, seqlen).
        device: where to compute.

    Raises:
        ModelError: the network does not run block by block, or not on windows of this length.
        CalibrationError: a layer never runs, whatever the text.
    """
    dtype = device.compute_dtype(model.dtype)
    found: dict[str, FirstLook] = {}
    try:
        stream = skeleton(model, [tokens[:1]], device=device.place, dtype=dtype)
        for block in (blocks[0] for blocks in kinds(model) if blocks[0].layers):
            with block.on(device.place, dtype, original=False):
                try:
                    found[block.name] = first_look(block, stream)
                except CalibrationError:  # it did not run all layers
                    if never := never_run(model, block, stream):
                        raise CalibrationError(never) from None
        return found
    except NearplaneError:
        raise
    except Exception as error:  # models are programs of their makers and raise what they like
        raise ModelError(
            f"{type(model.network).__name__} does not run on a window of {tokens.shape[1]} tokens ({first_line(error)}). Try "
            f"another --seqlen, or --solver round-to-nearest, which does not run it."
        ) from error


def kinds(model: Model) -> list[list[Block]]:
    """Return the blocks by kind; of one kind are those whose modules have the same names and types."""
    found: dict[frozenset[tuple[str, type]], list[Block]] = {}
    for block in model.blocks:
        found.setdefault(frozenset((name, type(part)) for name, part in block.empty.named_modules()), []).append(block)
    return list(found.values())


@torch.no_grad()
def never_run(model: Model, block: Block, stream: Stream) -> str:
    """Return what to do about layers that one window does not run, nor any that differs by a number (an expert); or nothing."""
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
        f"{type(model.network).__name__} is not supported as it is: it never runs {first_few([*never])} as layers of their own, so "
        f"nothing shows their inputs. Leave them as they are with --ignore {patterns}."
    )
