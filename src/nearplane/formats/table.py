"""What quantized checkpoints look like on disk: each format in one file, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nearplane.errors import FormatError
from nearplane.formats import compressed_tensors, gptq, mxfp4_packed, native
from nearplane.formats.config_file import ConfigFile
from nearplane.formats.container import Container, Place
from nearplane.formats.folder import Folder
from nearplane.formats.gguf import gguf_layers
from nearplane.formats.gguf.gguf_container import GGUFFile
from nearplane.formats.gguf.gguf_reader import GGUFReader
from nearplane.formats.layer_format import LayerFormat
from nearplane.system.safetensors_files import ShardReader, TensorReader

COMPRESSED = compressed_tensors.CompressedTensors((compressed_tensors.PackQuantized(), mxfp4_packed.MXFP4Packed()))


class Format(NamedTuple):
    """A format: how a layer's tensors look, what the config says of them, which files there are, and what reads their tensors."""

    layers: LayerFormat
    config: ConfigFile
    container: type[Container] = Folder
    reader: Callable[..., TensorReader] = ShardReader


FORMATS: dict[str, Format] = {
    "compressed-tensors": Format(COMPRESSED, compressed_tensors.Config(COMPRESSED)),
    "gptq": Format(gptq.V1, gptq.Config("gptq")),
    "gptq_v2": Format(gptq.V2, gptq.Config("gptq_v2")),
    native.METHOD: Format(native.DEFAULT, native.Config()),
    gguf_layers.METHOD: Format(gguf_layers.LAYERS, gguf_layers.Config(), GGUFFile, GGUFReader),
}


def format_of(config: Mapping[str, Any]) -> Format:
    """Return the format of a quantization_config, as that sets it.

    Raises:
        FormatError: it is none of `FORMATS`, or a version that is not understood.
    """
    method = config.get("quant_method")
    name = config.get("checkpoint_format") or config.get("format") or "gptq" if method == "gptq" else method
    if not isinstance(name, str) or name not in FORMATS:
        raise FormatError(f"Weights quantized as {method} ({name}) are not understood, only {', '.join(FORMATS)}.")
    found = FORMATS[name]
    return found._replace(layers=found.layers.configured(config))


def open_container(place: Place, config: Mapping[str, Any], *, dtype: torch.dtype, shards: int) -> Container:
    """Return a checkpoint to be written; see `Container`, also for the errors."""
    format = format_of(config)
    return format.container(place, format.layers, format.config, config, dtype=dtype, shards=shards)
