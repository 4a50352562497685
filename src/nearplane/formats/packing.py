"""What compressed-tensors has one of for each kind of numbers: how the tensors of a layer look, and how the config says it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.layer_format import GridFormat
from nearplane.lattice.number_formats import NumberFormat

SCALES = {torch.float16, torch.bfloat16, torch.float32}


class Packing(GridFormat):
    """One of the ways in which compressed-tensors packs a layer: its tensors, and the fields of the config that say so.

    Attributes:
        FORMAT: its name in config.json.
        TYPE: what config.json calls its numbers.
        HOLDS: the number format that it holds; None: integers.
        WORDS: dtype of `weight_packed`.
        DECODED: dtype to which transformers decodes it, whatever the network's; None: the network's.
    """

    KEY = "weight_packed"
    FORMAT: ClassVar[str]
    TYPE: ClassVar[str]
    HOLDS: ClassVar[NumberFormat | None] = None
    WORDS: ClassVar[torch.dtype]
    DECODED: ClassVar[torch.dtype | None] = None

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return what the config says of weights in a number format that were rounded in this order."""
        return {
            "num_bits": format.bits,
            "type": self.TYPE,
            "symmetric": format.symmetric,
            "strategy": "group" if format.group else "channel",
            "group_size": format.group,
            "actorder": None if order == "natural" else "static",
            "dynamic": False,
        }

    @abstractmethod
    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the number format that a config says.

        Raises:
            FormatError: it says something that is not understood.
        """

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse what transformers does not load: anything but Linear layers of whole groups."""
        if kind not in ("Linear", "Expert"):
            raise RecipeError(
                f"{name} is a {kind}; compressed-tensors is loaded for Linear layers only. "
                f"Use --format gptq for Conv1D, or leave it as it is with --ignore."
            )
        if format.group is not None and shape[1] % format.group:
            raise RecipeError(
                f"{name} has {shape[1]} inputs, not a multiple of the group size {format.group}, which compressed-tensors "
                f"requires. Use another --group-size (none for one step a row), or leave it as it is with --ignore."
            )

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the model's: readers multiply in it."""
        return model_dtype if model_dtype in SCALES else torch.float32


def refuse_unknown(fields: Mapping[str, tuple[Any, set[Any]]]) -> None:
    """Refuse fields of a config whose value is none of those that are understood.

    Args:
        fields: by name, the value and what is understood.

    Raises:
        FormatError: names the first.
    """
    for option, (value, understood) in fields.items():
        if isinstance(value, dict | list | float) or value not in understood:
            expected = " or ".join(sorted(map(str, understood)))
            raise FormatError(f"compressed-tensors: {option} is {value!r}, understood is {expected}.")
