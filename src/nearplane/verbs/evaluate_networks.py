"""Predictions of networks on windows of text, for networks in memory and for those that are read block by block.

For a network without vocabulary head, the result is the embedding of each window: the mean of its last hidden states.

If a network in float32 would need too much of the free memory, only one of its blocks is in memory at a time, with the
hidden states of a chunk of the windows. The predictions agree to rounding in float32. Several networks run batch by batch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nearplane.calibration.activations import checked_finite, readout, skeleton
from nearplane.calibration.given import check_model, model_label
from nearplane.errors import ModelError
from nearplane.formats.layer_format import read_config
from nearplane.formats.stored import DecodedReader, quantization_of, reader_of
from nearplane.loading.dense_network import dense_network, stacks_of, stored_transposed, weight_shapes
from nearplane.loading.source_folder import source_folder
from nearplane.models.kinds import InputKind, call_kwargs, has_head, input_kind, is_framed, main_input, read_out
from nearplane.models.model import Model, open_model, positions_of
from nearplane.models.pretrained import empty_network
from nearplane.recipe.sizes import size_text
from nearplane.system.device import Device
from nearplane.system.file_hashes import check_hashes
from nearplane.system.fp8_mxfp4 import method_of
from nearplane.system.memory import free_memory, return_large_blocks

BATCH_TOKENS, OTHER_BATCH = 2048, 8  # tokens of text in a batch, and windows of other inputs
MAX_MEMORY_SHARE = 0.4  # of the free memory, which one network may use in float32
STATES = 0.2  # of the free memory, for the hidden states of a chunk; a block holds them twice while it runs

log = logging.getLogger(__name__)


class Network(ABC):
    """A network that predicts tokens or embeds windows.

    Attributes:
        folder: Folder of the network; None for a model object.
        device: Device that it runs on.
        takes: Kind of its input.
        start: First token of its decoder, if it takes sound.
        vocabulary: Number of tokens of its input embeddings; 0 if it takes images.
        embeds: Whether it has no vocabulary head.
        framed: Whether windows begin and end with special tokens, see `is_framed`.
        positions: Largest number of tokens in a window, or None if unlimited.
        width: Width of the hidden states that are kept in memory for a chunk of windows; 0 if none are.
    """

    start: int | None = None
    vocabulary: int
    width: int = 0

    def __init__(
        self, network: PreTrainedModel, folder: Path | None, device: torch.device, positions: int | None
    ) -> None:
        self.folder, self.device, self.positions = folder, device, positions
        self.takes, self.embeds, self.framed = input_kind(network), not has_head(network), is_framed(network)

    @abstractmethod
    def shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) shapes of its matrices."""

    @abstractmethod
    def predicting(self, windows: Tensor, batch: int) -> AbstractContextManager[Callable[[int], Tensor]]:
        """Return a context with a function from the number of a batch to its `result`."""

    def result(self, outputs: Tensor) -> Tensor:
        """Return float32 log-probabilities of every next token, or without head the mean of the last hidden states."""
        return outputs.float().mean(1) if self.embeds else _next_tokens(outputs)


class Held(Network):
    """A network that is in memory."""

    def __init__(self, network: PreTrainedModel, folder: Path | None = None) -> None:
        super().__init__(network, folder, network.device, positions_of(network.config, network))
        self.network = network
        self.start = network.config.decoder_start_token_id if self.takes is InputKind.SOUND else None
        self.vocabulary = 0 if self.takes is InputKind.IMAGES else network.get_input_embeddings().weight.shape[0]

    def shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) shapes of its linear layers."""
        linear = (part for part in self.network.modules() if isinstance(part, nn.Linear))
        return [(part.out_features, part.in_features) for part in linear]

    @contextmanager
    def predicting(self, windows: Tensor, batch: int) -> Iterator[Callable[[int], Tensor]]:
        """Run batches with dropout switched off; see `Network`."""
        parts = windows.split(batch)
        modes = [(module, module.training) for module in self.network.modules()]
        try:
            for module, _ in modes:
                module.training = False
            yield lambda index: self.result(_outputs(self.network, parts[index].to(self.device)))
        finally:
            for module, mode in modes:
                module.training = mode


class Streamed(Network):
    """A network on disk, with one block in memory at a time.

    Raises:
        ModelError: The network cannot run block by block.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__(model.network, model.folder, device, model.positions)
        self.model = model
        if self.takes is not InputKind.TEXT:
            raise ModelError(f"it takes {self.takes}")
        embeddings = model.network.get_input_embeddings().weight
        self.vocabulary, hidden = embeddings.shape
        self.width = hidden * len(model.stacks)
        skeleton(model, [torch.zeros(1, 2, dtype=torch.int64)], device=device, dtype=torch.float32)

    def shapes(self) -> list[tuple[int, int]]:
        """Return the (out, in) shapes of the layers of its blocks."""
        return [layer.shape for layer in self.model.layers]

    @contextmanager
    def predicting(self, windows: Tensor, batch: int) -> Iterator[Callable[[int], Tensor]]:
        """Pass the windows through all blocks, then keep the modules behind them in memory; see `Network`."""
        device, dtype = self.device, torch.float32
        parts = windows.split(batch)
        stream = skeleton(self.model, parts, device=device, dtype=dtype)
        for block in self.model.blocks:
            with torch.no_grad(), block.on(device, dtype, original=False):
                for index, hidden in enumerate(stream.quantized):
                    stream.quantized[index] = checked_finite(
                        stream.forward(block, block.quantized, index, hidden), block
                    )
            stream.passed(block)
        with readout(self.model, stream, device=device, dtype=dtype) as logits:
            yield lambda index: self.result(logits(parts[index], stream.quantized[index]))


def opened(model: str | Path | PreTrainedModel, device: Device, *, trust_remote_code: bool = False) -> Network:
    """Return the network of a model object, unchanged, or of a folder, in float32 with every weight decoded.

    Raises:
        ModelError, FormatError: The network cannot be read.
    """
    return_large_blocks()
    if not isinstance(model, str | Path):
        return Held(check_model(model))
    folder = source_folder(model, trust_remote_code=trust_remote_code)
    size, free = _size(folder, trust_remote_code), device.free()
    if device.on_cpu and free is not None and size > MAX_MEMORY_SHARE * free:
        try:
            streamed = Streamed(on_disk(folder, trust_remote_code=trust_remote_code), device.place)
        except ModelError as error:
            log.warning("%s is loaded as a whole, because it cannot run block by block: %s", model_label(model), error)
        else:
            sizes = model_label(model), size_text(size), size_text(free)
            log.info("%s runs block by block, because it would need %s in float32 and %s are free", *sizes)
            return streamed
    return Held(dense_network(folder, trust_remote_code=trust_remote_code).to(device.place), folder)


def on_disk(folder: Path, *, trust_remote_code: bool = False) -> Model:
    """Return the model of a folder with its weights on disk; quantized weights are decoded when they are read.

    Raises:
        ModelError, FormatError: The model cannot be read, or cannot be split into blocks.
    """
    if quantization_of(folder) is None or method_of(read_config(folder)) is not None:
        return open_model(str(folder), trust_remote_code=trust_remote_code)
    network = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader_of(folder)).eval()
    check_hashes(folder, weights=reader_of(folder).checksums is None)
    reader = DecodedReader(folder, weight_shapes(network), stored_transposed(network), stacks_of(network))
    return Model(folder, network, reader, trust_remote_code=trust_remote_code)


def _size(folder: Path, trust_remote_code: bool) -> int:
    """Return the size of a folder's network in float32, in bytes."""
    network = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader_of(folder))
    return sum(4 * parameter.numel() for parameter in network.parameters())


def windows_at_a_time(networks: Sequence[Network], windows: Tensor) -> int:
    """Return the number of windows in a batch."""
    text = all(network.takes is InputKind.TEXT for network in networks)
    return max(1, BATCH_TOKENS // windows.shape[1]) if text else OTHER_BATCH


def predictions(networks: Sequence[Network], windows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of windows (windows, seqlen), each followed by the result of every network.

    See `Network.result`.
    """
    batch = windows_at_a_time(networks, windows)
    for chunk in windows.split(_chunk(networks, windows.shape[1], batch)):
        with ExitStack() as stack:
            functions = [stack.enter_context(network.predicting(chunk, batch)) for network in networks]
            for index, part in enumerate(chunk.split(batch)):
                with torch.no_grad():
                    predicted = [function(index) for function in functions]
                yield part, *predicted


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return (windows, seqlen - 1, vocabulary) float32 log-probabilities of every next token of `tokens` (windows, seqlen)."""
    return _next_tokens(_outputs(model, tokens))


def _outputs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the logits of a network, or its last hidden states if it has no head."""
    return read_out(model, model(main_input(model, tokens), **call_kwargs(model, tokens)))


def _next_tokens(logits: Tensor) -> Tensor:
    return logits[:, :-1].float().log_softmax(-1)


def _chunk(networks: Sequence[Network], seqlen: int, batch: int) -> int:
    """Return the number of windows that pass through the blocks together: as many whole batches as fit in memory."""
    width, free = sum(network.width for network in networks), free_memory()
    if not width or free is None:
        return 1 << 60
    return batch * max(1, int(STATES * free / (4 * width * seqlen * batch)))
