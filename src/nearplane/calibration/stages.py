"""Stages of a block: its layers by the input that they share (q/k/v, o, gate/up, down), as one batch shows.

Before anything is solved, a trial of one window through one block of each kind finds unsupported networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.expert_rows import RoutedRows
from nearplane.calibration.recorder import tensors_within
from nearplane.calibration.rows import Additions, Results, Rows, Seen, Uses, tensors_in, wide
from nearplane.errors import CalibrationError, ModelError, NearplaneError, first_few, first_line
from nearplane.models.ignored import pattern_of
from nearplane.models.layers import Layer, unwatched
from nearplane.models.model import NOT_IN_MEMORY, Block, Model
from nearplane.system.device import Device
from nearplane.system.memory import is_out_of_memory, is_refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """State of a forward pass at the moment when it enters a layer.

    Args:
        same: Key of the layer's input; layers with equal keys multiply the same rows.
        rows: Rows of the input per token of the block's input (or per encoder position); not an integer if the layer
            receives only some of the tokens.
        computed: Number of results numbered so far, see `Results`.
        alive: Bytes of all activations in memory.
        needed: Bytes of those that the rest of the pass uses. All of them on a GPU, whose kernels may use tensors unseen, and
            where places differ between batches.
        results: Number of all results so far, with those that have no number.
        idle: Places in their order of those that the rest of the pass does not use.
        routed: Bytes of the input of experts: shared by all experts, and with one row per pair of token and expert.
            None for other layers.
    """

    same: tuple[Any, ...]
    rows: float
    computed: int
    alive: int
    needed: int
    results: int
    idle: tuple[int, ...]
    routed: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLook:
    """Observations of the first batch in a block.

    Args:
        groups: Layers grouped by the input that they share, in the order they run.
        entered: {layer: one `Entered` per run of the layer}.
        operands: {layer: numbers of the results to whose sum its output is added}; None for a result without number.
        missing: Names of layers that did not run.
        unwatched: Name of a module whose operations depend on the tokens, which makes result numbers useless; or "".
        beside: Bytes that the network keeps for one window beside its hidden states: arguments of blocks that differ between
            windows, and keys and values that blocks share, of one network.
    """

    groups: tuple[tuple[Layer, ...], ...]
    entered: dict[str, list[Entered]]
    operands: dict[str, tuple[int | None, ...]]
    missing: tuple[str, ...]
    unwatched: str
    beside: tuple[int, int] = (0, 0)


def stages(block: Block, stream: Stream) -> list[tuple[Layer, ...]]:
    """Group the layers of a block by the input that they share; see `first_look`."""
    return [*first_look(block, stream).groups]


@torch.no_grad()
def first_look(block: Block, stream: Stream, *, trial: bool = False) -> FirstLook:
    """Run one batch through a block and group its layers by the input that they share: q/k/v, then o, gate/up, down.

    Two inputs are the same if they are the same memory and were not written to in between. Groups are in running order.

    Raises:
        CalibrationError: Some layers did not run, and it is no `trial`; the message names them.
    """
    module, hidden = block.quantized, stream.block_input(block, 0)
    encoded = stream.calls[block.name][0].encoder_positions
    block_inputs = [hidden] if encoded is None else [hidden, stream.quantized[0][:, encoded]]
    assert module is not None, NOT_IN_MEMORY
    layers = block.quantized_layers()
    entered: dict[str, list[Entered]] = {}
    kept_alive: list[Any] = []  # so that no other tensor reuses their memory
    results, uses = Results(hidden), Uses()
    additions = Additions(results=results)
    then: dict[str, list[_InMemory]] = {}  # like `entered`
    weights = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}

    def entering(layer: Layer, x: Any) -> None:
        results.watching = False
        storages = results.in_memory(but=weights)
        then.setdefault(layer.name, []).append(_InMemory(uses.count, storages, results.own()))
        entered.setdefault(layer.name, []).append(
            Entered(
                same=layer.same_input(x),
                rows=min((layer.share(x, states) for states in block_inputs), key=lambda share: share % 1),
                computed=len(results.numbered),
                results=results.count,
                alive=_bytes(storages.values()),
                needed=_bytes(storages.values()),
                idle=(),
                routed=x.sizes if layer.routed else None,
            )
        )
        kept_alive.append(x.untyped_storage())
        results.watching = True

    with uses, additions, ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.before(entering))
            if not layer.routed:
                hooks.enter_context(layer.after(additions.watch))
        output = stream.forward(block, module, 0, stream.quantized[0])
        additions.finish()
    uses.last[output.untyped_storage().data_ptr()] = math.inf
    depends = unwatched(block.name, module)
    if hidden.device.type == "cpu" and not depends:
        entered = {
            name: [_with_uses(*each, uses.last) for each in zip(runs, then[name], strict=True)]
            for name, runs in entered.items()
        }
    missing = tuple(layer.name for layer in layers if layer.name not in entered)
    if missing and not trial:
        raise unreached(", ".join(missing))
    return FirstLook(
        groups=_grouped(layers, entered, additions.found.keys()),
        entered=entered,
        operands=additions.found,
        missing=missing,
        unwatched=depends,
    )


def _grouped(
    layers: Iterable[Layer], entered: Mapping[str, Sequence[Entered]], added: Set[str]
) -> tuple[tuple[Layer, ...], ...]:
    """Group the layers that ran by their input, in the order in which they ran; `added`: whose output is added to a stream."""
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    by_name = {layer.name: layer for layer in layers}
    for name, runs in entered.items():
        layer = replace(by_name[name], calls=len(runs), adds=name in added and len(runs) == 1)
        groups.setdefault(tuple(run.same for run in runs), []).append(layer)
    return tuple(map(tuple, groups.values()))


class _InMemory(NamedTuple):
    """Number of operations of a forward pass so far, the memory of each result by its place, and those that may be dropped."""

    operations: int
    storages: Mapping[int, UntypedStorage]
    own: set[int]


def _with_uses(entered: Entered, before: _InMemory, last: Mapping[int, float]) -> Entered:
    """Add what the rest of a forward pass uses.

    Args:
        entered: State of the pass when it enters a layer.
        before: What was in memory at that moment.
        last: {address: number of the last operation that used it}.
    """
    used = {place for place, each in before.storages.items() if last.get(each.data_ptr(), 0) > before.operations}
    idle = (before.own & before.storages.keys()) - used
    needed = _bytes(each for place, each in before.storages.items() if place not in idle)
    return replace(entered, needed=needed, idle=tuple(sorted(idle)))


def _bytes(storages: Iterable[UntypedStorage]) -> int:
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def rows_of(name: str, quantized: Seen, original: Seen | None) -> Rows | RoutedRows:
    """Combine the observations of one batch in the two networks.

    Raises:
        CalibrationError: The layer receives different tokens in the two networks.
    """
    if quantized.routed is not None:
        rounded = None if quantized.rounded is None else partial(quantized.rounded, name)
        original_routed = None if original is None else original.routed
        return RoutedRows(quantized=quantized.routed, original=original_routed, rounded=rounded)
    X_hat = quantized.stacked
    if original is None:
        return Rows(X_hat=X_hat)
    X = original.stacked
    if len(X) != len(X_hat):
        raise CalibrationError(
            f"{name} receives {len(X)} tokens in the original network and {len(X_hat)} in the quantized network, as routed "
            f"experts do. Leave the layer unquantized with --ignore, or use --no-correct."
        )
    residual = {layer: wide(original.added[layer]) - r_hat for layer, r_hat in quantized.added.items()}
    return Rows(X_hat=X_hat, X=X, residual=residual)


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
    first_of_a_kind = [blocks[0] for blocks in blocks_by_kind(model) if blocks[0].layers]
    try:
        stream = skeleton(model, tokens[:2].split(1), device=device.place, dtype=dtype)
        last = max(map(model.blocks.index, first_of_a_kind), default=-1)
        for block in model.blocks[: last + 1] if stream.shares else first_of_a_kind:
            with block.on(device.place, dtype, original=False):
                look = first_look(block, stream, trial=True)
            for states in stream.shared.values():
                states.drop_handed(but=block.name)
            if block in first_of_a_kind:  # others compute what later blocks need
                _refuse_never_run(model, block, look)
                if not look.missing:
                    looks[block.name] = look
        shared = sum(each.nbytes for states in stream.shared.values() for each in tensors_in(states.values()))
        beside = _bytes_of_arguments(stream), shared
        return {name: replace(look, beside=beside) for name, look in looks.items()}
    except NearplaneError:
        raise
    except Exception as error:  # the code of a model may raise anything
        if is_out_of_memory(error) or is_refused(error):
            raise
        raise ModelError(
            f"{type(model.network).__name__} does not run on a window of {tokens.shape[1]} tokens ({first_line(error)}). Use "
            f"another --seqlen, or --solver round-to-nearest, which does not run the model."
        ) from error


def first_of_inputs(model: Model, looks: Mapping[str, FirstLook]) -> dict[str, str] | None:
    """Return the first layer with the same input by name of each layer in a block; None if the looks do not tell it of all."""
    found: dict[str, str] = {}
    for kind in blocks_by_kind(model):
        groups = looks[kind[0].name].groups if kind[0].name in looks else ()
        for block in kind:
            layers = {layer.name for layer in block.layers}
            for group in groups:
                names = [f"{block.name}{layer.name.removeprefix(kind[0].name)}" for layer in group]
                quantized = [name for name in names if name in layers]
                found |= dict.fromkeys(quantized, *quantized[:1])
            if not found.keys() >= layers:
                return None
    return found


def _bytes_of_arguments(stream: Stream) -> int:
    """Return the bytes of the arguments of all blocks that the second of two windows has for itself."""

    def storages(number: int) -> dict[int, UntypedStorage]:
        arguments = [[*calls[number].args, *calls[number].kwargs.values()] for calls in stream.calls.values()]
        return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors_within(arguments)}

    first, second = (storages(number) for number in (0, -1))
    return sum(each.nbytes() for place, each in second.items() if place not in first)


def _refuse_never_run(model: Model, block: Block, look: FirstLook) -> None:
    """Refuse layers that did not run if no layer did that differs only by a number, as another expert.

    Raises:
        CalibrationError: There are such layers; the message names them.
    """
    reached = {pattern_of(block.name, name) for name in look.entered}
    never = {name: kind for name in look.missing if (kind := pattern_of(block.name, name)) not in reached}
    if never:
        patterns = " ".join(f"'{pattern}'" for pattern in dict.fromkeys(never.values()))
        raise CalibrationError(
            f"{type(model.network).__name__} never runs {first_few([*never])} as separate layers, so their inputs are not "
            f"observable. Leave these layers unquantized with --ignore {patterns}."
        )


def blocks_by_kind(model: Model) -> list[list[Block]]:
    """Return the blocks grouped by kind; blocks of one kind have the same names and types of modules."""
    groups: dict[frozenset[tuple[str, type]], list[Block]] = {}
    for block in model.blocks:
        groups.setdefault(frozenset((name, type(part)) for name, part in block.empty.named_modules()), []).append(block)
    return list(groups.values())
