"""The walk: the pass of activations through the network, block by block, which waits at every stage for its values.

Two streams run, of the original and of the quantized network. At each stage (layers that share one input) the walk sums
the second moments of the input and waits until the caller writes the layers' values, which later layers then see.
`quantize` solves for the values, `verify` and `tune` read them from files. Order of calls: `walk`, `observations` of a
block, forward passes in `one_forward.py`, sums over rows in `second_moments.py`, one `LayerInput` per layer, a `Stage`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from nearplane.calibration.activations import Dealt, Stream, skeleton
from nearplane.calibration.cache_scales import CacheRange, cache_name
from nearplane.calibration.extra_divergence import extra_divergence, is_compared
from nearplane.calibration.network_ends import finish
from nearplane.calibration.one_forward import BlockForward, MemorySetting
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.rounded_stream import HEADROOM, RoundedStream
from nearplane.calibration.second_moments import Observed, shared_inputs, sum_moments
from nearplane.calibration.separate_passes import observations_of_the_head
from nearplane.calibration.windows import Windows, joined_windows
from nearplane.lattice.moments import Moments
from nearplane.lattice.solvers import SOLVERS
from nearplane.matrix.inputs import LayerInput, Target, corrected
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import Scheme
from nearplane.record.fold import Fold
from nearplane.system.device import Device
from nearplane.system.matmul_choice import Library
from nearplane.system.matmul_library import library_in_use, using_library
from nearplane.system.memory import release, release_all
from nearplane.system.ranks import ONE_PROCESS, Ranks

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Stage:
    """Layers to be written next, with their inputs, in the block in memory; or the end of a block, without layers.

    Args:
        layers: Layers that share one input, in module order; or those of several experts; empty at the end of a block.
        inputs: Input of each layer; layers share the factors of one input, not the mismatch of the residual.
        input_scales: {layer name: global scale of its rounded inputs}, where runtimes need one.
        cache_scales: {name of the attention in files: scales of its keys and of its values}, at the end of a block.
        first: Whether this is the first stage of a block.
        rest: Names of the tensors that are not quantized and are written with the block.
        blocks: Number of blocks that the streams have passed, at the end of a block; 0 elsewhere.
        stream: The streams after these blocks; None without streams, where it is not the end of a block, and where
            nothing runs on their outputs.
        divergence: KL on the extra windows, see `extra_divergence`, at the end of the last block; None elsewhere.
        ranks: Processes of the run, which all have this stage.

    Attributes:
        written: Whether `write` was called; the walk requires it before the next stage.
        solved: What a rank has solved of the stage, until rank 0 asks for it.
    """

    layers: tuple[Layer, ...] = ()
    inputs: list[LayerInput] = field(default_factory=list)
    rest: tuple[str, ...] = ()
    input_scales: Mapping[str, float] = field(default_factory=dict)
    cache_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    first: bool = False
    blocks: int = 0
    stream: Stream | None = None
    divergence: float | None = None
    ranks: Ranks = ONE_PROCESS
    written: bool = field(default=False, init=False)
    solved: list[Any] = field(default_factory=list, init=False)

    @property
    def ends_block(self) -> bool:
        """Whether this is the end of a block: all layers that are written with `rest` are done."""
        return not self.layers

    def target(
        self, number: int, W: Tensor, scheme: Scheme, rows: slice = slice(None), *, again: bool = False
    ) -> Target:
        """Return the target of a layer, and drop what only targets need: moments, and the factors after the last one.

        Args:
            number: Number of the layer in the stage.
            W, scheme, rows: See `corrected`.
            again: Whether the layer may be solved once more, so that its moments are kept.
        """
        target = corrected(W, self.inputs[number], scheme, rows)
        shared = self.inputs[number].shared
        if self._is_last(number):
            sweep = scheme.order, scheme.damp_of_the_sweep(self.inputs[number].corrects), False
            shared.factors = {key: factor for key, factor in shared.factors.items() if key == sweep}
        if not again:
            self.inputs[number] = self.inputs[number].with_a_target()
        release()  # the solve needs as much memory
        return target

    def measured(self, number: int) -> None:
        """Drop the factors of a layer that is not solved again, after the last one: the limit takes as much memory."""
        if self._is_last(number):
            self.inputs[number].shared.factors = {}
            release()

    def _is_last(self, number: int) -> bool:
        """Return whether no later layer shares the input of a layer."""
        return all(later.shared is not self.inputs[number].shared for later in self.inputs[number + 1 :])

    def write(self, values: Iterable[Tensor | None]) -> None:
        """Write the values (out, in) of each layer into the block, in order; None leaves a layer unchanged.

        The inputs are dropped: with their factors they take as much memory as a block. On several ranks, rank 0 has the
        values, and the others receive them.
        """
        self.ranks.start(_receive_values)
        for layer, each in zip(self.layers, values, strict=self.ranks.leads):
            each = self.ranks.broadcast(each)
            if each is not None:
                layer.write(each)
            del each  # frees a copy: the block has the values
        self.inputs, self.written = [], True


class Resumed(Protocol):
    """State of a stopped walk, from which another walk resumes."""

    @property
    def blocks(self) -> int:
        """Number of blocks that are done and are skipped."""

    def restore(self, stream: Stream) -> None:
        """Replace the hidden states of a stream before the first block by those after the skipped blocks."""


@contextmanager
def walk(
    model: Model,
    recipe: Recipe,
    windows: Windows,
    setting: MemorySetting,
    *,
    moments: Mapping[str, Moments] | None = None,
    positions: Mapping[str, PositionWeights] | None = None,
    input_scales: Mapping[str, float] | None = None,
    headroom: float = HEADROOM,
    resumed: Resumed | None = None,
) -> Iterator[Iterator[Stage]]:
    """Walk through a network from embeddings to head: `with walk(...) as stages: for stage in stages: ...`

    Each stage sees the layers of earlier stages as they were written. At the end, and after an error, all hooks and
    paused forward passes are removed and no block stays on the device.

    Args:
        model: The original model.
        recipe: The recipe; its calibration, scheme and solver options are used.
        windows: The calibration windows; without windows, the inputs of layers are not observed.
        setting: The device with its ranks, and settings for memory.
        moments: Moments of the embeddings' inputs, if embeddings are quantized; see `Plan`.
        positions: {layer: weights of positions}; None: all tokens count alike.
        input_scales: {layer name: global scale of its rounded inputs} that are known; others are measured.
        headroom: Room that measured ones leave, see `RoundedStream`.
        resumed: State of a stopped walk, whose stages are skipped.

    Yields:
        An iterator over the stages. It raises RuntimeError if a stage is not written before the next is requested.

    Raises:
        CalibrationError: An input is not finite, or some layers do not run.
    """
    ranks, done = setting.device.ranks, 0 if resumed is None else resumed.blocks
    if ranks.others:
        theirs = replace(setting, device=Device(setting.device.place))  # each has ranks of its own
        followed = _FollowedWalk(
            recipe=recipe,
            windows=windows,
            setting=theirs,
            moments=dict(moments or {}),
            positions=dict(positions or {}),
            input_scales=dict(input_scales or {}),
            headroom=headroom,
            blocks=done,
            library=library_in_use(),
            tuned=model.tuned,
            folds=model.folds,
        )
        ranks.start(followed)
    stages = _Walk(model, recipe, windows, setting, positions or {}, input_scales or {}, headroom).stages(
        moments or {}, resumed
    )
    with closing(_in_order(stages, ranks)) as in_order:
        yield in_order


def _in_order(stages: Generator[Stage], ranks: Ranks) -> Generator[Stage]:
    """Yield stages; raise RuntimeError if a stage is not written before the next is made."""
    with closing(stages):
        for stage in stages:
            yield stage
            if not stage.written and stage.layers:
                names = ", ".join(layer.name for layer in stage.layers)
                raise RuntimeError(f"The stage of {names} was not written. Call stage.write before the next stage.")
            ranks.release()
            del stage


class Followed(Protocol):
    """What a rank serves that follows the walks of rank 0."""

    model: Model
    device: Device


def _receive_values(stage: Stage) -> None:
    stage.write(repeat(None))


@dataclass(frozen=True, slots=True)
class _FollowedWalk:
    """A walk of rank 0, in which another rank takes part: it runs its share of the windows, and writes what it receives."""

    recipe: Recipe
    windows: Windows
    setting: MemorySetting
    moments: Mapping[str, Moments]
    positions: Mapping[str, PositionWeights]
    input_scales: Mapping[str, float]
    headroom: float
    blocks: int
    library: Library
    tuned: Mapping[str, Tensor]
    folds: tuple[Fold, ...]

    def __call__(self, followed: Followed) -> None:
        followed.model.tuned = dict(self.tuned)
        followed.model.fold(self.folds)
        setting = replace(self.setting, device=followed.device, folder=None)
        names = ("moments", "positions", "input_scales", "headroom")
        known: dict[str, Any] = {name: getattr(self, name) for name in names}
        with (
            using_library(self.library),
            walk(followed.model, self.recipe, self.windows, setting, **known, resumed=self) as stages,
        ):
            for stage in stages:
                stage.ranks.serve(stage)

    def restore(self, stream: Stream) -> None:
        """Receive the hidden states of this rank's batches behind the blocks that were done before."""
        stream.dealt.ranks.serve(stream)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Arguments of a walk; see `walk`."""

    model: Model
    recipe: Recipe
    windows: Windows
    setting: MemorySetting
    positions: Mapping[str, PositionWeights]
    input_scales: Mapping[str, float]
    headroom: float

    def stages(self, moments: Mapping[str, Moments], resumed: Resumed | None) -> Generator[Stage]:
        """Yield all stages, including the end of every block."""
        model, recipe, place = self.model, self.recipe, self.setting.device.place
        dtype = self.setting.device.compute_dtype(model.dtype)
        done = 0 if resumed is None else resumed.blocks
        embeddings = None
        if model.embeddings is not None and not done:
            with model.embeddings.on(place, dtype, original=False) as block:
                layers = tuple(block.quantized_layers())
                # those of a stopped run were read to the CPU
                there = {name: replace(each, H=each.H.to(place)) for name, each in moments.items()}
                yield from self._through([Observed(layers=layers, moments=there)])
                embeddings = block.quantized_layers()[0].read()
        stream = self._stream(dtype, embeddings)
        last = len(model.blocks) if model.head is None else len(model.blocks) + 1  # nothing runs on the last outputs
        if resumed is not None and 0 < done < last and stream is not None:
            resumed.restore(stream)
            stream.dealt.ranks.release()
            for block in model.blocks[:done]:
                del stream.calls[block.name]
        rounding = None if stream is None else stream.rounding
        for index, block in enumerate(model.in_turn(model.blocks[done:], place), done):
            with (
                block.on(place, dtype, original=recipe.scheme.correct and stream is not None),
                rounding.applied(block.quantized_layers()) if rounding is not None else nullcontext(),
            ):
                unquantized = model.unquantized(index)
                onward, ends = index + 1 < last, index + 1 == len(model.blocks) and is_compared(model, stream)
                with closing(observations(block, stream, recipe, self.setting.room, onward=onward or ends)) as observed:
                    yield from self._through(observed, unquantized, rounding)
            end = self._end(unquantized, blocks=index + 1, stream=stream if onward else None)
            if stream is not None and isinstance(stream.cache, CacheRange):
                scales = stream.cache.scales(block.name, stream.dealt.ranks)
                end.cache_scales = {} if scales is None else {cache_name(model, block): scales}
            if ends and stream is not None:
                release_all()  # the head takes as much as the C library keeps of the last block
                end.divergence = extra_divergence(model, stream, self._dealt()[0], dtype, self.setting.keep)
            yield end
        unquantized = model.unquantized()
        if model.head is not None:
            if stream is not None:
                finish(model, stream, joined_windows(self._dealt()[0]), dtype)
            with model.head.on(place, dtype, original=False) as block:
                yield from self._through(observations_of_the_head(block, stream), unquantized)
        yield self._end(unquantized)

    def _end(self, rest: tuple[str, ...], blocks: int = 0, stream: Stream | None = None) -> Stage:
        """Return the end of a block, which writes the tensors `rest`."""
        return Stage(rest=rest, blocks=blocks, stream=stream, ranks=self.setting.device.ranks)

    def _stream(self, dtype: torch.dtype, embeddings: Tensor | None) -> Stream | None:
        """Return both streams before the first block; None if the solver needs no inputs."""
        if self.windows.fitted is None or not SOLVERS[self.recipe.scheme.solver].needs_inputs:
            return None
        keep, place = self.setting.keep, self.setting.device.place
        batches, dealt = self._dealt()
        stream = skeleton(self.model, batches, device=place, dtype=dtype, embeddings=embeddings, keep=keep)
        stream.dealt, stream.positions = dealt, self.positions
        stream.rounding = None
        if self.recipe.rounded:
            stream.rounding = RoundedStream(self.recipe.inputs_of, self.input_scales, self.headroom)
        stream.cache = CacheRange() if self.recipe.kv_cache != "none" else None
        stream.original = (stream.original or keep(stream.quantized)) if self.recipe.scheme.correct else None
        return stream

    def _dealt(self) -> tuple[list[Tensor], Dealt]:
        """Return the batches of this rank, and their place among all."""
        return self.windows.dealt(self.setting.batch, self.setting.device.ranks)

    def _through(
        self, observed: Iterable[Observed], rest: tuple[str, ...] = (), rounding: RoundedStream | None = None
    ) -> Iterator[Stage]:
        """Yield the stages of a block."""
        for number, together in enumerate(_chunks(observed, self.setting.experts)):
            release()  # memory of the forward passes, which solving needs
            stage = Stage(
                layers=tuple(layer for each in together for layer in each.layers),
                inputs=[inputs for each in together for inputs in shared_inputs(each)],
                rest=rest,
                input_scales={} if rounding is None else dict(rounding.scales),
                first=number == 0,
                ranks=self.setting.device.ranks,
            )
            together.clear()  # only the stage may hold moments and factors: they are as large as a block
            yield stage
            del stage  # frees them before the next stage


def _chunks(observed: Iterable[Observed], experts: int) -> Iterator[list[Observed]]:
    """Yield lists of what is solved together: layers that share an input, or up to `experts` experts of a block.

    The next stage is not computed before the list is written; experts of one stage are all known beforehand.
    """
    chunk: list[Observed] = []
    for each in observed:
        chunk.append(each)
        del each  # only the stage may hold it
        if len(chunk) == experts or not chunk[-1].more:
            yield chunk
            chunk = []


def observations(
    block: Block, stream: Stream | None, recipe: Recipe, room: int, *, onward: bool = True
) -> Generator[Observed]:
    """Yield the layers of a block by shared input, with its moments once the earlier stages are solved.

    After the last group the stream has passed the block, but for the last products if nothing goes `onward` from there.
    Close the generator early only by `close`: passes pause in it.
    """
    if stream is None:
        for _, layers in groupby(block.quantized_layers(), partial(_solved_with, recipe)):
            yield Observed(layers=tuple(layers), moments={})
        return
    sequential = recipe.calibration.true_sequential
    with closing(BlockForward(block, stream, sequential=sequential, room=room, onward=onward)) as passage:
        if passage.repeated:
            log.info("%s: stages are separate passes because %s", block.name, passage.repeated)
        for groups, shown in passage:  # q/k/v, then o, then gate/up, then down
            yield from sum_moments(groups, shown, stream, rare=recipe.calibration.rare_experts)


def _solved_with(recipe: Recipe, layer: Layer) -> str:
    """Return what layers have in common that are solved together although no inputs are observed.

    It is the module whose layers may share a global scale; without such scales layers are solved one by one.
    """
    shares = any(scheme.number_format.global_scale for scheme in recipe.schemes)
    return layer.name.rpartition(".")[0] if shares else layer.name
