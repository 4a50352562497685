"""What quantized checkpoints look like on disk: each format in one file, and the table of them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from nearplane.errors import FormatError
from nearplane.formats.container import Container, Format, Place


class Formats(UserDict[str, Any]):
    """Formats by name: a module of this folder and what it calls the format; the module is imported on first use."""

    def __getitem__(self, name: str) -> Format:
        """Return a format."""
        module, _, called = self.data[name].partition(":")
        found: Format = getattr(import_module(module, __package__), called)
        return found


FORMATS = Formats(
    {
        "compressed-tensors": ".compressed_tensors:FORMAT",
        "gptq": ".gptq:FORMAT",
        "gptq_v2": ".gptq:FORMAT_V2",
        "nearplane": ".native:FORMAT",
        "gguf": ".gguf.gguf_container:FORMAT",
    }
)


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
    return format.container(place, format, config, dtype=dtype, shards=shards)
