"""Models whose weights stay on disk: one block at a time is materialised, and freed again.

The network is built on the meta device; transformers' own key conversion says which tensors of the checkpoint make up which
parameter. Knows files and modules; not what is computed with them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.initialization import guard_torch_init_functions

from nearplane.errors import ModelError, NumericalError
from nearplane.models.layers import IGNORED, Layer, find_blocks, find_layers
from nearplane.shards import ShardReader

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_model(source: str, *, trust_remote_code: bool = False, ignore: Sequence[str] = ()) -> Model:
    """Open a causal language model for quantization; no weight is read yet.

    Args:
        source: a folder of safetensors and config.json, or a hub id.
        trust_remote_code: run model code that comes with the checkpoint.
        ignore: regular expressions of layers to leave alone, see `find_layers`.

    Raises:
        ModelError: the model is not there, is quantized already, or cannot be taken apart.
    """
    folder = find_folder(source, trust_remote_code=trust_remote_code)
    try:
        plain = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no readable config.json ({error}). Pass a folder that save_pretrained wrote.") from error
    if (quantized := plain.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "an unnamed method")
        raise ModelError(f"{source} is already quantized with {method}; start from the original.")
    reader = ShardReader(folder)
    code = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **code)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, dtype=_dtype(reader), **code).eval()
    except (ValueError, KeyError, ImportError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{source}: transformers builds no causal language model from its config.json ({reason}).") from error
    return Model(folder, network, reader, ignore=ignore, trust_remote_code=trust_remote_code)


def find_folder(source: str, *, trust_remote_code: bool = False) -> Path:
    """Return the local folder of a model, fetching it from the hub if `source` is an id.

    Raises:
        ModelError: one sentence: no such folder, no such model, or no connection.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file; pass the folder of the model.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise ModelError(f"The folder {source} does not exist (and it is no hub id, which reads owner/name).")
    try:
        return Path(snapshot_download(source, allow_patterns=[*FILES, *(["*.py"] if trust_remote_code else [])]))
    except GatedRepoError as error:
        raise ModelError(f"{source} is gated: accept its terms on the hub and log in with `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{source} is neither a folder here nor a model on the hub that you may read.") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{source} is no folder here, and the hub could not be reached to fetch it; pass a local folder or check the connection."
        ) from error


def positions_of(config: Any) -> int | None:
    """Return how many positions a model was built for; None if its config sets no limit."""
    for place in (config, getattr(config, "text_config", None)):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
            if isinstance(value := getattr(place, name, None), int) and value > 0:
                return value
    return None


@dataclass(frozen=True, slots=True)
class Load:
    """How parameters come out of the checkpoint: from one tensor as it is, or from several through a conversion."""

    targets: list[str]
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name in the checkpoint, pattern that matched)
    converter: WeightConverter | None = None


class Model:
    """A causal language model whose weights are on disk.

    Attributes:
        folder: that holds it.
        config: of transformers.
        network: the whole model on the meta device.
        reader: of the checkpoint's tensors.
        dtype: of the weights in the checkpoint.
        positions: that it was built for, or None.
        blocks: in the order they run.
        skipped: (name, reason) of matrices in the blocks that no one asked to leave out and that are not handled.
        ignored: names of matrices that `ignore` leaves out.
    """

    def __init__(
        self, folder: Path, network: PreTrainedModel, reader: ShardReader, *, ignore: Sequence[str], trust_remote_code: bool
    ) -> None:
        self.folder, self.network, self.reader, self.config = folder, network, reader, network.config
        self.dtype, self.positions = _dtype(reader), positions_of(network.config)
        self._trust_remote_code = trust_remote_code
        self.stack, blocks = find_blocks(network)
        self._aliases = _aliases(network)
        self._loads, self._unused = _plan(network, reader)
        self._require({name for name, _ in network.named_parameters(remove_duplicate=False)})
        self.blocks: list[Block] = []
        self.skipped: list[tuple[str, str]] = []
        self.ignored: list[str] = []
        for index, module in enumerate(blocks):
            name = f"{self.stack}.{index}"
            layers, left = find_layers(module, name, ignore)
            self.blocks.append(Block(self, name, module, layers))
            self.skipped += [(layer, reason) for layer, reason in left if reason != IGNORED]
            self.ignored += [layer for layer, reason in left if reason == IGNORED]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            ModelError: the folder holds none.
        """
        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self._trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"{self.folder} holds no tokenizer that transformers can load ({reason}).") from error

    def source_name(self, parameter: str) -> str:
        """Return the name in the checkpoint of a parameter of the network.

        Raises:
            ModelError: it is not stored as one tensor of its own.
        """
        load = self._load(parameter)
        if load.converter is not None:
            raise ModelError(f"{parameter} is made of {len(load.sources)} tensors of the checkpoint and has no name of its own there.")
        return load.sources[0][0]

    def block_names(self, index: int) -> list[str]:
        """Return the names in the checkpoint of what belongs to a block."""
        return self._names_of(f"{self.blocks[index].name}.")

    def rest(self) -> list[str]:
        """Return the names in the checkpoint of what belongs to no block: embeddings, final norm, head, and what is unused."""
        taken = {name for index in range(len(self.blocks)) for name in self.block_names(index)}
        return [name for name in self.reader.names() if name not in taken]

    def _names_of(self, prefix: str) -> list[str]:
        loads = {id(load): load for load in self._loads.values() if any(t.startswith(prefix) for t in load.targets)}
        unused = [name for name, target in self._unused.items() if target.startswith(prefix)]
        return [name for load in loads.values() for name, _ in load.sources] + unused

    def _load(self, parameter: str) -> Load:
        for name in self._aliases.get(parameter, (parameter,)):
            if name in self._loads:
                return self._loads[name]
        raise ModelError(f"{self.folder}: the checkpoint holds no tensor for {parameter}. Is it complete?")

    def _require(self, parameters: set[str]) -> None:
        missing = sorted(p for p in parameters if not any(name in self._loads for name in self._aliases.get(p, (p,))))
        if missing:
            raise ModelError(
                f"{self.folder}: the checkpoint lacks {len(missing)} of the {len(parameters)} parameters of "
                f"{type(self.network).__name__}, first {missing[0]}. Is it complete?"
            )

    def around(self, stand_ins: Sequence[nn.Module], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Return a copy of the network with other modules in place of its blocks, in memory but for its head."""
        blocks = nn.ModuleList(stand_ins)
        shared = {id(config): config for config in _configs(self.config)}
        network = deepcopy(self.network, {id(self.network.get_submodule(self.stack)): blocks, **shared})
        head = network.get_output_embeddings()
        name = next((path for path, module in network.named_modules() if module is head), "")
        self.materialize(network, "", device, dtype, without=name)
        return network

    def materialize(self, root: nn.Module, prefix: str, device: torch.device, dtype: torch.dtype, *, without: str = "") -> None:
        """Fill a copy of a part of the network with weights from disk and with its computed buffers.

        Args:
            root: a copy of the submodule `prefix` on the meta device; changed in place.
            prefix: its name in the network, "" for all of it.
            device, dtype: of the weights; buffers keep their dtype.
            without: name of a submodule that stays on the meta device.

        Raises:
            ModelError: a tensor is missing, unreadable or of the wrong shape.
            NumericalError: a tensor is not finite; the message names it.
        """
        start = f"{prefix}." if prefix else ""
        parameters = {start + name: p for name, p in root.named_parameters(remove_duplicate=False)}
        buffers = {start + name: b for name, b in root.named_buffers() if start + name in self._loads}
        wanted = parameters | buffers
        if without:
            wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(f"{without}.")}
        done: set[str] = set()
        for name in wanted:
            if name in done:
                continue
            load = self._load(name)
            for target, tensor in self._read(load).items():
                places = [place for place in self._aliases.get(target, (target,)) if place in wanted]
                if not places:
                    continue
                empty = wanted[places[0]]
                if tensor.shape != empty.shape:
                    raise ModelError(f"{target} is {tuple(tensor.shape)} in the checkpoint, the config asks for {tuple(empty.shape)}.")
                if tensor.is_floating_point():
                    tensor = tensor.to(dtype if places[0] in parameters else empty.dtype)
                    if not torch.isfinite(tensor).all():
                        raise NumericalError(f"{load.sources[0][0]} holds NaN or Inf as {tensor.dtype}. Fetch the checkpoint again.")
                _put(root, [place.removeprefix(start) for place in places], tensor.to(device))
                done.update(places)
        self._compute_buffers(root, start, device)

    def _read(self, load: Load) -> dict[str, Tensor]:
        """Read what a load needs and convert it: {parameter: tensor}."""
        tensors = self.reader.read([name for name, _ in load.sources])
        if load.converter is None:
            return {load.targets[0]: tensors[load.sources[0][0]]}
        converter = deepcopy(load.converter)
        for name, pattern in load.sources:
            converter.add_tensor(load.targets[0], name, pattern, lambda tensor=tensors[name]: tensor)
        converted = converter.convert(load.targets[0], model=self.network, config=self.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    @torch.no_grad()
    def _compute_buffers(self, root: nn.Module, start: str, device: torch.device) -> None:
        """Compute the buffers that no checkpoint holds (rotary frequencies, masks) as from_pretrained does."""
        for path, module in root.named_modules():
            empty = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            if not empty:
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor._is_hf_initialized = True  # transformers' initialisation leaves these alone
            for name, buffer in empty.items():
                module._buffers[name] = torch.full_like(buffer, 0, device=device)
            owner = _owner(self.network, start + path)
            with guard_torch_init_functions():
                owner._init_weights(module)


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
        shared = {id(config): config for config in _configs(self._model.config)}
        try:
            self.quantized = deepcopy(self.empty, dict(shared)).eval().requires_grad_(False)
            self._model.materialize(self.quantized, self.name, torch.device(device), dtype)
            self.original = deepcopy(self.quantized, dict(shared)) if original else None
            yield self
        finally:
            for module in (self.original, self.quantized):
                if module is not None:
                    module.to("meta")  # whoever still holds a layer holds no memory
            self.original = self.quantized = None

    def layers_of(self, module: nn.Module) -> list[Layer]:
        """Return the layers, bound to a copy of the block."""
        start = len(self.name) + 1
        return [layer.bound(module.get_submodule(layer.name[start:])) for layer in self.layers]

    def quantized_layers(self) -> list[Layer]:
        """Return the layers, bound to the copy whose weights are being replaced."""
        assert self.quantized is not None, "the block is in memory only within `with block.on(...)`"
        return self.layers_of(self.quantized)


def _dtype(reader: ShardReader) -> torch.dtype:
    """Return the dtype of most weights of a checkpoint."""
    sizes: Counter[str] = Counter()
    for name in reader.names():
        sizes[reader.dtype(name)] += math.prod(reader.shape(name))
    most = sizes.most_common(1)[0][0]
    if most not in DTYPES:
        raise ModelError(f"{reader.folder}: the weights are stored as {most}; nearplane starts from {', '.join(DTYPES)}.")
    return DTYPES[most]


def _aliases(network: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter that has more than one (tied embeddings): {name: names}."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _plan(network: PreTrainedModel, reader: ShardReader) -> tuple[dict[str, Load], dict[str, str]]:
    """Work out which tensors of the checkpoint make which parameters, by transformers' own renaming rules.

    Returns:
        {parameter or buffer: load}, and {name in the checkpoint: name it would have} of tensors that the network has no use for.
    """
    conversions = get_model_conversion_mapping(network)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, base = network.state_dict(), network.base_model_prefix
    loads: dict[str, Load] = {}
    unused: dict[str, str] = {}
    for name in sorted(reader.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, base, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unused[name] = target if target.startswith(f"{base}.") else f"{base}.{target}"
        elif pattern is None:
            loads[target] = Load(targets=[target], sources=[(name, name)])
        else:
            converter = by_pattern[pattern]
            first, *others = converter.target_patterns
            load = loads.setdefault(target, Load(targets=[target], converter=converter))
            load.sources.append((name, pattern))
            for other in others:
                load.targets.append(target.replace(first, other))
                loads[load.targets[-1]] = load
    return loads, unused


def _put(root: nn.Module, names: Sequence[str], tensor: Tensor) -> None:
    """Set one parameter, or buffer, under all its names."""
    shared = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        if last in module._parameters:
            module._parameters[last] = shared
        else:
            module._buffers[last] = tensor


def _owner(network: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost model of transformers that holds a module: it knows how its buffers are computed."""
    owner = network
    for name, module in network.named_modules():
        if isinstance(module, PreTrainedModel) and (path == name or path.startswith(f"{name}.")):
            owner = module
    return owner


def _configs(config: Any) -> list[Any]:
    """Return a config and those nested in it; copies of a block share them."""
    return [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
