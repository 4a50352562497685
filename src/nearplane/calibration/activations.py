"""Activation streams: the inputs of each block of a network, found by running the network without its blocks.

`Dealt` says which batches of windows one rank of a run passes through the network; a run of one process has them
all. This module calls the blocks; other modules observe their layers meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.cache_scales import CacheRange, RoundedCaches
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.recorder import (
    ENCODER_OUT,
    Call,
    Recorder,
    Tape,
    mapped,
    part_of,
    stop,
    with_part,
)
from nearplane.calibration.rounded_stream import RoundedStream
from nearplane.calibration.shared_states import SharedStates, has_place_for_shared, with_shared
from nearplane.calibration.states_on_disk import Keep
from nearplane.calibration.texts import check_vocabulary
from nearplane.calibration.two_stacks import FinalNorm
from nearplane.errors import CalibrationError
from nearplane.models.kinds import InputKind, input_kind, shared_layers
from nearplane.models.model import NOT_IN_MEMORY, Block, Model
from nearplane.system.ranks import ONE_PROCESS, Ranks, evened


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Place of a rank's batches among all windows.

    The first batch, of one window, is on every rank: it shows what a block computes. Only rank 0 adds it to sums.

    Attributes:
        numbers: Number of each batch among the batches of all ranks.
        starts: Number of the first window of each batch.
        fitted: How many of these batches enter sums; the others hold extra windows, which enter none.
        batches: Batches of all ranks.
        most: Windows of the rank that has the most, by which all decide what fits into memory.
        windows: Calibration windows of all ranks.
        extra_windows: Extra windows of all ranks.
        sources: Number of the text in a mix of each batch of extra windows; empty for a single text.
        texts: Number of texts in a mix that have extra windows, 1 for a single text.
        ranks: The ranks that have the other batches.
    """

    numbers: Sequence[int]
    starts: Sequence[int]
    fitted: int
    batches: int
    most: int
    windows: int
    extra_windows: int = 0
    sources: Sequence[int] = ()
    texts: int = 1
    ranks: Ranks = ONE_PROCESS

    @property
    def repeated(self) -> bool:
        """Whether the first batch enters the sums of another rank."""
        return not self.ranks.leads

    @classmethod
    def among(
        cls, ranks: Ranks, fitted: Sequence[int], extra: Sequence[int] = (), sources: Sequence[int] = ()
    ) -> Dealt:
        """Return the batches of a rank; each has neighbouring ones, and about as many windows as the others.

        Args:
            ranks: The ranks.
            fitted, extra: Numbers of windows in the batches of calibration and of extra windows.
            sources: Number of the text of each batch of extra windows; empty for a single text.
        """
        starts = [0, *accumulate((*fitted, *extra))]
        first = [[0, *(1 + each for each in some)] for some in ranks.shares(len(fitted) - 1)]
        owners = evened([sum(fitted[each] for each in some) for some in first], extra)
        by_rank = [
            (some, [len(fitted) + each for each, owner in enumerate(owners) if owner == rank])
            for rank, some in enumerate(first)
        ]
        calibration, more = by_rank[ranks.rank]
        return cls(
            numbers=[*calibration, *more],
            starts=[starts[each] for each in (*calibration, *more)],
            fitted=len(calibration),
            batches=len(starts) - 1,
            most=max(sum(starts[each + 1] - starts[each] for each in (*some, *others)) for some, others in by_rank),
            windows=sum(fitted),
            extra_windows=sum(extra),
            sources=[sources[each - len(fitted)] for each in more] if sources else (),
            texts=1 + max(sources, default=0),
            ranks=ranks,
        )


class Stream:
    """Hidden states between two blocks of the network, in batches of (windows, seqlen, hidden).

    Attributes:
        quantized: Inputs of the next block in the quantized network; batches of extra windows come last.
        original: Inputs of the same block in the original network; None without a second stream. Both start equal.
        calls: {block name: the other arguments of the block, one `Call` per batch}.
        ahead: Whether `original` has already passed the next block of `quantized`.
        extra: Values that each block returns after the hidden states, for one window; None if it returns no tuple.
        between: Function from the output of the encoder's last block to the input of the decoder's cross-attention.
        sizes: Number of windows in each batch.
        dealt: Where these batches lie among all windows: on several ranks each has a share of them.
        rounding: Rounding of inputs in the quantized network; None: they are not rounded.
        cache: What looks at keys and values in the quantized network, or rounds them; None: nothing does.
        positions: {layer: weights of positions}, see `positions.py`; empty: all tokens count alike.
        shares: Whether some blocks use keys and values of earlier ones.
        handed: Names of what blocks return for the next one after the hidden states, see `Handed`.
        shared: {(whether of the quantized network, batch): keys and values that later blocks use, and what is handed on}.
    """

    def __init__(
        self,
        hidden: MutableSequence[Tensor],
        calls: dict[str, list[Call]],
        *,
        original: MutableSequence[Tensor] | None = None,
        extra: Sequence[tuple[Any, ...] | None] = (),
        between: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.quantized, self.original = hidden, original
        self.calls, self.ahead, self.extra, self.between = calls, False, extra, between
        self.sizes = [len(x) for x in hidden]
        self.dealt = Dealt.among(ONE_PROCESS, self.sizes)
        self.rounding: RoundedStream | None = None
        self.cache: CacheRange | RoundedCaches | None = None
        self.positions: Mapping[str, PositionWeights] = {}
        self.shares, self.handed = False, frozenset[str]()
        self.shared: dict[tuple[bool, int], SharedStates] = {}
        self._finite: list[Tensor] = []  # whether each output of the present block is finite

    def forward(
        self, block: Block, module: Callable[..., Any] | None, batch: int, hidden: Tensor, *, trial: bool = False
    ) -> Tensor:
        """Run a copy of a block on one batch and return its output hidden states.

        If it is a `trial`, later blocks do not get the keys and values that this pass computes for them.
        """
        assert module is not None, NOT_IN_MEMORY
        call = self.calls[block.name][batch]
        quantized = block.quantized is module
        if self.cache is not None and quantized and batch < self.dealt.fitted:
            call = self.cache.watched(block.name, batch, call)
        known = self.shared.setdefault((quantized, batch), SharedStates()) if self.shares else SharedStates()
        known = SharedStates(known) if trial else known
        call = with_shared(call, known)
        whole = hidden.clone()  # a block may work in place
        del hidden  # while the block pauses, nobody else may hold it
        if call.encoder_positions is not None:
            assert self.between is not None, "a decoder follows an encoder"
            encoded = self.between(whole[:, call.encoder_positions])
            args, kwargs = mapped(lambda value: encoded if value is ENCODER_OUT else value, (call.args, call.kwargs))
            call = replace(call, args=args, kwargs=kwargs)
        output = call.run(module, part_of(whole, call.positions))
        states: Tensor = output[0] if isinstance(output, tuple) else output
        if self.handed:
            known.hand_on(block.name, output, self.handed)
        return with_part(whole, call.positions, states)

    def block_input(self, block: Block, batch: int) -> Tensor:
        """Return the hidden states of the quantized network at the positions that a block works on."""
        return part_of(self.quantized[batch], self.calls[block.name][batch].positions)

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Move both streams past a block; each batch of inputs is freed as soon as its outputs exist.

        Raises:
            CalibrationError: The block returns NaN or Inf.
        """
        for batch in range(len(self.sizes)):
            self.quantized[batch] = self.noted(self.forward(block, block.quantized, batch, self.quantized[batch]))
            if self.original is not None and not self.ahead:
                self.original[batch] = self.noted(self.forward(block, block.original, batch, self.original[batch]))
        self.passed(block)

    def noted(self, output: Tensor) -> Tensor:
        """Return an output of a block; `check` refuses the block if it is not finite."""
        self._finite.append(torch.stack(output.aminmax()).isfinite().all())
        return output

    def check(self, block: Block) -> None:
        """Raise CalibrationError if an output of the block is not finite: a device is waited for once a block."""
        finite, self._finite = self._finite, []
        if finite and not torch.stack(finite).all():
            raise CalibrationError(
                f"{block.name} returns NaN or Inf. Check the model's weights, or use --compute-dtype float32."
            )

    def passed(self, block: Block) -> None:
        """Record that both streams have passed a block.

        Raises:
            CalibrationError: The block returned NaN or Inf.
        """
        self.check(block)
        for states in self.shared.values():
            states.drop_handed(but=block.name)
        self.ahead = False
        del self.calls[block.name]


@torch.no_grad()
def skeleton(
    model: Model,
    batches: Sequence[Tensor],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    embeddings: Tensor | None = None,
    keep: Keep = list,
) -> Stream:
    """Run the network without its blocks; record the first block's inputs and the other arguments of all blocks.

    Every block is replaced by a recorder that returns its input, so the model itself computes embeddings, masks and
    rotary tables; they are in memory only during this call.

    Args:
        model: The model to calibrate.
        batches: (windows, seqlen) int64 each, perhaps with sound; or (images, channels, height, width).
            One window of the first batch runs beforehand, to find what blocks return.
        device, dtype: Device and dtype of the computation and of the hidden states.
        embeddings: (vocabulary, hidden) input embeddings of the quantized network, for a second stream; None: one
            stream, from the original embeddings.
        keep: Function that makes the lists of hidden states.

    Raises:
        ModelError: The blocks do not run one after the other, each on the output of the one before.
        CalibrationError: A token is not in the model's vocabulary.
    """
    place = torch.device(device)
    for part in batches if input_kind(model.network) is not InputKind.IMAGES else ():
        check_vocabulary(part, len(model.network.get_input_embeddings().weight))
    starts = [next(i for i, b in enumerate(model.blocks) if b.name.startswith(f"{stack}.")) for stack in model.stacks]
    tape = Tape([block.name for block in model.blocks], starts)
    recorders = [Recorder(block.empty, index=index, tape=tape) for index, block in enumerate(model.blocks)]
    with model.around(recorders, place, dtype) as network, ExitStack() as first_blocks:
        if (head := network.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(stop)
        if len(starts) > 1:
            tape.between = FinalNorm(network.get_encoder())
        for start in starts:
            block = first_blocks.enter_context(model.blocks[start].on(place, dtype, original=False))
            tape.first_blocks[start] = block.quantized
        tape.probe(network, batches[0][:1], place)
        if not tape.first_blocks:
            first_blocks.close()
        original = None
        if embeddings is not None:
            original = tape.run(network, batches, place, keep)
            network.get_input_embeddings().weight.copy_(embeddings)
        hidden = tape.run(network, batches, place, keep)
    stream = Stream(hidden, tape.calls, original=original, extra=tape.extra, between=tape.between)
    stream.handed = frozenset(tape.handed)
    shared = shared_layers(model.config)
    unknown = shared is None and any(has_place_for_shared(calls[0]) for calls in tape.calls.values())
    stream.shares = bool(stream.handed) or bool(shared) or unknown
    return stream


def positions_per_window(model: Model, windows: Tensor) -> int:
    """Return the number of hidden states of one window: over both stacks; of an image, patches and class tokens."""
    return skeleton(model, [windows[:1]], device="cpu", dtype=torch.float32).quantized[0].shape[1]
