"""config.json: what it says of quantized layers is one `quantization_config` for each program that reads them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearplane.formats.beside import CONFIG
from nearplane.lattice.number_formats import NumberFormat
from nearplane.recipe.scheme import Scheme
from nearplane.system.json_file import read_object

METHOD = "nearplane"  # quant_method of our own format
WEIGHTS = "transformers_weights"  # a field of config.json: the name of the file that transformers reads
READ_WITH = (
    "no such file, as these weights are coded by nearplane. Load them with nearplane.load(FOLDER), or call "
    "nearplane.register() before from_pretrained"
)  # stands there in our own format: transformers ends its error with it, before it reads anything
EXPERTS_WITH = (
    "no such file, as experts in GPTQ are modules of their own, which transformers does not make of them. Load them with "
    "GPTQModel.load(FOLDER)"
)  # and where a GPTQ has experts, which transformers would fill with random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What there is to say of a network whose layers are quantized.

    Args:
        scheme: of all layers, but for `grids`.
        quantized: names of all quantized modules.
        ignore: names of *all* modules left alone that are Linear or a subclass of it, in blocks or not ("lm_head"), and patterns
            "re:..." of parts.
        grids: the number format of every layer by name, where they are not the same for all.
        experts: names of modules left alone that transformers puts together from one tensor an expert.
        routed: names of quantized layers that are experts in one parameter with others, which no reader has as modules.
        layers: the number format of every quantized layer, by its name in the checkpoint.
        embeddings: type of embeddings and head in a GGUF; None: as they are.
        pre: name of the pre-tokenizer in a GGUF; None: as the tokenizer's structure tells.
        version: of nearplane.
    """

    scheme: Scheme
    quantized: Sequence[str]
    ignore: Sequence[str] = ()
    grids: Mapping[str, NumberFormat] = field(default_factory=dict)
    experts: Sequence[str] = ()
    routed: Collection[str] = ()
    layers: Mapping[str, NumberFormat] = field(default_factory=dict)
    embeddings: str | None = None
    pre: str | None = None
    version: str


class ConfigFile(ABC):
    """Writes and reads a `quantization_config`."""

    @abstractmethod
    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return the `quantization_config` of a network."""

    @abstractmethod
    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return what a config says of a layer's number format.

        Raises:
            FormatError: nothing, or something that is not understood.
        """

    def files(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return further files that say the same, by name."""
        return {}


def json_text(data: Mapping[str, Any]) -> str:
    """Return a JSON file as it is written."""
    return json.dumps(data, indent=2) + "\n"


def config_text(source: Path, config: Mapping[str, Any]) -> str:
    """Return the config.json of a folder with a quantization_config.

    Of what transformers cannot read it also says, where transformers looks for the name of a file, how it is read.
    """
    kept = {name: value for name, value in read_config(source).items() if name != WEIGHTS}
    if config.get("quant_method") == METHOD:
        kept[WEIGHTS] = READ_WITH
    elif config.get("meta", {}).get("experts"):
        kept[WEIGHTS] = EXPERTS_WITH
    return json_text(kept | {"quantization_config": dict(config)})


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        FormatError: there is none, or it is no JSON object.
    """
    return read_object(folder / CONFIG, expected="A model's folder has one that save_pretrained or quantize wrote")
