"""Whether a config.json describes what the weight files hold: known before anything is built that takes minutes or all memory.

A config is text that anybody may have edited: ten million blocks are one number. Counts are checked before transformers reads it,
the work of building the empty network is limited, and the sizes of that network are compared with the tensors on disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from nearplane.errors import ModelError
from nearplane.recipe.patterns import fault_of
from nearplane.system.safetensors_files import TensorReader

COUNT = re.compile(r"^(num|n|number)_\w+|layers?$|blocks?$|experts$|heads?$|depths?$|labels$|groups$")
# may be large: nobody counts to them
SIZES = re.compile(r"positions|embd|embed|ctx|inner|hidden_size|intermediate|vocab|tokens")
PATTERNS = ("re:", "+:", "-:")  # how texts begin that are regular expressions
MOST = 100_000  # of anything that is counted
# of torch while a network is built: at least, and for each tensor of the checkpoint; a block takes about 25
CALLS = (50_000, 200)
SLACK = 1 << 20  # elements that a network may have beside what is stored
# tensors of which every quantized matrix has one
PACKED = re.compile(r"\.(weight_packed|qweight|weight_coded|weight_q\d_[01k])$")
CODES = {"I32": 16, "U8": 64}  # codes that one element of a packed tensor holds at most; other dtypes are weights
BUFFERS = 1 << 28  # elements of tables and masks that no checkpoint holds


def check_config(config: Mapping[str, Any], reader: TensorReader) -> None:
    """Refuse a config.json that counts more layers, heads or labels than there can be.

    Also texts in a quantization_config that are to be regular expressions and are none.

    Raises:
        ModelError: names the entry, or the pattern.
    """
    most = max(MOST, len(reader.names()))
    for name, value in _numbers(config):
        last = name.rpartition(".")[2]
        if COUNT.search(last) and not SIZES.search(last) and not -most <= value <= most:
            found = f"{value:,}" if abs(value) < 10**30 else f"a number of {int(math.log10(abs(value))) + 1} digits"
            raise ModelError(
                f"{reader.folder}/config.json: {name} is {found}; the weight files hold {len(reader.names())} tensors. The two do "
                f"not belong together; fetch the folder again."
            )
    for text in _texts(config.get("quantization_config")):
        if text.startswith(PATTERNS) and (fault := fault_of(text[3 if text.startswith("re:") else 2 :])) is not None:
            raise ModelError(f"{reader.folder}/config.json: {text[:60]!r} {fault}. Fetch it again.")


def _texts(config: Any) -> Iterator[str]:
    """Yield every text, keys too."""
    if isinstance(config, str):
        yield config
    for part in config.items() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ():
        yield from _texts(part)


def _numbers(config: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield (dotted name, value) of every whole number."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(config, list):
        for value in config:
            yield from _numbers(value, name)
    elif isinstance(config, int):
        yield name, config


class Limited(TorchFunctionMode):
    """Stops the building of a network that calls torch far more often than its checkpoint has tensors.

    Raises:
        ModelError: within the `with` block, after a few seconds of building.
    """

    def __init__(self, reader: TensorReader) -> None:
        super().__init__()
        self._reader, self._left = reader, max(CALLS[0], CALLS[1] * len(reader.names()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ModelError(
                f"{self._reader.folder}/config.json describes a network of many more layers than the {len(self._reader.names())} "
                f"tensors of the weight files make up. The two do not belong together; fetch the folder again."
            )
        return func(*args, **(kwargs or {}))


def check_sizes(network: nn.Module, reader: TensorReader) -> None:
    """Refuse an empty network whose parameters are not those of the checkpoint, as far as names tell, or are far too large.

    Args:
        network: on the meta device.
        reader: of the checkpoint; names may lack the prefix of the base model. Where transformers converts tensors (fused
            experts) only their total is compared; quantized layers are compared by whoever decodes them.

    Raises:
        ModelError: names a tensor.
    """
    base = f"{getattr(network, 'base_model_prefix', '')}."
    stored = {spelling: name for name in reader.names() for spelling in (f"{base}{name}", name)}
    owners = {spelling.rpartition(".")[0] for spelling in stored}
    found, unknown, first = set(), 0, ""
    for name, parameter in network.named_parameters():
        if name in stored:
            found.add(stored[name])
            shape = reader.shape(stored[name])
            if math.prod(shape) not in (0, parameter.numel()):  # the order of sizes is transformers' to compare
                raise ModelError(
                    f"{reader.folder}: {stored[name]} is {shape}, config.json asks for {tuple(parameter.shape)}. The two do not "
                    f"belong together; fetch the folder again."
                )
        elif name.rpartition(".")[0] not in owners:
            unknown, first = unknown + parameter.numel(), first or name
    packed = sum(bool(PACKED.search(name)) for name in reader.names())
    shapes = [parameter.shape for parameter in network.parameters() if parameter.dim() >= 2]
    places = sum(1 if len(shape) == 2 else 2 * shape[0] for shape in shapes)  # of fused experts each slice may be two
    if packed > places:
        raise ModelError(
            f"{reader.folder}: the weight files hold {packed} quantized matrices, the network that config.json describes has "
            f"{places}. The two do not belong together; fetch the folder again."
        )
    rest = (name for name in reader.names() if name not in found)
    room = SLACK + sum(math.prod(reader.shape(name)) * CODES.get(reader.dtype(name), 1) for name in rest)
    if unknown > room:
        raise ModelError(
            f"{reader.folder}: config.json describes {unknown:,} weights that the weight files do not hold, first {first}. The two "
            f"do not belong together; fetch the folder again."
        )
    if (tables := sum(buffer.numel() for buffer in network.buffers())) > BUFFERS + room:
        raise ModelError(
            f"{reader.folder}: config.json describes tables of {tables:,} numbers beside the weights. Fetch it again, or correct "
            f"its number of positions and sizes of heads."
        )
