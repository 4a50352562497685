"""Base classes of the formats in `FORMATS`: the tensors of a layer, and the config that describes them.

A layer format turns a matrix into tensors and back, and writes and reads the `quantization_config` of config.json. The
files of a checkpoint are the subject of `Container`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.superblock import on_one_level
from nearplane.number_formats import InputRounding, NumberFormat, integers
from nearplane.recipe.scheme import Scheme
from nearplane.system.files import read_object
from nearplane.system.paths import CONFIG, TIED
from nearplane.system.patterns import fault_of, has_match

INPUT_SCALE = "input_global_scale"  # suffix of the tensor with the number by which steps of rounded inputs are divided
METHOD = "nearplane"  # quant_method of nearplane's own formats
MLX = "mlx"  # quant_method of MLX
QUANTIZATION = "quantization"  # field of config.json that MLX reads instead of quantization_config
WEIGHTS = "transformers_weights"  # field of config.json: the name of the file that transformers reads
NO_FILE = "no such file, as "  # how values of that field begin that name no file, but say what to do
READ_WITH = (
    f"{NO_FILE}these weights are entropy-coded by the Python package nearplane, which transformers does not know yet. Install "
    "nearplane and put this line before from_pretrained: import nearplane; nearplane.register()"
)  # value of that field in nearplane's format: the end of transformers' error, raised before it reads weights
EXPERTS_WITH = (
    f"{NO_FILE}experts in GPTQ are modules of their own, which transformers does not make of them. Load them "
    "with GPTQModel.load(FOLDER)"
)  # value of that field where a GPTQ has experts, which transformers would fill with random numbers
MLX_WITH = (
    f"{NO_FILE}these weights are packed for MLX, which transformers does not read. Load them with mlx_lm.load(FOLDER) "
    "or nearplane.load(FOLDER)"
)  # value of that field in a folder for MLX


class Held(NamedTuple):
    """A matrix on the grid by which a format holds it, and the number format of that grid."""

    matrix: QuantizedMatrix[Any]
    format: NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Description of a quantized network, from which a `quantization_config` is made.

    Args:
        scheme: The scheme of all layers that `grids` does not name.
        quantized: Names of all quantized modules.
        ignore: Names of *all* unquantized modules that are Linear or a subclass of it, in blocks or not ("lm_head"),
            and patterns "re:..." of parts of names.
        grids: The number format of every layer by name; empty if all layers have the same one.
        experts: Names of unquantized modules that transformers assembles from one tensor per expert.
        routed: Names of quantized experts that share one parameter, so that no reader has modules for them.
        layers: The number format of every quantized layer, by its name in the checkpoint.
        embeddings: Type of embeddings and head in a GGUF; None: unchanged.
        pre: Name of the pre-tokenizer in a GGUF; None: derived from the tokenizer's structure.
        rounded: Names of the quantized layers whose inputs runtimes round, in the network and in the files.
        kv_cache: Whether the files have scales of a key-value cache in 8-bit floats.
        version: Version of nearplane.
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
    rounded: Collection[str] = ()
    kv_cache: bool = False
    version: str


class LayerFormat(ABC):
    """Storage of one layer as tensors, and its description in the `quantization_config` of config.json.

    Attributes:
        KEY: Suffix of the name of the one tensor that every quantized layer has.
        SUFFIXES: Suffixes of the names of all tensors of a layer.
        CHECKSUMS: Whether the index of the folder holds a checksum of every tensor.
        METADATA: Value of "format" in the metadata of weight files.
        GLOBAL_SCALES: Whether files have a place for the global scale of a layer; else it is 1.
        ON_DEVICE: Whether `pack` and `unpack` compute where the matrix is; else it has to be on the CPU.
    """

    KEY: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]
    CHECKSUMS: ClassVar[bool] = False
    METADATA: ClassVar[str] = "pt"
    GLOBAL_SCALES: ClassVar[bool] = True
    ON_DEVICE: ClassVar[bool] = False

    @abstractmethod
    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse a layer that readers of this format cannot load.

        Args:
            name: Name of the layer.
            shape: (out, in) of its weights.
            kind: Class of the module: "Linear", "Conv1D", ...
            format: Number format that its weights will have.

        Raises:
            RecipeError: The layer cannot be stored; the message says what to do instead.
        """

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored steps in a model of this dtype; steps are rounded to it before the solve."""
        return torch.float16

    @abstractmethod
    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by full name; integers are stored as they are.

        Args:
            name: Name of the layer.
            matrix: The quantized matrix; on the CPU, unless `packs_on_device`.
            dtype: The dtype of the steps, see `scale_dtype`.

        Raises:
            FormatError: The format cannot hold the matrix exactly.
        """

    def packs_on_device(self, matrix: QuantizedMatrix[Any]) -> bool:
        """Return whether a matrix may be on a GPU when it is packed; its tensors are then there too."""
        del matrix
        return self.ON_DEVICE

    def held(self, matrix: QuantizedMatrix[Any], format: NumberFormat) -> Held:
        """Return a matrix of another file on the grid by which this format holds its values; `check` and `pack` decide.

        By default codes and steps stay as they are, as plain integers. A format with other grids overrides this.

        Args:
            matrix: The matrix, with groups of neighbouring inputs.
            format: Number format of the matrix in the other file.
        """
        if format.levels is None:
            format = integers(format.bits, format.group, symmetric=format.symmetric)
        return Held(on_one_level(matrix), format)

    @abstractmethod
    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a stored layer without unpacking it.

        Raises:
            FormatError: The tensor with the shape is missing.
        """

    @abstractmethod
    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix that `pack` stored.

        Args:
            name: Name of the layer.
            tensors: The tensors of the layer by full name; more are allowed.
            format: Number format of the layer in the config.

        Raises:
            FormatError: A tensor is missing or contradicts the config.
        """

    def unpack_for(
        self, device: torch.device, name: str, tensors: Mapping[str, Tensor], format: NumberFormat
    ) -> QuantizedMatrix:
        """Return the matrix that `pack` stored; codes may lie on `device` already, where a format decodes them there."""
        return self.unpack(name, tensors, format)

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format with the options of a quantization_config, where it has options.

        Raises:
            FormatError: The config has a version that nearplane does not read.
        """
        return self

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the tensors of every quantized layer, by the name of the layer.

        Args:
            names: Names of all tensors of a checkpoint.
        """
        existing = dict.fromkeys(names)
        layers = [name.removesuffix(f".{self.KEY}") for name in existing if name.endswith(f".{self.KEY}")]
        return {layer: [part for s in self.SUFFIXES if (part := f"{layer}.{s}") in existing] for layer in layers}

    def beside_the_first(self, name: str) -> dict[str, Tensor]:
        """Return tensors beside the first layer of a folder that stop programs which do not know the format."""
        return {}

    @abstractmethod
    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return the `quantization_config` of a network."""

    @abstractmethod
    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of a layer in a quantization_config.

        Raises:
            FormatError: The config does not describe the layer, or in a way that nearplane does not read.
        """

    def inputs_of(self, config: Mapping[str, Any], name: str) -> InputRounding | None:
        """Return how runtimes round the inputs of a layer; None if they do not.

        Raises:
            FormatError: The config describes a rounding that nearplane does not know.
        """
        return None

    def is_beside(self, name: str) -> bool:
        """Return whether a tensor belongs neither to a layer nor to the network, as a scale of a server's cache."""
        return False

    def files(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the texts of further files with the same contents, by file name."""
        return {}


class GridFormat(LayerFormat):
    """A format of fixed grids; the shapes of its tensors are known before the solve.

    So are the bytes of a folder. What transformers reads is first loaded without contents, see `planning/rehearsal.py`.
    """

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer as `pack` makes them, on the meta device; `dtype` is the model's."""

    def in_files(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of the layers of a block as the files hold them; by default as `pack` makes them."""
        return tensors


def check_kind(name: str, kind: str, kinds: Collection[str], stores: str) -> None:
    """Refuse a layer of another class of modules than `kinds`; `stores` is what a format stores, for the error.

    Raises:
        RecipeError: The layer is of another class.
    """
    if kind not in kinds:
        raise RecipeError(f"{name} is a {kind}; {stores}. Leave it unquantized with --ignore.")


def check_groups(name: str, columns: int, format: NumberFormat, hint: str = "") -> None:
    """Refuse a layer whose rows are no whole number of groups; `hint` stands behind --group-size in the error.

    Raises:
        RecipeError: The number of inputs is no multiple of the group size.
    """
    if columns % format.run:
        raise RecipeError(
            f"{name} has {columns} inputs, not a multiple of the group size {format.group}. Use another --group-size{hint}, or "
            f"leave the layer unquantized with --ignore."
        )


def json_text(content: Mapping[str, Any]) -> str:
    """Return an object as the text of a JSON file."""
    return json.dumps(content, indent=2) + "\n"


def config_text(source: Path, config: Mapping[str, Any], network: Mapping[str, Any]) -> str:
    """Return the config.json of a folder with a quantization_config, for MLX also under the names that MLX reads.

    If transformers cannot read the weights, the field in which it looks for a file name tells how to load them.

    Args:
        source: Folder of the original model.
        config: The quantization_config.
        network: config.json as transformers completes it and as the tensors are; empty: that of `source` is taken over.
    """
    kept = as_tensors_are(read_config(source), network)
    kept = {name: value for name, value in kept.items() if name not in (WEIGHTS, QUANTIZATION)}
    if config.get("quant_method") == METHOD:
        kept[WEIGHTS] = READ_WITH
    elif config.get("meta", {}).get("experts"):
        kept[WEIGHTS] = EXPERTS_WITH
    elif config.get("quant_method") == MLX:
        kept = rope_for_mlx(kept) | kept | {WEIGHTS: MLX_WITH}
        kept[QUANTIZATION] = {key: value for key, value in config.items() if key != "quant_method"}
    return json_text(kept | {"quantization_config": dict(config)})


def as_tensors_are(config: Mapping[str, Any], network: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json, its language model included, with the fields that the tensors decided as they are in `network`."""
    kept = {**config, **({TIED: network[TIED]} if TIED in network else {})}
    if isinstance(inner := config.get("text_config"), Mapping) and TIED in inner:
        kept["text_config"] = as_tensors_are(inner, network.get("text_config") or {})
    return kept


def rope_for_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that most models of mlx_lm read instead of rope_parameters, which transformers has written since 5.0."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    fields = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in fields}
    return fields if scaling.get("rope_type", "default") == "default" else fields | {"rope_scaling": scaling}


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        FormatError: The file is missing, or is no JSON object.
    """
    return read_object(folder / CONFIG, expected="A model's folder has one that save_pretrained or quantize wrote")


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression of a config matches the beginning of a layer's name, as in readers.

    Raises:
        FormatError: The pattern is no regular expression, or matching does not end within a time.
    """
    if (fault := fault_of(pattern)) is not None:
        raise FormatError(f"{pattern[:60]!r} in quantization_config {fault}. Fetch config.json again.")
    try:
        return has_match(pattern, name, at_start=True)
    except RecipeError as error:
        raise FormatError(f"quantization_config: {error}") from error
