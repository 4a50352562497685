"""What networks predict of windows of text: of networks that are in memory, or on disk and pass block by block.

Networks without head predict nothing: of these it is the embedding of each window, the mean of its last hidden states.

Where a network in float32 would take more than its share of the memory that is free, one block of it is in memory at a time, and
the hidden states of a chunk of the windows; the predictions are the same to the noise of float32. Several networks go side by side.
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

from nearplane.calibration.activations import finite, readout, skeleton
from nearplane.calibration.given import called, check_model
from nearplane.errors import ModelError
from nearplane.formats.layer_format import read_config
from nearplane.formats.stored import DecodedReader, quantization_of, reader_of
from nearplane.loading.dense_network import dense_network, stacks_of, stored_transposed, weight_shapes
from nearplane.models.kinds import Taken, has_head, is_framed, main_input, read_out, taken_by, words
from nearplane.models.model import Model, open_model, positions_of
from nearplane.models.pretrained import empty_network, find_folder
from nearplane.recipe.sizes import size_text
from nearplane.system.device import Device
from nearplane.system.fp8_mxfp4 import method_of
from nearplane.system.memory import free_memory, give_back_large

BATCH_TOKENS, FEW = 2048, 8  # of a batch: of text, and windows of anything else
SHARE = 0.4  # of the memory that is free, which one network may take in float32
STATES = 0.2  # of it, which the hidden states of a chunk of windows may take; a network has them twice while it passes a block

log = logging.getLogger(__name__)


class Network(ABC):
    """A network that can be asked what it predicts.

    Attributes:
        folder: that it is from; None: an object.
        device: that it computes on.
        takes: what it is given.
        start: the token with which its decoder starts, where it takes sound.
        vocabulary: how many tokens its input embeddings have; 0 where it takes images.
        embeds: whether it has no head.
        framed: whether windows are to begin and end with tokens of its own, see `is_framed`.
        positions: that it was built for, or None.
        width: of its hidden states, where those of all windows are in memory; else 0.
    """

    start: int | None = None
    vocabulary: int
    width: int = 0

    def __init__(
        self, network: PreTrainedModel, folder: Path | None, device: torch.device, positions: int | None
    ) -> None:
        self.folder, self.device, self.positions = folder, device, positions
        self.takes, self.embeds, self.framed = taken_by(network), not has_head(network), is_framed(network)

    @abstractmethod
    def shapes(self) -> list[tuple[int, int]]:
        """Return (out, in) of its matrices."""

    @abstractmethod
    def predicting(self, windows: Tensor, batch: int) -> AbstractContextManager[Callable[[int], Tensor]]:
        """Return a context in which a function from the number of a batch gives `said` of it."""

    def said(self, outputs: Tensor) -> Tensor:
        """Return float32 log-probabilities of every next token, or without head the mean of the last hidden states."""
        return outputs.float().mean(1) if self.embeds else _next_tokens(outputs)


class Held(Network):
    """A network in memory, as it is."""

    def __init__(self, network: PreTrainedModel, folder: Path | None = None) -> None:
        super().__init__(network, folder, network.device, positions_of(network.config, network))
        self.network = network
        self.start = network.config.decoder_start_token_id if self.takes is Taken.SOUND else None
        self.vocabulary = 0 if self.takes is Taken.IMAGES else network.get_input_embeddings().weight.shape[0]

    def shapes(self) -> list[tuple[int, int]]:
        """Return (out, in) of its linear layers."""
        linear = (part for part in self.network.modules() if isinstance(part, nn.Linear))
        return [(part.out_features, part.in_features) for part in linear]

    @contextmanager
    def predicting(self, windows: Tensor, batch: int) -> Iterator[Callable[[int], Tensor]]:
        """Switch dropout off; see `Network`."""
        parts = windows.split(batch)
        modes = [(module, module.training) for module in self.network.modules()]
        try:
            for module, _ in modes:
                module.training = False
            yield lambda index: self.said(_outputs(self.network, parts[index].to(self.device)))
        finally:
            for module, mode in modes:
                module.training = mode


class Streamed(Network):
    """A network on disk, of which one block is in memory at a time.

    Raises:
        ModelError: it does not run block by block.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__(model.network, model.folder, device, model.positions)
        self.model = model
        if self.takes is not Taken.TEXT:
            raise ModelError(f"it takes {self.takes}")
        embeddings = model.network.get_input_embeddings().weight
        self.vocabulary, hidden = embeddings.shape
        self.width = hidden * len(model.stacks)
        skeleton(model, [torch.zeros(1, 2, dtype=torch.int64)], device=device, dtype=torch.float32)

    def shapes(self) -> list[tuple[int, int]]:
        """Return (out, in) of the layers of its blocks."""
        return [layer.shape for layer in self.model.layers]

    @contextmanager
    def predicting(self, windows: Tensor, batch: int) -> Iterator[Callable[[int], Tensor]]:
        """Pass the windows through all blocks, then hold what follows them; see `Network`."""
        device, dtype = self.device, torch.float32
        parts = windows.split(batch)
        stream = skeleton(self.model, parts, device=device, dtype=dtype)
        for block in self.model.blocks:
            with torch.no_grad(), block.on(device, dtype, original=False):
                for index, hidden in enumerate(stream.quantized):
                    stream.quantized[index] = finite(stream.forward(block, block.quantized, index, hidden), block)
            stream.passed(block)
        with readout(self.model, stream, device=device, dtype=dtype) as logits:
            yield lambda index: self.said(logits(parts[index], stream.quantized[index]))


def opened(model: str | Path | PreTrainedModel, device: Device, *, trust_remote_code: bool = False) -> Network:
    """Return the network of an object, which is run as it is, or of a folder, in float32 with every weight decoded.

    Raises:
        ModelError, FormatError: it cannot be read.
    """
    give_back_large()
    if not isinstance(model, str | Path):
        return Held(check_model(model))
    folder = find_folder(str(model), trust_remote_code=trust_remote_code)
    size, free = _size(folder, trust_remote_code), device.free()
    if device.on_cpu and free is not None and size > SHARE * free:
        try:
            streamed = Streamed(on_disk(folder, trust_remote_code=trust_remote_code), device.place)
        except ModelError as error:
            log.warning("%s is held in memory as a whole, as it does not run block by block: %s", called(model), error)
        else:
            said = called(model), size_text(size), size_text(free)
            log.info("%s passes block by block: it would take %s in float32, %s are free", *said)
            return streamed
    return Held(dense_network(folder, trust_remote_code=trust_remote_code).to(device.place), folder)


def on_disk(folder: Path, *, trust_remote_code: bool = False) -> Model:
    """Return the model of a folder, quantized or not, whose weights stay on disk; quantized ones are decoded when they are read.

    Raises:
        ModelError, FormatError: it cannot be read, or not be taken apart.
    """
    if quantization_of(folder) is None or method_of(read_config(folder)) is not None:
        return open_model(str(folder), trust_remote_code=trust_remote_code)
    network = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader_of(folder)).eval()
    reader = DecodedReader(folder, weight_shapes(network), stored_transposed(network), stacks_of(network))
    return Model(folder, network, reader, trust_remote_code=trust_remote_code)


def _size(folder: Path, trust_remote_code: bool) -> int:
    """Return the bytes of a folder's network in float32."""
    network = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader_of(folder))
    return sum(4 * parameter.numel() for parameter in network.parameters())


def windows_at_a_time(networks: Sequence[Network], windows: Tensor) -> int:
    """Return how many windows make a batch."""
    text = all(network.takes is Taken.TEXT for network in networks)
    return max(1, BATCH_TOKENS // windows.shape[1]) if text else FEW


def predictions(networks: Sequence[Network], windows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of windows (windows, seqlen), and behind each what every network predicts of it.

    See `Network.said`.
    """
    batch = windows_at_a_time(networks, windows)
    for chunk in windows.split(_chunk(networks, windows.shape[1], batch)):
        with ExitStack() as stack:
            functions = [stack.enter_context(network.predicting(chunk, batch)) for network in networks]
            for index, part in enumerate(chunk.split(batch)):
                with torch.no_grad():
                    found = [predicted(index) for predicted in functions]
                yield part, *found


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return (windows, seqlen - 1, vocabulary) float32 log-probabilities of every next token of `tokens` (windows, seqlen)."""
    return _next_tokens(_outputs(model, tokens))


def _outputs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the logits of a network, or the last hidden states of one without head."""
    return read_out(model, model(main_input(model, tokens), **words(model, tokens)))


def _next_tokens(logits: Tensor) -> Tensor:
    return logits[:, :-1].float().log_softmax(-1)


def _chunk(networks: Sequence[Network], seqlen: int, batch: int) -> int:
    """Return how many windows pass through the blocks together: whole batches, as many as memory holds."""
    width, free = sum(network.width for network in networks), free_memory()
    if not width or free is None:
        return 1 << 60
    return batch * max(1, int(STATES * free / (4 * width * seqlen * batch)))
