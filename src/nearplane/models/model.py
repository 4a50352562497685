"""Models whose weights stay on disk: one block at a time is materialised, and freed again.

The network is built on the meta device. Knows files and modules; not what is computed with them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import ModelError
from nearplane.models.conversion import Weights
from nearplane.models.experts import observable
from nearplane.models.kinds import padded_positions, towers
from nearplane.models.layers import Layer
from nearplane.models.pretrained import empty_network, find_folder, has_other_tokenizer, save_tokenizer, tokenizer_of
from nearplane.models.structure import IGNORED, MATRICES, find_ends, find_layers, find_stacks, kept_parts, unbuilt_parts
from nearplane.system.files import read_object
from nearplane.system.fp8_mxfp4 import METHODS, WidenedReader, method_of, source_reader
from nearplane.system.safetensors_files import TensorReader

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
ABSENT = "a block is in memory only within `with block.on(...)`, its original only where asked for"


def open_model(
    source: str,
    *,
    trust_remote_code: bool = False,
    ignore: Sequence[str] = (),
    embeddings: bool = False,
    head: bool = False,
) -> Model:
    """Open a language model or an encoder for quantization; no weight is read yet.

    Args:
        source: a folder of safetensors and config.json, or a hub id.
        trust_remote_code: run model code that comes with the checkpoint.
        ignore: regular expressions of layers to leave alone, see `find_layers`.
        embeddings, head: whether these are to be quantized too, see `find_ends`.

    Raises:
        ModelError: the model is not there, is quantized already, or cannot be taken apart.
    """
    folder = find_folder(source, trust_remote_code=trust_remote_code)
    plain = read_object(folder / "config.json", expected="Pass what save_pretrained wrote", error=ModelError)
    if (quantized := plain.get("quantization_config")) is not None and method_of(plain) is None:
        method = quantized.get("quant_method", "an unnamed method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"{source} is already quantized with {str(method)[:40]}; start from the original. What its makers store in "
            f"{' or '.join(METHODS)} is read."
        )
    reader = source_reader(folder, plain)
    network = empty_network(folder, dtype=_dtype(reader), trust_remote_code=trust_remote_code, reader=reader).eval()
    return Model(folder, network, reader, ignore=ignore, ends=(embeddings, head), trust_remote_code=trust_remote_code)


def positions_of(config: Any, network: nn.Module | None = None) -> int | None:
    """Return how many positions a model was built for, without those that its network has for padding; None: no limit is set."""
    taken = 0 if network is None else padded_positions(network)
    for place in (config, getattr(config, "text_config", None)):
        for name in POSITIONS:
            if type(value := getattr(place, name, None)) is int and value > 0:
                return value - taken
    return None


class Model:
    """A network whose weights are on disk: of text, images or sound, with a head or without, or an encoder with a decoder.

    Attributes:
        folder: that holds it.
        config: of transformers.
        network: the whole model on the meta device.
        reader: of the checkpoint's tensors.
        stored: how its makers store weights, if in few bits: "fp8"; else "".
        dtype: of the weights in the checkpoint.
        positions: that it was built for, or None.
        trust_remote_code: whether code that comes with the checkpoint may run.
        stacks: names of the lists of blocks: one, or those of an encoder and of a decoder.
        blocks: of all of them in the order they run.
        embeddings, head: as blocks of one layer each where they are to be quantized, else None.
        tied: whether they are one matrix, which is then `embeddings`.
        unbuilt: names in the checkpoint of parts that transformers does not build, with the number of their matrices.
        skipped: (name, reason) of matrices in the blocks that no one asked to leave out and that are not handled, and of
            parts that are unbuilt or lie outside the blocks.
        ignored: names of matrices that `ignore` leaves out.
        tuned: tensors by name of the parameter that the quantized network has in place of the original's; of blocks.
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
            folder, network, reader, trust_remote_code: see the attributes.
            ignore: patterns of layers that stay as they are.
            ends: whether input embeddings and head are quantized too.
        """
        self.folder, self.network, self.reader, self.config = folder, network, reader, network.config
        self.dtype, self.positions = _dtype(reader), positions_of(network.config, network)
        self.trust_remote_code = trust_remote_code
        self.stored = reader.method if isinstance(reader, WidenedReader) else ""
        stacks = find_stacks(network)
        self.stacks = tuple(name for name, _ in stacks)
        self.weights = Weights(network, reader)
        self.blocks: list[Block] = []
        apart: list[tuple[str, str]] = []
        self.tuned: dict[str, torch.Tensor] = {}
        for name, module in ((f"{stack}.{i}", block) for stack, blocks in stacks for i, block in enumerate(blocks)):
            layers, left = find_layers(module, name, ignore, self.weights.stacked)
            self.blocks.append(Block(self, name, module, layers))
            apart += left
        first, last, left = find_ends(network, ignore, embeddings=ends[0], head=ends[1])
        self.embeddings, self.head = (
            None if layer is None else Block(self, layer.name, layer.module, [layer]) for layer in (first, last)
        )
        outputs = network.get_output_embeddings()
        self.tied = outputs is not None and outputs.weight is network.get_input_embeddings().weight
        apart += left
        matrices = sorted(name for name in self.weights.unused if len(reader.shape(name)) >= 2)
        self.unbuilt = unbuilt_parts(matrices, {*reader.names()} - {*self.weights.unused})
        self.ignored = [layer for layer, reason in apart if reason == IGNORED]
        self.skipped = [entry for entry in apart if entry[1] != IGNORED]
        self.skipped += kept_parts(self.unbuilt, network, self.stacks)

    @property
    def layers(self) -> list[Layer]:
        """All matrices to be quantized, in the order they run, on the meta device."""
        parts = (self.embeddings, *self.blocks, self.head)
        return [layer for part in parts if part is not None for layer in part.layers]

    @property
    def layers_by_block(self) -> list[int]:
        """How many matrices are quantized with each block, embeddings with the first and the head with the last."""
        counts = [len(block.layers) for block in self.blocks]
        counts[0] += self.embeddings is not None
        counts[-1] += self.head is not None
        return counts

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            ModelError: the folder holds none.
        """
        return tokenizer_of(self.folder, trust_remote_code=self.trust_remote_code)

    def tokenizer_folder(self) -> Path:
        """Return a folder whose tokenizer, if it has one, has a tokenizer.json: `folder`, or one that lasts as long as this object.

        Raises:
            ModelError: a tokenizer in other files cannot be loaded.
        """
        if not has_other_tokenizer(self.folder):
            return self.folder
        place = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
        save_tokenizer(self.folder, place, trust_remote_code=self.trust_remote_code)
        return place

    @cached_property
    def quantized_names(self) -> frozenset[str]:
        """The names in the checkpoint of the weights of all layers to be quantized, with those of their copies."""
        return frozenset(name for layer in self.layers for name in layer.copies(self.weights))

    def unquantized(self, block: int | None = None) -> tuple[str, ...]:
        """Return the names in the checkpoint of what is not quantized of a block; None: of what belongs to none."""
        names = self.rest() if block is None else self.block_names(block)
        return tuple(name for name in names if name not in self.quantized_names)

    def block_names(self, index: int) -> list[str]:
        """Return the names in the checkpoint of what belongs to a block."""
        return self.weights.names_below(f"{self.blocks[index].name}.")

    def rest(self) -> list[str]:
        """Return the names in the checkpoint of what belongs to no block: embeddings, norm, head, what is unused."""
        taken = {name for index in range(len(self.blocks)) for name in self.block_names(index)}
        return [name for name in self.reader.names() if name not in taken]

    def configs(self) -> list[Any]:
        """Return the config and those nested in it; copies of the network, or of a block, share them."""
        return [self.config, *(value for value in vars(self.config).values() if isinstance(value, PreTrainedConfig))]

    def matrices(self) -> set[str]:
        """Return the names of all modules that are a Linear, Conv1D or Conv2d or inherit from one, in blocks or not."""
        return {name for name, module in self.network.named_modules() if isinstance(module, MATRICES)}

    def stacked(self) -> set[str]:
        """Return the names of all modules with several matrices in one parameter: the experts of a block."""
        return {
            name
            for name, module in self.network.named_modules()
            if not isinstance(module, _ConvNd) and any(p.dim() >= 3 for p in module.parameters(recurse=False))
        }

    @contextmanager
    def around(
        self, stand_ins: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, *, head: bool = False
    ) -> Iterator[PreTrainedModel]:
        """Hold a copy of the network with other modules in place of its blocks in memory, its head only if asked for.

        What sees images or hears beside a language model does not run on text, and stays on disk.
        """
        shared: dict[int, Any] = {id(config): config for config in self.configs()}
        left = list(stand_ins)
        for stack in self.stacks:
            blocks: Any = self.network.get_submodule(stack)  # a ModuleList, as it was found
            shared[id(blocks)] = nn.ModuleList([left.pop(0) for _ in blocks])
        network = deepcopy(self.network, shared)
        last, apart = network.get_output_embeddings(), towers(network)
        where = [path for path, module in network.named_modules() if module is last and not head]
        try:
            self.weights.fill(network, "", device, dtype, without=tuple(f"{path}." for path in (*where, *apart)))
            for path in apart:
                self.weights.leave_out(network.get_submodule(path), device, dtype)
            yield network
        finally:
            network.to("meta")


class Block:
    """One block of a model: described always, in memory only within `on`.

    Attributes:
        name: "model.layers.0".
        layers: its matrices, on the meta device: name, kind and shape without reading weights.
        original: the module with the weights of the checkpoint; None unless `on(original=True)`.
        quantized: the module whose weights are being replaced.
    """

    def __init__(self, model: Model, name: str, empty: nn.Module, layers: list[Layer]) -> None:
        self.name, self.empty, self.layers = name, empty, layers
        self.original: nn.Module | None = None
        self.quantized: nn.Module | None = None
        self._model = model

    @contextmanager
    def on(self, device: torch.device | str, dtype: torch.dtype, *, original: bool = True) -> Iterator[Block]:
        """Hold the block's weights in memory: as `quantized`, and as `original` in memory of its own if asked for."""
        shared = {id(config): config for config in self._model.configs()}
        try:
            self.quantized = deepcopy(self.empty, dict(shared)).eval().requires_grad_(False)
            self._model.weights.fill(self.quantized, f"{self.name}.", torch.device(device), dtype)
            observable(self.quantized)
            self.original = deepcopy(self.quantized, dict(shared)) if original else None
            for name, values in self._model.tuned.items():
                if name.startswith(f"{self.name}."):
                    self.quantized.get_parameter(name[len(self.name) + 1 :]).copy_(values)
            yield self
        finally:
            for module in (self.original, self.quantized):
                if module is not None:
                    module.to("meta")  # whoever still holds a layer holds no memory
            self.original = self.quantized = None

    def layers_of(self, module: nn.Module | None) -> list[Layer]:
        """Return the layers, bound to a copy of the block."""
        assert module is not None, ABSENT
        return [layer.within(module, f"{self.name}.") for layer in self.layers]

    def quantized_layers(self) -> list[Layer]:
        """Return the layers, bound to the copy whose weights are being replaced."""
        return self.layers_of(self.quantized)


def _dtype(reader: TensorReader) -> torch.dtype:
    """Return the dtype of most weights of a checkpoint."""
    sizes: Counter[str] = Counter()
    for name in reader.names():
        sizes[reader.dtype(name)] += math.prod(reader.shape(name))
    most = sizes.most_common(1)[0][0]
    if most not in DTYPES:
        raise ModelError(f"{reader.folder}: weights are stored as {most}; nearplane starts from {', '.join(DTYPES)}.")
    return DTYPES[most]
