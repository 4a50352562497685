"""Predictions of networks on windows of text, for networks in memory and for those that are read block by block.

A batch of windows runs up to the head. Logits are then computed for some positions at a time, since those of a long window
and a large vocabulary take more memory than all else.

If a network in float32 would need too much of the device's free memory, only one of its blocks is there at a time, with the
hidden states of a chunk of the windows. The predictions agree to rounding in float32. Several networks run batch by batch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nearplane.calibration.activations import skeleton
from nearplane.calibration.cache_scales import RoundedCaches, cache_argument, rounding_cache
from nearplane.calibration.network_ends import readout
from nearplane.calibration.recorder import Stop
from nearplane.errors import ModelError
from nearplane.formats.layer_format import read_config
from nearplane.formats.stored import DecodedReader, quantization_of, reader_of
from nearplane.loading.dense_network import dense_network, stacks_of, stored_transposed, weight_shapes
from nearplane.loading.rounded_layers import RoundedLayers, round_inputs
from nearplane.loading.source_folder import source_folder
from nearplane.models.kinds import (
    InputKind,
    call_kwargs,
    has_head,
    has_two_stacks,
    input_kind,
    is_framed,
    main_input,
    read_out,
)
from nearplane.models.model import NOT_IN_MEMORY, Block, Model, open_model, positions_of
from nearplane.models.model_objects import check_model
from nearplane.models.pretrained import empty_network
from nearplane.models.spoken import Spoken
from nearplane.system.device import Device
from nearplane.system.memory import return_large_blocks
from nearplane.system.paths import name_of
from nearplane.system.ranks import Ranks
from nearplane.system.recorded_hashes import check_hashes
from nearplane.system.sizes import size_text
from nearplane.system.source_storage import method_of

BATCH_TOKENS, OTHER_BATCH = 2048, 8  # tokens of text in a batch, and windows of other inputs
MAX_MEMORY_SHARE = 0.4  # of the free memory, which one network may use in float32
TRIED_POSITIONS = 6  # on which it is tried whether the head runs apart
ROUNDING = 64  # units in the last place of the largest logit that count as rounding
NOT_APART = "%s computes the logits of a whole batch at once, because its head does not run apart"
STATES = 0.2  # of the free memory, for the hidden states of a chunk; a block holds them twice while it runs

log = logging.getLogger(__name__)


Readout = Callable[[int, int], Tensor]  # (first, end) -> outputs (windows, end - first, ..) at these positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a network before its weights are read.

    Args:
        name: Name in messages.
        network: The network: a model object, or the network of a folder on the meta device.
        folder: Folder of the network; None for a model object.
        takes: Kind of its input.
        embeds: Whether it has no vocabulary head.
        framed: Whether windows begin and end with special tokens, see `is_framed`.
        positions: Largest number of tokens in a window, or None if unlimited.
        vocabulary: Number of tokens of its input embeddings; 0 if it takes images.
        start: First token of its decoder, if it takes sound.
    """

    name: str
    network: PreTrainedModel
    folder: Path | None
    takes: InputKind
    embeds: bool
    framed: bool
    positions: int | None
    vocabulary: int
    start: int | None

    @classmethod
    def of(cls, model: str | Path | PreTrainedModel, *, trust_remote_code: bool = False) -> Outline:
        """Return the outline of a model object, or of a folder, hub id or .gguf file.

        Raises:
            ModelError, FormatError: The config cannot be read, or describes no network.
        """
        folder = None
        if isinstance(model, str | Path):
            folder = source_folder(model, trust_remote_code=trust_remote_code)
            network = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader_of(folder))
        else:
            network = check_model(model)
        takes = input_kind(network)
        return cls(
            name=name_of(model),
            network=network,
            folder=folder,
            takes=takes,
            embeds=not has_head(network),
            framed=is_framed(network),
            positions=positions_of(network.config, network),
            vocabulary=0 if takes is InputKind.IMAGES else network.get_input_embeddings().weight.shape[0],
            start=network.config.decoder_start_token_id if takes is InputKind.SOUND else None,
        )

    @property
    def size(self) -> int:
        """Bytes of its parameters in float32."""
        return sum(4 * parameter.numel() for parameter in self.network.parameters())


class Network(ABC):
    """A network that predicts tokens or embeds windows.

    Attributes:
        outline: Description of the network before its weights are read.
        device: Device that it runs on, with its ranks.
        width: Width of the hidden states that are kept in memory for a chunk of windows; 0 if none are.
        rounded: Layers that multiply rounded inputs while it predicts; empty: none do.
        cache_scales: Scales by which keys and values are rounded, by the number of the layer; None: they are not.
    """

    width: int = 0

    def __init__(self, outline: Outline, device: Device) -> None:
        self.outline, self.device, self.rounded = outline, device, RoundedLayers()
        self.cache_scales: Mapping[int, tuple[Tensor, Tensor]] | None = None

    @abstractmethod
    def shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) shapes of its matrices."""

    @abstractmethod
    def predicting(self, windows: Tensor, batch: int) -> AbstractContextManager[Callable[[int], Readout]]:
        """Return a context with a function that runs a batch, of which it gets the number, up to the head.

        The `Readout` that it returns computes logits, or the last hidden states of a network without head.
        """


class Held(Network):
    """A network that is in memory."""

    def __init__(self, outline: Outline, network: PreTrainedModel, ranks: Ranks) -> None:
        super().__init__(outline, Device(network.device, ranks=ranks))
        self.network = network

    def shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) shapes of its linear layers."""
        linear = (part for part in self.network.modules() if isinstance(part, nn.Linear))
        return [(part.out_features, part.in_features) for part in linear]

    @contextmanager
    def predicting(self, windows: Tensor, batch: int) -> Iterator[Callable[[int], Readout]]:
        """Run batches with dropout switched off; see `Network`."""
        parts = windows.split(batch)
        modes = [(module, module.training) for module in self.network.modules()]
        try:
            for module, _ in modes:
                module.training = False
            body = None if self.outline.embeds else self._body(windows[:1].to(self.device.place))
            run = self._whole if body is None else partial(self._head_apart, body)
            with round_inputs(self.rounded, self.network):
                yield lambda index: run(parts[index].to(self.device.place))
        finally:
            for module, mode in modes:
                module.training = mode

    def _run(self, tokens: Tensor) -> Tensor:
        cache = {} if self.cache_scales is None else {cache_argument(self.network): rounding_cache(self.cache_scales)}
        return _outputs(self.network, tokens, **cache)

    def _whole(self, tokens: Tensor) -> Readout:
        outputs = self._run(tokens)
        return lambda first, end: outputs[:, first:end]

    def _head_apart(self, body: nn.Module, tokens: Tensor) -> Readout:
        """Run a batch up to the head; the readout passes hidden states of some positions on from there.

        It calls the network once more with a body that returns these states, so that all that follows is done as the
        network does it.
        """
        outputs: list[Any] = []

        def capture(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append(output)
            raise Stop

        with body.register_forward_hook(capture), suppress(Stop):
            self._run(tokens)
        (output,) = outputs
        if isinstance(output, tuple):
            raise TypeError("the body returns a tuple")

        def readout(first: int, end: int) -> Tensor:
            piece = copy(output)
            piece["last_hidden_state"] = output.last_hidden_state[:, first:end]
            with replaced_forward(body, lambda *args, **kwargs: piece):
                return _outputs(self.network, tokens[:, first:end])

        return readout

    def _body(self, window: Tensor) -> nn.Module | None:
        """Return the module that the network calls for hidden states, if logits are the same in parts; else it is logged."""
        window = window if isinstance(window, Spoken) else window[:, :TRIED_POSITIONS]
        network = self.network
        with torch.no_grad():
            for body_of in () if has_two_stacks(network) else (attrgetter("base_model"), methodcaller("get_decoder")):
                with suppress(Exception):  # a network may do anything between its body and its head
                    body: nn.Module = body_of(network)
                    if same_in_parts(self._head_apart(body, window), self._whole(window)(0, window.shape[1])):
                        return body
        log.info(NOT_APART, self.outline.name)
        return None


class Streamed(Network):
    """A network on disk, with one block in memory at a time.

    Raises:
        ModelError: The network cannot run block by block.
    """

    def __init__(self, outline: Outline, model: Model, device: Device, dtype: torch.dtype) -> None:
        super().__init__(outline, device)
        self.model, self.dtype = model, dtype
        if outline.takes is not InputKind.TEXT:
            raise ModelError(f"it takes {outline.takes}")
        self.width = model.network.get_input_embeddings().weight.shape[1] * len(model.stacks)
        skeleton(model, [torch.zeros(1, 2, dtype=torch.int64)], device=device.place, dtype=dtype)

    def shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) shapes of the layers of its blocks."""
        return [layer.shape for layer in self.model.layers]

    @contextmanager
    def predicting(self, windows: Tensor, batch: int) -> Iterator[Callable[[int], Readout]]:
        """Pass the windows through all blocks, then keep the modules behind them in memory; see `Network`."""
        device, dtype = self.device.place, self.dtype
        parts = windows.split(batch)
        stream = skeleton(self.model, parts, device=device, dtype=dtype)
        stream.cache = None if self.cache_scales is None else RoundedCaches(self.cache_scales)
        for block in self.model.in_turn(self.model.blocks, device):
            with torch.no_grad(), block.on(device, dtype, original=False), self._rounded(block):
                for index, hidden in enumerate(stream.quantized):
                    stream.quantized[index] = stream.noted(stream.forward(block, block.quantized, index, hidden))
            stream.passed(block)
        with readout(self.model, stream, device=device, dtype=dtype) as logits:

            def whole(tokens: Tensor, hidden: Tensor) -> Readout:
                outputs = logits(tokens, hidden)
                return lambda first, end: outputs[:, first:end]

            def in_parts(tokens: Tensor, hidden: Tensor) -> Readout:
                return lambda first, end: logits(tokens[:, first:end], hidden[:, first:end])

            few = parts[0][:1, :TRIED_POSITIONS], stream.quantized[0][:1, :TRIED_POSITIONS]
            single = not self.outline.embeds and len(self.model.stacks) == 1
            run = in_parts if single and same_in_parts(in_parts(*few), logits(*few)) else whole
            if run is whole and not self.outline.embeds:
                log.info(NOT_APART, self.outline.name)
            yield lambda index: run(parts[index], stream.quantized[index])

    def _rounded(self, block: Block) -> ExitStack:
        assert block.quantized is not None, NOT_IN_MEMORY
        return round_inputs(self.rounded, block.quantized, f"{block.name}.")


def same_in_parts(read: Readout, logits: Tensor) -> bool:
    """Return whether a readout gives the same logits (windows, positions, vocabulary) in two parts, to rounding."""
    end = logits.shape[1]
    parts = torch.cat([read(0, end // 2), read(end // 2, end)], 1)
    allowed = ROUNDING * torch.finfo(logits.dtype).eps * float(logits[logits.isfinite()].abs().max())
    return parts.shape == logits.shape and torch.allclose(parts, logits, rtol=0, atol=allowed, equal_nan=True)


def opened(
    outline: Outline, device: Device, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> Network:
    """Return the network of a model object, unchanged, or of a folder, with every weight decoded.

    Raises:
        ModelError, FormatError: The network cannot be read.
    """
    return_large_blocks()
    if outline.folder is None:
        return Held(outline, outline.network, device.ranks)
    folder = outline.folder
    size, free = outline.size * dtype.itemsize // 4, device.free()
    if free is not None and size > MAX_MEMORY_SHARE * free:
        try:
            streamed = Streamed(outline, on_disk(folder, trust_remote_code=trust_remote_code), device, dtype)
        except ModelError as error:
            log.warning("%s is loaded as a whole, because it cannot run block by block: %s", outline.name, error)
        else:
            sizes = outline.name, size_text(size), str(dtype).removeprefix("torch."), size_text(free)
            log.info("%s runs block by block, because it would need %s in %s and %s are free", *sizes)
            return streamed
    network = dense_network(folder, dtype=dtype, device=device.place, trust_remote_code=trust_remote_code)
    return Held(outline, network, device.ranks)


def on_disk(folder: Path, *, ends: tuple[bool, bool] = (False, False), trust_remote_code: bool = False) -> Model:
    """Return the model of a folder with its weights on disk; quantized weights are decoded when they are read.

    Args:
        folder: The folder of the model.
        ends: Whether input embeddings and head of a quantized folder count among its layers.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ModelError, FormatError: The model cannot be read, or cannot be split into blocks.
    """
    if quantization_of(folder) is None or method_of(folder, read_config(folder)) is not None:
        return open_model(str(folder), trust_remote_code=trust_remote_code)
    network = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader_of(folder)).eval()
    check_hashes(folder, weights=reader_of(folder).checksums is None)
    reader = DecodedReader(folder, weight_shapes(network), stored_transposed(network), stacks_of(network))
    return Model(folder, network, reader, ends=ends, trust_remote_code=trust_remote_code)


def windows_at_a_time(networks: Sequence[Network], windows: Tensor) -> int:
    """Return the number of windows in a batch."""
    text = all(network.outline.takes is InputKind.TEXT for network in networks)
    return max(1, BATCH_TOKENS // windows.shape[1]) if text else OTHER_BATCH


def batches_here(networks: Sequence[Network], windows: Tensor, ranks: Ranks) -> range:
    """Return the numbers of the batches of windows that this process passes through the networks, of several ranks."""
    return ranks.share(-(-len(windows) // windows_at_a_time(networks, windows)))


def predictions(networks: Sequence[Network], windows: Tensor, ranks: Ranks) -> Iterator[tuple[slice, list[Readout]]]:
    """Yield for each batch of windows (windows, seqlen) its place in them and a readout of every network.

    On several ranks, each runs a share of the batches, none where there are fewer than ranks. Autograd is the caller's
    to switch off.
    """
    batch, own = windows_at_a_time(networks, windows), batches_here(networks, windows, ranks)
    if not own:
        return  # a tensor without windows is split into one part, not into none
    begin = own.start * batch
    for chunk in windows[begin : own.stop * batch].split(_chunk(networks, windows.shape[1], batch)):
        with ExitStack() as stack:
            functions = [stack.enter_context(network.predicting(chunk, batch)) for network in networks]
            for index, part in enumerate(chunk.split(batch)):
                yield slice(begin, begin + len(part)), [function(index) for function in functions]
                begin += len(part)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return (windows, seqlen - 1, vocabulary) float32 log-probabilities of every next token of `tokens` (windows, seqlen)."""
    return _outputs(model, tokens)[:, :-1].float().log_softmax(-1)


def _outputs(model: PreTrainedModel, tokens: Tensor, **more: Any) -> Tensor:
    """Return the logits of a network, or its last hidden states if it has no head; `more` are arguments of its call."""
    return read_out(model, model(main_input(model, tokens), **call_kwargs(model, tokens), **more))


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module call another function in place of its forward pass within the context."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _chunk(networks: Sequence[Network], seqlen: int, batch: int) -> int:
    """Return the number of windows that pass through the blocks together: as many whole batches as fit in memory."""
    streamed = [network for network in networks if network.width]
    if not streamed:
        return 1 << 60
    width, free = sum(network.width for network in streamed), min(each.device.free() or 0 for each in streamed)
    return batch * max(1, int(STATES * free / (4 * width * seqlen * batch)))
