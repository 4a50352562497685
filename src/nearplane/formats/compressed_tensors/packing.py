"""Base class of the packings of compressed-tensors: each kind of numbers has its own tensors and config fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.layer_format import check_groups
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import InputRounding, NumberFormat

SCALES = {torch.float16, torch.bfloat16, torch.float32}


class Packing(ABC):
    """A packing of compressed-tensors: the tensors of a layer, and the config fields that describe them.

    Attributes:
        SUFFIXES: Suffixes of the names of all tensors of a layer.
        ON_DEVICE: Whether `pack` and `unpack` compute where the matrix is; else it has to be on the CPU.
        FORMAT: The packing's name in config.json.
        TYPE: The name of its numbers in config.json.
        HOLDS: The one number format that it stores; None: integers of several widths.
        STRATEGY: Name in config.json of how weights share steps; None: by the number format.
        WORDS_IN: Suffix of the name of the tensor with the codes.
        WORDS: Its dtype.
    """

    KEY: ClassVar[str] = "weight_scale"
    SUFFIXES: ClassVar[tuple[str, ...]]
    ON_DEVICE: ClassVar[bool] = False
    WORDS_IN: ClassVar[str] = "weight_packed"
    FORMAT: ClassVar[str]
    TYPE: ClassVar[str]
    HOLDS: ClassVar[NumberFormat | None] = None
    STRATEGY: ClassVar[str | None] = None
    WORDS: ClassVar[torch.dtype]

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return the `weights` object of the config for a number format and a rounding order."""
        return {
            "num_bits": format.bits,
            "type": self.TYPE,
            "symmetric": format.symmetric,
            "strategy": self.STRATEGY or ("group" if format.group else "channel"),
            "group_size": format.group,
            "actorder": None if order == "natural" else "static",
            "dynamic": False,
        }

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the number format that a `weights` object describes: the one that the packing stores.

        Raises:
            FormatError: A field has a value that nearplane does not read.
        """
        assert self.HOLDS is not None, "the packing of several formats reads theirs"
        expected = {name: value for name, value in self.weights(self.HOLDS, "natural").items() if name != "actorder"}
        refuse_unknown({f"weights.{name}": (weights.get(name), {_hashed(value)}) for name, value in expected.items()})
        return self.HOLDS

    @abstractmethod
    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer; see `LayerFormat.pack`."""

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents; see `GridFormat.empty`."""

    @abstractmethod
    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) of a stored layer; see `LayerFormat.shape_of`."""

    @abstractmethod
    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix that `pack` stored; see `LayerFormat.unpack`."""

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse layers that transformers does not load: all but Linear layers of whole groups."""
        if kind not in ("Linear", "Expert"):
            raise RecipeError(
                f"{name} is a {kind}; readers load compressed-tensors for Linear layers only. "
                f"Use --format gptq for Conv1D, or leave the layer unquantized with --ignore."
            )
        check_groups(name, shape[1], format, " (none: one step per row)")

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the model's dtype, as readers multiply in it; float32 for dtypes that are not stored."""
        return model_dtype if model_dtype in SCALES else torch.float32


def inputs_object(how: InputRounding) -> dict[str, Any]:
    """Return the `input_activations` object of the config for a rounding of inputs."""
    shared, dtype = "tensor_group" if how.global_scale else "group", f"torch.{how.steps}"
    return {
        "num_bits": how.bits,
        "type": "int" if how.kind == "int" else "float",
        "symmetric": True,
        "strategy": shared if how.group else "token",
        "group_size": how.group,
        "dynamic": "local" if how.global_scale else True,
        "scale_dtype": "torch.uint8" if how.steps == "float8_e8m0fnu" else dtype if how.steps else None,
        "observer": "static_minmax" if how.global_scale else None,
    }


def check_inputs(inputs: Any, how: InputRounding | None) -> InputRounding | None:
    """Return how inputs are rounded by an `input_activations` object; None if it is null.

    Args:
        inputs: The object.
        how: The only rounding that such weights go with.

    Raises:
        FormatError: The object describes another rounding.
    """
    if inputs is None:
        return None
    if how is None or not isinstance(inputs, dict):
        raise FormatError(
            f"compressed-tensors: input_activations is {str(inputs)[:60]}, expected None for such weights."
        )
    expected = {name: value for name, value in inputs_object(how).items() if name != "observer"}
    refuse_unknown({f"input_activations.{name}": (inputs.get(name), {value}) for name, value in expected.items()})
    return how


def refuse_unknown(fields: Mapping[str, tuple[Any, set[Any]]]) -> None:
    """Refuse fields of a config with values that nearplane does not read.

    Args:
        fields: The value and the set of readable values of each field, by name.

    Raises:
        FormatError: A value is not readable; the message names the first such field.
    """
    for option, (value, understood) in fields.items():
        known = _hashed(value)
        if isinstance(known, dict | list | float) or known not in understood:
            expected = " or ".join(sorted(map(str, understood)))
            raise FormatError(f"compressed-tensors: {option} is {value!r}, expected {expected}.")


def _hashed(value: Any) -> Any:
    """Return a value of a config that can be in a set: a tuple instead of a list of whole numbers."""
    return tuple(value) if isinstance(value, list) and all(type(each) is int for each in value) else value
