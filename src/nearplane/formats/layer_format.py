"""How files hold quantized layers: what a format has to say to be one of `FORMATS`, but for which files there are.

A layer format turns a matrix into tensors and back. A config file is what config.json says of them: one `quantization_config` for
each program that reads them. Which files there are is `Container`'s.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.beside import CONFIG
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.number_formats import NumberFormat
from nearplane.recipe.patterns import compiled, fault_of
from nearplane.recipe.scheme import Scheme
from nearplane.system.files import read_object

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


class LayerFormat(ABC):
    """How files hold one layer.

    Attributes:
        KEY: ending of the name of the tensor that every quantized layer has.
        SUFFIXES: of the names of all its tensors.
        BITS: widths that it holds, narrowest first.
        CHECKSUMS: whether the index of the folder holds a checksum of every tensor.
    """

    KEY: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]
    BITS: ClassVar[tuple[int, ...]] = ()
    CHECKSUMS: ClassVar[bool] = False

    @abstractmethod
    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse a layer that readers of this format cannot load.

        Args:
            name: of the layer.
            shape: (out, in).
            kind: class of the module: "Linear", "Conv1D", ...
            format: that its weights are to have.

        Raises:
            RecipeError: with the way out.
        """

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored steps in a model of this dtype: they are rounded to it before the solve. Most store fp16."""
        return torch.float16

    @abstractmethod
    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by full name; integers are stored as they are.

        Args:
            name: of the layer.
            matrix: on the CPU.
            dtype: of the steps, see `scale_dtype`.

        Raises:
            FormatError: the format cannot hold the matrix exactly.
        """

    @abstractmethod
    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a stored layer without unpacking it.

        Raises:
            FormatError: the tensor that says it is missing.
        """

    @abstractmethod
    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix that `pack` stored.

        Args:
            name: of the layer.
            tensors: at least those of the layer, by full name.
            format: what the config says of it.

        Raises:
            FormatError: a tensor is missing or not what the config says.
        """

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format as a quantization_config sets it, where there is something to set.

        Raises:
            FormatError: it is of a version that is not understood.
        """
        return self

    def stays_packed(self, config: Mapping[str, Any], dtype: torch.dtype | None) -> bool:
        """Return whether transformers keeps layers packed until the network is called.

        Args:
            config: quantization_config of the checkpoint.
            dtype: of the network that is loaded, where that is known; what is decoded to another one does not run in it.
        """
        return False

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the tensors of every quantized layer, by the name of the layer.

        Args:
            names: of all tensors of a checkpoint.
        """
        there = dict.fromkeys(names)
        layers = [name.removesuffix(f".{self.KEY}") for name in there if name.endswith(f".{self.KEY}")]
        return {layer: [part for s in self.SUFFIXES if (part := f"{layer}.{s}") in there] for layer in layers}

    def beside_the_first(self, name: str) -> dict[str, Tensor]:
        """Return what stands beside the first layer of a folder, for programs that do not know the format."""
        return {}


class GridFormat(LayerFormat):
    """A format of grids that transformers reads: the shapes of its tensors follow from shape and number format alone.

    A run loads them without contents before it begins, see `loading/rehearsal.py`; what is no `GridFormat` is not tried.
    """

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer as `pack` makes them, on the meta device; `dtype` is the model's."""


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


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression of a config matches the beginning of a layer's name, as readers take them.

    Raises:
        FormatError: it is none.
    """
    if (fault := fault_of(pattern)) is not None:
        raise FormatError(f"{pattern[:60]!r} in quantization_config {fault}. Fetch config.json again.")
    return compiled(pattern).match(name) is not None
