"""Models whose weights stay on disk: the network is on the meta device, and one block at a time is loaded and freed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import ModelError
from nearplane.models.conversion import Load, Weights
from nearplane.models.expert_names import stacked_names
from nearplane.models.experts import make_observable
from nearplane.models.folded import FoldedReader, stored_scales
from nearplane.models.kinds import padded_positions, towers
from nearplane.models.layers import Layer, is_stack
from nearplane.models.pretrained import (
    empty_network,
    find_folder,
    tokenizer_of,
    vocabulary_of,
)
from nearplane.models.structure import (
    IGNORED_REASON,
    MATRICES,
    find_ends,
    find_layers,
    find_stacks,
    kept_parts,
    unbuilt_parts,
)
from nearplane.record.fold import Fold
from nearplane.system.files import read_object
from nearplane.system.fp8_mxfp4 import WidenedReader, form_of
from nearplane.system.memory import working_on
from nearplane.system.paths import INDEX, WEIGHTS_FILE
from nearplane.system.safetensors_files import ShardReader, TensorReader
from nearplane.system.source_storage import METHODS, method_of, refuse_leftover, section_of, source_reader

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
NOT_IN_MEMORY = "a block is in memory only within `with block.on(...)`, its original only where asked for"


def open_model(
    source: str,
    *,
    trust_remote_code: bool = False,
    ignore: Sequence[str] = (),
    embeddings: bool = False,
    head: bool = False,
) -> Model:
    """Open a language model or an encoder for quantization, without reading weights.

    Args:
        source: A folder of safetensors and config.json, or a hub id.
        trust_remote_code: Whether code that comes with the model may run.
        ignore: Regular expressions of layers that stay unquantized, see `find_layers`.
        embeddings, head: Whether input embeddings and head are quantized as well, see `find_ends`.

    Raises:
        ModelError: The model is missing, already quantized, or has no list of blocks.
    """
    folder = find_folder(source, trust_remote_code=trust_remote_code)
    plain = read_object(folder / "config.json", expected="Pass what save_pretrained wrote", error=ModelError)
    refuse_quantized(source, folder, plain)
    if (file := plain.get("transformers_weights")) not in (None, WEIGHTS_FILE, INDEX):
        raise ModelError(
            f"{folder}/config.json: transformers_weights is {str(file)[:60]!r}, a file that nearplane would not read. Rename "
            f"that file to {WEIGHTS_FILE} and delete the field."
        )
    dtype = str(plain.get("dtype", plain.get("torch_dtype")))
    if getattr(torch, dtype, torch.float32) not in DTYPES.values():  # transformers refuses what torch does not have
        raise ModelError(
            f"{folder}/config.json: dtype is {dtype[:60]!r}. Expected float64, float32, float16 or bfloat16. Fetch "
            f"config.json again."
        )
    reader = source_reader(folder, plain)
    network = empty_network(folder, dtype=_dtype(reader), trust_remote_code=trust_remote_code, reader=reader).eval()
    return Model(folder, network, reader, ignore=ignore, ends=(embeddings, head), trust_remote_code=trust_remote_code)


def refuse_quantized(source: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model whose config.json says that it is quantized already.

    Args:
        source: The model as the user wrote it.
        folder: Its folder, in which there may be no weights.
        config: Contents of its config.json.

    Raises:
        ModelError: It is quantized, in a format that is not decoded as an original, or was and is no more.
    """
    if (section := section_of(folder, config)) is not None and method_of(folder, config) is None:
        if any(folder.glob("*.safetensors")):
            refuse_leftover(folder, section, ShardReader(folder).infos.values())
        raise ModelError(
            f"{source} is already quantized with {form_of(section)}. Pass the original model, which may be stored as "
            f"{' or '.join(METHODS)}."
        )


def positions_of(config: Any, network: nn.Module | None = None) -> int | None:
    """Return the number of positions of a model, without those reserved for padding; None without a limit."""
    padding = 0 if network is None else padded_positions(network)
    for section in (config, getattr(config, "text_config", None)):
        for name in POSITIONS:
            if type(value := getattr(section, name, None)) is int and value > 0:
                return value - padding
    return None


class Model:
    """A network whose weights are on disk: with or without a head, or an encoder with a decoder.

    Attributes:
        folder: The folder of the original model.
        config: The transformers config.
        network: The whole network on the meta device.
        reader: Reader of the original tensors.
        stored: Few-bit format of the original weights: "fp8"; "" if they are ordinary floats.
        dtype: Dtype of most original weights.
        positions: Largest number of positions, or None.
        trust_remote_code: Whether code that comes with the model may run.
        stacks: Names of the lists of blocks: one, or those of an encoder and of a decoder.
        blocks: All blocks in the order they run.
        embeddings, head: Blocks of one layer each if these are quantized, else None.
        tied: Whether embeddings and head are one matrix, which is then `embeddings`.
        unbuilt: {stored name of a part that transformers does not build: number of its matrices}.
        skipped: (name, reason) of matrices in blocks that are not supported, and of parts that are unbuilt or lie
            outside the blocks.
        ignored: Names of matrices that `ignore` leaves out.
        tuned: {parameter name: tensor} of parameters in blocks that replace the original's in the quantized network.
        folds: Channel scales with which the network is read, see `fold`.
    """

    def __init__(
        self,
        folder: Path,
        network: PreTrainedModel,
        reader: TensorReader,
        *,
        ignore: Sequence[str] = (),
        ends: tuple[bool, bool] = (False, False),
        trust_remote_code: bool = False,
    ) -> None:
        """Find blocks and layers.

        Args:
            folder, network, reader, trust_remote_code: See the attributes.
            ignore: Patterns of layers that stay unquantized.
            ends: Whether input embeddings and whether the head are quantized as well.
        """
        self.folder, self.network, self.reader, self.config = folder, network, reader, network.config
        self._plain, self.folds = reader, tuple[Fold, ...]()
        self.dtype, self.positions = _dtype(reader), positions_of(network.config, network)
        self.trust_remote_code = trust_remote_code
        self.stored = reader.method if isinstance(reader, WidenedReader) else ""
        stacks = find_stacks(network)
        self.stacks = tuple(name for name, _ in stacks)
        self.weights = Weights(network, reader)
        for name, parameter in network.named_parameters():
            stored = self.weights.source_name(name) if self.weights.stored_alone(name) else None
            if stored is not None and (shape := reader.shape(stored)) != tuple(parameter.shape):
                raise ModelError(
                    f"{folder}: {stored} has shape {shape}, but config.json describes {tuple(parameter.shape)}. These files do "
                    f"not belong together. Fetch the folder again."
                )
        self.blocks: list[Block] = []
        skipped: list[tuple[str, str]] = []
        self.tuned: dict[str, torch.Tensor] = {}
        for name, module in ((f"{stack}.{i}", block) for stack, blocks in stacks for i, block in enumerate(blocks)):
            layers, unhandled = find_layers(module, name, ignore, partial(stacked_names, self.weights))
            self.blocks.append(Block(self, name, module, layers))
            skipped += unhandled
        first, last, unhandled = find_ends(network, ignore, embeddings=ends[0], head=ends[1])
        self.embeddings, self.head = (
            None if layer is None else Block(self, layer.name, layer.module, [layer]) for layer in (first, last)
        )
        outputs = network.get_output_embeddings()
        self.tied = outputs is not None and outputs.weight is network.get_input_embeddings().weight
        skipped += unhandled
        matrices = sorted(name for name in self.weights.unused if len(reader.shape(name)) >= 2)
        self.unbuilt = unbuilt_parts(matrices, {*reader.names()} - {*self.weights.unused})
        self.ignored = [layer for layer, reason in skipped if reason == IGNORED_REASON]
        self.skipped = [entry for entry in skipped if entry[1] != IGNORED_REASON]
        self.skipped += kept_parts(self.unbuilt, network, self.stacks)

    @property
    def layers(self) -> list[Layer]:
        """All matrices to be quantized, in the order they run, on the meta device."""
        parts = (self.embeddings, *self.blocks, self.head)
        return [layer for part in parts if part is not None for layer in part.layers]

    @property
    def block_layers(self) -> list[Layer]:
        """The matrices in blocks."""
        return [layer for block in self.blocks for layer in block.layers]

    @property
    def end_layers(self) -> list[Layer]:
        """The matrices outside the blocks: embeddings and head, if they are quantized."""
        return [layer for part in (self.embeddings, self.head) if part is not None for layer in part.layers]

    @property
    def layers_by_block(self) -> list[int]:
        """Number of quantized matrices by block; embeddings count in the first and the head in the last."""
        counts = [len(block.layers) for block in self.blocks]
        counts[0] += self.embeddings is not None
        counts[-1] += self.head is not None
        return counts

    def fold(self, folds: Sequence[Fold]) -> None:
        """Read the network from now on with these channel scales, instead of others; see `models/folded.py`.

        Raises:
            ModelError: The network has not these parameters.
        """
        self.reader = self.weights.reader = self._plain
        scales = stored_scales(self.network, self.weights, folds, self.quantized_names)
        if scales:
            self.reader = self.weights.reader = FoldedReader(self._plain, scales)
        self.folds = tuple(folds)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            ModelError: The folder holds no usable tokenizer.
        """
        return tokenizer_of(self.folder, trust_remote_code=self.trust_remote_code)

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The names of the files that the class of the tokenizer reads, see `vocabulary_of`."""
        return vocabulary_of(self.folder)

    @cached_property
    def quantized_names(self) -> frozenset[str]:
        """The stored names of the weights of all quantized layers, including copies."""
        return frozenset(name for layer in self.layers for name in layer.copies(self.weights))

    def unquantized(self, block: int | None = None) -> tuple[str, ...]:
        """Return the stored names of the unquantized tensors of a block; None: of those that belong to no block."""
        names = self.rest() if block is None else self.block_names(block)
        return tuple(name for name in names if name not in self.quantized_names)

    def block_names(self, index: int) -> list[str]:
        """Return the stored names of all tensors of a block."""
        return self.weights.names_below(f"{self.blocks[index].name}.")

    def rest(self) -> list[str]:
        """Return the stored names of all tensors outside the blocks: embeddings, norm, head, unused tensors."""
        in_blocks = {name for index in range(len(self.blocks)) for name in self.block_names(index)}
        return [name for name in self.reader.names() if name not in in_blocks]

    def in_turn(self, blocks: Sequence[Block], device: torch.device) -> Iterator[Block]:
        """Yield blocks; unless they run on the CPU, a thread reads them from disk, one ahead.

        The host then holds up to two blocks in pinned memory, from which a GPU copies while the CPU goes on. On the CPU
        nothing is read ahead: two blocks would be in memory.
        """
        if device.type == "cpu":
            yield from blocks
            return
        with ThreadPoolExecutor(1, "read-ahead") as thread:
            try:
                for number, block in enumerate(blocks):
                    for each in blocks[number : number + 2]:
                        each.coming = each.coming or thread.submit(each.read)
                    yield block
            finally:
                for block in blocks:
                    block.coming = None  # of a loop that was left

    def configs(self) -> list[Any]:
        """Return the config and the configs nested in it, which copies of the network and of blocks share."""
        return [self.config, *(value for value in vars(self.config).values() if isinstance(value, PreTrainedConfig))]

    @property
    def reached_experts(self) -> int | None:
        """Number of experts of a block that a token reaches; None where no config says it."""
        counts = [getattr(config, "num_experts_per_tok", None) for config in self.configs()]
        return min((count for count in counts if count), default=None)

    def matrices(self) -> set[str]:
        """Return the names of all modules that are or inherit from Linear, Conv1D or Conv2d, in blocks or not."""
        return {name for name, module in self.network.named_modules() if isinstance(module, MATRICES)}

    def stacked(self) -> set[str]:
        """Return the names of all modules with several matrices in one parameter, such as the experts of a block."""
        return {
            name
            for name, module in self.network.named_modules()
            if not isinstance(module, _ConvNd) and any(p.dim() >= 3 for p in module.parameters(recurse=False))
        }

    @contextmanager
    def around(
        self, stand_ins: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, *, head: bool = False
    ) -> Iterator[PreTrainedModel]:
        """Load a copy of the network with other modules in place of its blocks, and without the head unless `head`.

        Towers of a language model for images or sound do not run on text and are not loaded.
        """
        shared: dict[int, Any] = {id(config): config for config in self.configs()}
        remaining = list(stand_ins)
        for stack in self.stacks:
            blocks: Any = self.network.get_submodule(stack)  # a ModuleList
            shared[id(blocks)] = nn.ModuleList([remaining.pop(0) for _ in blocks])
        network = deepcopy(self.network, shared)
        last, not_run = network.get_output_embeddings(), towers(network)
        without_head = [path for path, module in network.named_modules() if module is last and not head]
        try:
            self.weights.fill(
                network, "", device, dtype, without=tuple(f"{path}." for path in (*without_head, *not_run))
            )
            for path in not_run:
                self.weights.leave_out(network.get_submodule(path), device, dtype)
            yield network
        finally:
            network.to("meta")


class Block:
    """One block of a model, with weights in memory only within `on`.

    Attributes:
        name: Name of the block, "model.layers.0".
        layers: Layers of the block on the meta device, with name, kind and shape.
        original: The module with the original weights; None except within `on(original=True)`.
        quantized: The module whose weights are replaced by quantized ones; None except within `on`.
        coming: The weights that a thread reads for the next `on`; None if that reads them itself. See `Model.in_turn`.
    """

    def __init__(self, model: Model, name: str, empty: nn.Module, layers: list[Layer]) -> None:
        self.name, self.empty, self.layers = name, empty, layers
        self.original: nn.Module | None = None
        self.quantized: nn.Module | None = None
        self.coming: Future[list[tuple[Load, dict[str, torch.Tensor]]]] | None = None
        self._model = model

    def read(self) -> list[tuple[Load, dict[str, torch.Tensor]]]:
        """Read the block's weights from disk into pinned memory; see `Weights.read`."""
        return list(self._model.weights.read(self.empty, f"{self.name}.", pinned=True))

    @contextmanager
    def on(self, device: torch.device | str, dtype: torch.dtype, *, original: bool = True) -> Iterator[Block]:
        """Load the block's weights as `quantized`, and a second copy as `original` if requested."""
        shared = {id(config): config for config in self._model.configs()}
        with working_on(self.name), ExitStack() as ends:
            ends.callback(self._free)
            self.quantized = deepcopy(self.empty, dict(shared)).eval().requires_grad_(False)
            coming, self.coming = self.coming, None
            loaded = None if coming is None else coming.result()
            self._model.weights.fill(self.quantized, f"{self.name}.", torch.device(device), dtype, loaded=loaded)
            del coming, loaded  # the host's copy
            if any(map(is_stack, self.quantized.modules())):
                make_observable(self.quantized)
            self.original = deepcopy(self.quantized, dict(shared)) if original else None
            for name, values in self._model.tuned.items():
                if name.startswith(f"{self.name}."):
                    self.quantized.get_parameter(name[len(self.name) + 1 :]).copy_(values)
            yield self

    def _free(self) -> None:
        """Free the weights of both modules."""
        self.free_original()
        if self.quantized is not None:
            self.quantized.to("meta")  # frees memory even if a layer of the block is still referenced
        self.quantized = None

    def free_original(self) -> None:
        """Free the weights of `original`, which may be done once its stream has passed the block."""
        if self.original is not None:
            self.original.to("meta")
        self.original = None

    def layers_of(self, module: nn.Module | None) -> list[Layer]:
        """Return the layers of a copy of the block."""
        assert module is not None, NOT_IN_MEMORY
        return [layer.under(module, f"{self.name}.") for layer in self.layers]

    def quantized_layers(self) -> list[Layer]:
        """Return the layers of `quantized`."""
        return self.layers_of(self.quantized)


def _dtype(reader: TensorReader) -> torch.dtype:
    """Return the dtype of most weights in the files."""
    sizes: Counter[str] = Counter()
    for name in reader.names():
        sizes[reader.dtype(name)] += math.prod(reader.shape(name))
    if not sizes:
        raise ModelError(f"{reader.folder}: the weight files hold no tensors. Fetch the folder again.")
    most = sizes.most_common(1)[0][0]
    if most not in DTYPES:
        raise ModelError(f"{reader.folder}: weights are stored as {most}; nearplane reads {', '.join(DTYPES)}.")
    return DTYPES[most]
