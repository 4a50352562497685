"""Checks that a config.json fits the weight files, before a network is built that takes minutes or all memory.

A damaged config can describe ten million blocks by one number. Counts are checked before transformers reads it, the
work of building the empty network is limited, and the sizes of this network are compared with the tensors on disk. Of
weights that config.json ties and the files hold apart, or the reverse, the tensors decide, as when transformers loads them.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from nearplane.errors import ModelError
from nearplane.models.conversion import renamed
from nearplane.system.paths import TIED
from nearplane.system.patterns import fault_of
from nearplane.system.safetensors_files import TensorReader

COUNT = re.compile(r"^(num|n|number)_\w+|layers?$|blocks?$|experts$|heads?$|depths?$|labels$|groups$")
# sizes may be large: no loop runs over them
SIZES = re.compile(r"positions|embd|embed|ctx|inner|hidden_size|intermediate|vocab|tokens")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of the number of experts in a block
USED_EXPERTS = "num_experts_per_tok"
PATTERNS = ("re:", "+:", "-:")  # prefixes of texts that are regular expressions
MAX_COUNT = 100_000  # largest number of layers, heads, labels and the like
# calls of torch while a network is built: minimum, and per tensor of the weight files; a block needs about 25
CALLS = (50_000, 200)
SPARE_WEIGHTS = 1 << 20  # weights that a network may have in addition to the stored ones
# names of the packed tensors, one per quantized matrix
PACKED_NAMES = re.compile(r"\.(weight_packed|qweight|weight_coded|weight_q\d_[01k])$")
FLOATS = ("F", "BF")  # beginnings of the dtypes that weights of a network have
CODES = {"I32": 16, "U32": 16, "U8": 64}  # most codes per element of a packed tensor; other dtypes hold weights
UNLIKE = "These files do not belong together. Fetch the folder again."
BUFFERS = 1 << 28  # most elements of tables and masks, which are not stored
logger = logging.getLogger(__name__)


def check_config(folder: Path, config: Mapping[str, Any], reader: TensorReader | None) -> None:
    """Refuse a config.json with impossible numbers of layers, heads, labels or experts, or invalid regular expressions.

    Args:
        folder: Folder of config.json.
        config: Its contents.
        reader: Reader of the weight files; None if only config.json is looked at.

    Raises:
        ModelError: A number is too large, a token has more experts than there are, or a pattern in quantization_config is
            not a regular expression.
    """
    tensors = 0 if reader is None else len(reader.names())
    max_count = max(MAX_COUNT, tensors)
    for name, value in _numbers(config):
        last = name.rpartition(".")[2]
        if COUNT.search(last) and not SIZES.search(last) and not -max_count <= value <= max_count:
            shown = f"{value:,}" if abs(value) < 10**30 else f"a number of {int(math.log10(abs(value))) + 1} digits"
            limit = f"at most {MAX_COUNT:,} are expected. Fetch config.json again."
            if reader is not None:
                limit = f"the weight files have {tensors} tensors. {UNLIKE}"
            raise ModelError(f"{folder}/config.json: {name} is {shown}, but {limit}")
    for part in (config, config.get("text_config")):
        numbers = dict(_numbers(part)) if isinstance(part, Mapping) else {}
        experts = max((numbers[name] for name in EXPERTS if name in numbers), default=0)
        if experts > 1 and numbers.get(USED_EXPERTS, 0) > experts:
            raise ModelError(
                f"{folder}/config.json: {USED_EXPERTS} is {numbers[USED_EXPERTS]:,}, but there are {experts} experts. "
                f"Fetch config.json again."
            )
    for text in _texts(config.get("quantization_config")):
        if text.startswith(PATTERNS) and (fault := fault_of(text[3 if text.startswith("re:") else 2 :])) is not None:
            raise ModelError(f"{folder}/config.json: {text[:60]!r} {fault}. Fetch config.json again.")


def _texts(config: Any) -> Iterator[str]:
    """Yield every text, including keys."""
    if isinstance(config, str):
        yield config
    for part in config.items() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ():
        yield from _texts(part)


def _numbers(config: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield (dotted name, value) of every integer."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(config, list):
        for value in config:
            yield from _numbers(value, name)
    elif isinstance(config, int):
        yield name, config


class BuildBudget(TorchFunctionMode):
    """Torch function mode that stops the building of a network after far more calls than its weight files have tensors.

    Args:
        folder: Folder of config.json.
        reader: Reader of the weight files; None if only config.json is looked at, which then gets the minimum of calls.

    Raises:
        ModelError: The limit is reached within the `with` block, after a few seconds.
    """

    def __init__(self, folder: Path, reader: TensorReader | None) -> None:
        super().__init__()
        self._path, self._tensors = folder / "config.json", None if reader is None else len(reader.names())
        self._left = max(CALLS[0], CALLS[1] * (self._tensors or 0))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            if self._tensors is None:
                raise ModelError(f"{self._path} describes too many layers. Fetch config.json again.")
            raise ModelError(
                f"{self._path} describes many more layers than the {self._tensors} tensors of the weight files can fill. {UNLIKE}"
            )
        return func(*args, **(kwargs or {}))


def check_sizes(network: nn.Module, reader: TensorReader, *, plain: bool) -> None:
    """Refuse an empty network whose parameters differ in size or kind from the tensors of their names, or are far too many.

    Of tensors that transformers converts (fused experts) only the total is compared; quantized layers are not.

    Args:
        network: The network on the meta device.
        reader: Reader of the weight files; their names may lack the prefix of the base model.
        plain: Whether the files hold no quantized weights, which may be stored as integers.

    Raises:
        ModelError: A size differs, or integers are stored; the message names a tensor.
    """
    base = f"{getattr(network, 'base_model_prefix', '')}."
    stored = {spelling: name for name in reader.names() for spelling in (f"{base}{name}", name)}
    owners = {spelling.rpartition(".")[0] for spelling in stored}
    matched, unknown, first_unknown = set(), 0, ""
    for name, parameter in network.named_parameters():
        if name in stored:
            matched.add(stored[name])
            if not plain and reader.dtype(stored[name]) == "U32":  # packed under the name of the weight, as in MLX
                continue
            shape = reader.shape(stored[name])
            if math.prod(shape) not in (0, parameter.numel()):  # transformers compares the order of dimensions
                raise ModelError(
                    f"{reader.folder}: {stored[name]} is {shape}, but config.json describes {tuple(parameter.shape)}. "
                    f"These files do not belong together. Fetch the folder again."
                )
            dtype = reader.dtype(stored[name])
            if plain and parameter.is_floating_point() and not dtype.startswith(FLOATS):
                raise ModelError(
                    f"{reader.folder}: {stored[name]} is stored as {dtype}, but weights are floating-point numbers. Save it in "
                    f"the dtype of the other weights, or fetch the folder again."
                )
        elif name.rpartition(".")[0] not in owners:
            unknown, first_unknown = unknown + parameter.numel(), first_unknown or name
    quantized = sum(bool(PACKED_NAMES.search(name)) for name in reader.names())
    shapes = [parameter.shape for parameter in network.parameters() if parameter.dim() >= 2]
    capacity = sum(1 if len(shape) == 2 else 2 * shape[0] for shape in shapes)  # a slice of experts may be two matrices
    if quantized > capacity:
        raise ModelError(
            f"{reader.folder}: the weight files have {quantized} quantized matrices, but the network of config.json has "
            f"{capacity}. These files do not belong together. Fetch the folder again."
        )
    unmatched = (name for name in reader.names() if name not in matched)
    max_unknown = SPARE_WEIGHTS + sum(
        math.prod(reader.shape(name)) * CODES.get(reader.dtype(name), 1) for name in unmatched
    )
    if unknown > max_unknown:
        raise ModelError(
            f"{reader.folder}: config.json describes {unknown:,} weights that are not in the weight files, first "
            f"{first_unknown}. These files do not belong together. Fetch the folder again."
        )
    if (tables := sum(buffer.numel() for buffer in network.buffers())) > BUFFERS + max_unknown:
        raise ModelError(
            f"{reader.folder}: config.json describes tables of {tables:,} numbers in addition to the weights. Fetch config.json "
            f"again, or correct the number of positions and the sizes of heads."
        )


def believe_tensors(network: PreTrainedModel, reader: TensorReader) -> None:
    """Give tied weights with different values in the files a parameter each, and say so in the network's config.

    Args:
        network: The empty network as config.json describes it; changed in place.
        reader: Reader of the weight files.

    Raises:
        ModelError: The head is not tied, and not in the files.
    """
    stored = {new: name for name, new in renamed(network, reader.names()).items()}  # by name in the network
    for target, source in [*network.all_tied_weights_keys.items()]:
        one, other = stored.get(target), stored.get(source)
        if one is None or other is None or reader.same(one, other):
            continue
        path, _, name = target.rpartition(".")
        setattr(network.get_submodule(path), name, nn.Parameter(torch.empty_like(network.get_parameter(source))))
        del network.all_tied_weights_keys[target]
        logger.warning(
            f"{reader.folder}: config.json ties {target} to {source}, but the files hold other values for each. The files are "
            f"believed, as by transformers."
        )
        if not network.all_tied_weights_keys:  # else encoder and decoder share other weights by this field
            for config in _configs(network):
                setattr(config, TIED, False)
    _check_head(network, reader, stored)


def _configs(network: PreTrainedModel) -> Iterator[Any]:
    """Yield the config of a network, and of its language model if that has its own."""
    config: Any = network.config
    yield from (each for each in (config, getattr(config, "text_config", None)) if getattr(each, TIED, False))


def _check_head(network: PreTrainedModel, reader: TensorReader, stored: dict[str, str]) -> None:
    """Refuse a head that is neither tied nor in the files."""
    head = network.get_output_embeddings()
    path = next((name for name, module in network.named_modules() if module is head), None)
    if not path or not isinstance(weight := getattr(head, "weight", None), nn.Parameter):
        return
    tied = f"{path}.weight" in network.all_tied_weights_keys or weight is network.get_input_embeddings().weight
    if not tied and not any(name.startswith(f"{path}.") for name in stored):
        raise ModelError(
            f"{reader.folder}: the files lack {path}.weight, and {TIED} of config.json is false: transformers would predict with "
            f"random numbers. If embeddings and head are one matrix, set it to true; else fetch the folder again."
        )
