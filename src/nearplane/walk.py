"""The walk: activations pass through the network block by block, and the codes of each layer are asked for on the way.

Two streams run, of the original and of the quantized network. At every stage, the layers that share one input, the walk sums the
second moments of that input, asks the caller for the values of these layers, and writes them into the block before it goes on: the
layers behind see the quantized ones before them. `quantize` solves for the values, `verify` reads them from files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nearplane.lattice.moments import Moments
from nearplane.lattice.solvers import SOLVERS
from nearplane.matrix.inputs import Inputs
from nearplane.memory import release
from nearplane.models.activations import Stream, finish, skeleton
from nearplane.models.calibrate import before_the_head
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.models.staged import Passage, room_for_pauses
from nearplane.models.states import StatesOnDisk
from nearplane.observe import Observed, observe, shared_inputs, summed
from nearplane.pace import Pace
from nearplane.recipe import Recipe
from nearplane.record import profiled_blocks
from nearplane.tokens import EXTRA_TOKENS, Windows

log = logging.getLogger(__name__)
BATCH_TOKENS, BATCH_WINDOWS = 2048, 8  # of a batch at most: enough rows for products at full speed


def batch_of(seqlen: int) -> int:
    """Return how many windows of so many tokens pass at a time where nothing else is said."""
    return max(1, min(BATCH_WINDOWS, BATCH_TOKENS // seqlen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers that share one input, bound to the quantized block, and what is known of that input.

    Args:
        layers: in module order.
        inputs: of each layer: factors are made once for all, the residual's mismatch is each layer's own.
        first: whether it is the first stage of a block.
        repeated: (block, reason) at its first stage, if its forwards cannot be run once each, see `models/staged.py`.
        profiled: whether profiles of its input go into the record.
        rest: names of the tensors that are not quantized and are written with the block.
    """

    layers: tuple[Layer, ...]
    inputs: tuple[Inputs, ...]
    first: bool
    repeated: tuple[tuple[str, str], ...]
    profiled: bool
    rest: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What the walk has behind it: a stage, or with `rest` a block and all that is written with it.

    Args:
        layers: names of the layers of the stage; none at the end of a block.
        rest: names of the tensors that are not quantized; None: the block goes on, or the next one is written with it.
    """

    layers: tuple[str, ...] = ()
    rest: tuple[str, ...] | None = None


class Kept(Protocol):
    """What remembers how far a walk has come, so that another goes on from there."""

    @property
    def blocks(self) -> int:
        """How many blocks were walked through before, and are not again."""

    def restore(self, stream: Stream) -> None:
        """Put the hidden states behind these blocks into a stream that stands before the first."""

    def passed(self, blocks: int, stream: Stream | None) -> None:
        """Note that so many blocks are behind the stream, and all that belongs to them is written."""


Solve = Callable[[Stage], Sequence[Tensor | None]]
"""From a stage to the values (out, in) of each of its layers, or None for a layer that is to stay as it is."""


def walk(
    model: Model,
    recipe: Recipe,
    windows: Windows,
    solve: Solve,
    *,
    device: torch.device,
    moments: Mapping[str, Moments] | None = None,
    kept: Kept | None = None,
    pace: Pace | None = None,
    folder: Path | None = None,
) -> Iterator[Done]:
    """Walk through a network from its embeddings to its head; ask for the values of its layers, stage by stage.

    Args:
        model: the original.
        recipe: what calibration is to see.
        windows: of the text; without any, layers are solved without looking at their inputs.
        solve: gives the values of a stage's layers.
        device: where to compute.
        moments: of the embeddings' inputs, where they are quantized; see `Plan`.
        kept: is told of every block, and where it knows of some, the walk begins behind them.
        pace: how many windows pass at a time, and what may wait; None: as is fastest.
        folder: for a file of hidden states, where `pace` asks for one; None: that of the system for temporary files.

    Raises:
        CalibrationError: an input is not finite, or not all layers run.
    """
    dtype = torch.float32 if device.type == "cpu" else model.dtype
    correct = recipe.scheme.correct
    stream, embeddings = None, None
    behind = 0 if kept is None else kept.blocks
    if model.embeddings is not None and not behind:
        with model.embeddings.on(device, dtype, original=False) as block:
            layers = tuple(block.quantized_layers())
            yield from _through([Observed(layers=layers, moments=dict(moments or {}))], solve)
            embeddings = block.quantized_layers()[0].read()
    if windows.fitted is not None and SOLVERS[recipe.scheme.solver].needs_inputs:
        stream = skeleton(
            model,
            windows.fitted,
            device=device,
            dtype=dtype,
            batch=batch_of(windows.seqlen) if pace is None else pace.batch,
            first=1,
            two_streams=correct,
            embeddings=embeddings,
            extra=windows.extra,
            keep=partial(_in_a_file, folder) if pace is not None and pace.disk else list,
        )
        if kept is not None and behind:
            kept.restore(stream)
    room = room_for_pauses(device) if pace is None else pace.room
    profiled = profiled_blocks(len(model.blocks)) if stream is not None else frozenset()
    for index, block in enumerate(model.blocks[behind:], behind):
        with block.on(device, dtype, original=correct and stream is not None):
            rest = unquantized(model, model.block_names(index))
            with closing(observations(block, stream, recipe, room, windows.extra_rows)) as stages:
                yield from _through(stages, solve, rest, profiled=index in profiled)
        yield Done(rest=rest)
        if kept is not None:
            kept.passed(index + 1, stream)
    rest = unquantized(model, model.rest())
    if model.head is not None:
        if stream is not None:
            finish(model, stream, windows.tokens(), device=device, dtype=dtype)
        with model.head.on(device, dtype, original=False) as block:
            yield from _through(observations_of_the_head(block, stream, recipe, windows.extra_rows), solve, rest)
    yield Done(rest=rest)


def _in_a_file(folder: Path | None, states: Iterable[Tensor]) -> StatesOnDisk:
    return StatesOnDisk(folder, states)


def _through(
    stages: Iterable[Observed], solve: Solve, rest: tuple[str, ...] = (), *, profiled: bool = False
) -> Iterator[Done]:
    """Ask for the values of the layers of a block, stage by stage, and write them before the next stage is looked at."""
    first = True
    for observed in stages:
        release()  # what forwards took: solving takes as much
        inputs = tuple(shared_inputs(observed))
        stage = Stage(
            layers=observed.layers,
            inputs=inputs,
            first=first,
            repeated=observed.repeated if first else (),
            profiled=profiled and not observed.further,
            rest=rest,
        )
        del observed, inputs  # the stage alone holds moments and factors: they are as large as a block
        for layer, values in zip(stage.layers, solve(stage), strict=True):
            if values is not None:
                layer.write(values)
            del values  # in the block now; the last ones would live on beside the next stage
        names, first = tuple(layer.name for layer in stage.layers), False
        del stage  # the next one makes its own
        yield Done(layers=names)


def observations(
    block: Block, stream: Stream | None, recipe: Recipe, room: int, extra_rows: int | None = EXTRA_TOKENS
) -> Generator[Observed]:
    """Yield the layers of a block by shared input, with what calibration sees of it once the stages before are solved.

    Behind the last the stream has passed the block. Close what is left before its end: forwards of the block wait in it.
    """
    if stream is None:
        for layer in block.quantized_layers():
            yield Observed(layers=(layer,), moments={})
        return
    scheme, sequential = recipe.scheme, recipe.calibration.true_sequential
    with Passage(block, stream, sequential=sequential, room=room) as passage:
        if passage.short:  # said and not recorded: what is written must not depend on how much memory was free
            log.info("%s: %s, so that stages are passes of their own", block.name, passage.repeated)
        repeated = ((block.name, passage.repeated),) if passage.repeated and not passage.short else ()
        for groups, shown in passage:  # q/k/v, then o, then gate/up, then down
            root = scheme.factor == "qr"
            rare = recipe.calibration.rare_experts
            found = summed(groups, shown, stream, correct=scheme.correct, root=root, extra_rows=extra_rows, rare=rare)
            yield from map(partial(replace, repeated=repeated), found)  # none is held when the next is summed


def observations_of_the_head(
    block: Block, stream: Stream | None, recipe: Recipe, extra_rows: int | None = EXTRA_TOKENS
) -> Iterator[Observed]:
    """Yield the head with the second moments of its inputs; see `observe`. Without a stream nothing is measured."""
    if stream is None:
        yield Observed(layers=tuple(block.quantized_layers()), moments={})
        return
    head = before_the_head(block, stream)
    scheme, root = recipe.scheme, recipe.scheme.factor == "qr"
    found = observe(block, [head], stream, correct=scheme.correct, root=root, residual=False, extra_rows=extra_rows)
    yield found.pop()


def unquantized(model: Model, names: Iterable[str]) -> tuple[str, ...]:
    """Leave out the names in the checkpoint of the weights of quantized layers."""
    return tuple(name for name in names if name not in model.quantized_names)
