"""Table of the container formats; each format has its own file in this folder."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from nearplane.errors import FormatError
from nearplane.formats.container import Container, Format, Place


class Formats(UserDict[str, Any]):
    """Formats by name, given as "MODULE:NAME"; a module is imported when its format is first used."""

    def __getitem__(self, name: str) -> Format:
        """Return a format, importing its module."""
        module, _, attribute = self.data[name].partition(":")
        format: Format = getattr(import_module(module, __package__), attribute)
        return format


FORMATS = Formats(
    {
        "compressed-tensors": ".compressed_tensors.compressed_tensors_format:FORMAT",
        "gptq": ".gptq:FORMAT",
        "gptq_v2": ".gptq:FORMAT_V2",
        "awq": ".awq:FORMAT",
        "mlx": ".mlx:FORMAT",
        "nearplane": ".native:FORMAT",
        "gguf": ".gguf.gguf_format:FORMAT",
    }
)


def format_of(config: Mapping[str, Any]) -> Format:
    """Return the format of a quantization_config, with the options of the config.

    Raises:
        FormatError: The format is not in `FORMATS`, or nearplane does not read its version.
    """
    method = config.get("quant_method")
    name = config.get("checkpoint_format") or config.get("format") or "gptq" if method == "gptq" else method
    if not isinstance(name, str) or name not in FORMATS:
        raise FormatError(f"The weights are quantized as {method} ({name}); nearplane reads {', '.join(FORMATS)}.")
    format = FORMATS[name]
    return format._replace(layers=format.layers.configured(config))


def open_container(place: Place, config: Mapping[str, Any], *, dtype: torch.dtype, shards: int) -> Container:
    """Return the writer of a checkpoint; see `Container` for arguments and errors."""
    format = format_of(config)
    return format.container(place, format, config, dtype=dtype, shards=shards)
