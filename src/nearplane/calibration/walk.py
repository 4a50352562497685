"""The walk: activations pass through the network block by block, and stop at every stage until its layers are written.

Two streams run, of the original and of the quantized network. At every stage, the layers that share one input, the walk sums the
second moments of that input and waits: whoever walks gives the layers' values, and the layers behind see the quantized ones before
them. `quantize` solves for the values, `verify` and `tune` read them from files. The way of the data: `walk`, `observations` of a
block, its forwards in `one_forward.py`, sums over their rows in `second_moments.py`, one `Inputs` a layer, a `Stage`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, finish, skeleton
from nearplane.calibration.one_forward import MemorySetting, Passage
from nearplane.calibration.second_moments import Observed, observe, shared_inputs, summed
from nearplane.calibration.stages import before_the_head
from nearplane.calibration.states_on_disk import StatesOnDisk
from nearplane.calibration.windows import Windows
from nearplane.lattice.moments import Moments
from nearplane.lattice.solvers import SOLVERS
from nearplane.matrix.inputs import Inputs
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.recipe.recipe import Recipe
from nearplane.system.memory import release

log = logging.getLogger(__name__)


class Stage:
    """Layers whose inputs are known and whose turn it is, bound to the block in memory; or the end of a block, without layers.

    Args:
        layers: that share one input, in module order; or those of one expert after the other; none at the end of a block.
        inputs: of each layer: factors are made once for all that share one, the residual's mismatch is each layer's own.
        first: whether it is the first stage of a block.
        rest: names of the tensors that are not quantized and are written with the block.
        blocks: how many blocks the streams have passed, at the end of one; 0 elsewhere.
        stream: the streams behind these blocks; None: there are none, or it is not the end of a block.

    Attributes:
        written: whether `write` was called: only then the walk goes on.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...] = (),
        inputs: tuple[Inputs, ...] = (),
        *,
        rest: tuple[str, ...],
        first: bool = False,
        blocks: int = 0,
        stream: Stream | None = None,
    ) -> None:
        self.layers, self.inputs, self.rest, self.first = layers, inputs, rest, first
        self.blocks, self.stream = blocks, stream
        self.written = False

    @property
    def ends_block(self) -> bool:
        """Whether all that is written with `rest` is behind the walk."""
        return not self.layers

    def write(self, values: Iterable[Tensor | None]) -> None:
        """Write the values (out, in) of each layer into the block, in order; None leaves a layer as it is.

        Inputs are let go of: with their factors they take as much memory as a block.
        """
        for layer, each in zip(self.layers, values, strict=True):
            if each is not None:
                layer.write(each)
            del each  # in the block now
        self.inputs, self.written = (), True


class Resumed(Protocol):
    """How far a walk had come that was stopped, so that another goes on from there."""

    @property
    def blocks(self) -> int:
        """How many blocks were walked through, and are not again."""

    def restore(self, stream: Stream) -> None:
        """Put the hidden states behind these blocks into a stream that stands before the first."""


@contextmanager
def walk(
    model: Model,
    recipe: Recipe,
    windows: Windows,
    setting: MemorySetting,
    *,
    moments: Mapping[str, Moments] | None = None,
    resumed: Resumed | None = None,
) -> Iterator[Iterator[Stage]]:
    """Walk through a network from its embeddings to its head, stage by stage: `with walk(...) as stages: for stage in stages: ...`

    The next stage sees the layers of this one as they were written. At the end, and after an error, no hook, no paused forward
    and no block on the device is left.

    Args:
        model: the original.
        recipe: what calibration is to see.
        windows: of the text; without any, layers are solved without looking at their inputs.
        setting: where to compute, and how much memory that may use.
        moments: of the embeddings' inputs, where they are quantized; see `Plan`.
        resumed: where a walk that was stopped had come; the stages before are left out.

    Yields:
        The stages. The iterator raises RuntimeError where the next is asked for before this one was written.

    Raises:
        CalibrationError: an input is not finite, or not all layers run.
    """
    stages = _Walk(model, recipe, windows, setting).stages(moments or {}, resumed)
    with closing(_in_order(stages)) as in_order:
        yield in_order


def _in_order(stages: Generator[Stage]) -> Generator[Stage]:
    """Yield stages; each is written before the next is made."""
    with closing(stages):
        for stage in stages:
            yield stage
            if not stage.written and stage.layers:
                names = ", ".join(layer.name for layer in stage.layers)
                raise RuntimeError(f"The stage of {names} was not written. Call stage.write before the next stage.")
            del stage


@dataclass(frozen=True, slots=True)
class _Walk:
    """What a walk is made with; see `walk`."""

    model: Model
    recipe: Recipe
    windows: Windows
    setting: MemorySetting

    def stages(self, moments: Mapping[str, Moments], resumed: Resumed | None) -> Generator[Stage]:
        """Yield all stages, and the end of every block."""
        model, recipe, place = self.model, self.recipe, self.setting.device.place
        dtype = self.setting.device.compute_dtype(model.dtype)
        behind = 0 if resumed is None else resumed.blocks
        embeddings = None
        if model.embeddings is not None and not behind:
            with model.embeddings.on(place, dtype, original=False) as block:
                layers = tuple(block.quantized_layers())
                yield from self._through([Observed(layers=layers, moments=dict(moments))])
                embeddings = block.quantized_layers()[0].read()
        stream = self._stream(dtype, embeddings)
        if resumed is not None and behind and stream is not None:
            resumed.restore(stream)
        for index, block in enumerate(model.blocks[behind:], behind):
            with block.on(place, dtype, original=recipe.scheme.correct and stream is not None):
                rest = model.unquantized(index)
                with closing(observations(block, stream, recipe, self.setting.room)) as observed:
                    yield from self._through(observed, rest)
            yield Stage(rest=rest, blocks=index + 1, stream=stream)  # the end of the block: no layers, a shard to write
        rest = model.unquantized()
        if model.head is not None:
            if stream is not None:
                finish(model, stream, self.windows.tokens(), dtype)
            with model.head.on(place, dtype, original=False) as block:
                yield from self._through(observations_of_the_head(block, stream), rest)
        yield Stage(rest=rest)

    def _stream(self, dtype: torch.dtype, embeddings: Tensor | None) -> Stream | None:
        """Return both streams before the first block; None where nothing looks at inputs."""
        if self.windows.fitted is None or not SOLVERS[self.recipe.scheme.solver].needs_inputs:
            return None
        fitted, extra = self.windows.batches(self.setting.batch)
        keep = partial(StatesOnDisk, self.setting.folder) if self.setting.disk else list
        place = self.setting.device.place
        stream = skeleton(self.model, [*fitted, *extra], device=place, dtype=dtype, embeddings=embeddings, keep=keep)
        stream.fitted = len(fitted)
        stream.original = (stream.original or keep(stream.quantized)) if self.recipe.scheme.correct else None
        return stream

    def _through(self, observed: Iterable[Observed], rest: tuple[str, ...] = ()) -> Iterator[Stage]:
        """Yield the layers of a block, stage by stage."""
        for number, together in enumerate(_chunks(observed, self.setting.experts)):
            release()  # what forwards took: solving takes as much
            stage = Stage(
                tuple(layer for each in together for layer in each.layers),
                tuple(inputs for each in together for inputs in shared_inputs(each)),
                rest=rest,
                first=number == 0,
            )
            together.clear()  # the stage alone holds moments and factors: they are as large as a block
            yield stage
            del stage  # the next one makes its own


def _chunks(observed: Iterable[Observed], experts: int) -> Iterator[list[Observed]]:
    """Yield what is solved together: layers that share an input, or up to so many experts of a block.

    Nothing is looked at before what was yielded is written, but for the other experts of the same stage.
    """
    chunk: list[Observed] = []
    for each in observed:
        chunk.append(each)
        del each  # the stage is to be the only one that holds it
        if len(chunk) == experts or not chunk[-1].more:
            yield chunk
            chunk = []


def observations(block: Block, stream: Stream | None, recipe: Recipe, room: int) -> Generator[Observed]:
    """Yield the layers of a block by shared input, with what calibration sees of it once the stages before are solved.

    Behind the last the stream has passed the block. Close what is left before its end: forwards of the block wait in it.
    """
    if stream is None:
        for layer in block.quantized_layers():
            yield Observed(layers=(layer,), moments={})
        return
    with closing(Passage(block, stream, sequential=recipe.calibration.true_sequential, room=room)) as passage:
        if passage.repeated:
            log.info("%s: %s, so that stages are passes of their own", block.name, passage.repeated)
        for groups, shown in passage:  # q/k/v, then o, then gate/up, then down
            yield from summed(groups, shown, stream, rare=recipe.calibration.rare_experts)


def observations_of_the_head(block: Block, stream: Stream | None) -> Iterator[Observed]:
    """Yield the head with the second moments of its inputs; see `observe`. Without a stream nothing is measured."""
    if stream is None:
        yield Observed(layers=tuple(block.quantized_layers()), moments={})
        return
    yield observe(block, [before_the_head(block, stream)], stream).pop()
