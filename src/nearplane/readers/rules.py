"""What readers of quantized checkpoints put in place of linear layers, by rule: for programs that are not installed here.

The rules are those of transformers 5.23 with compressed-tensors 0.20, and of optimum 2.3 with gptqmodel 7.6, through which
transformers reads GPTQ. tests/readers/test_survey.py holds them against the programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nearplane.coding.words import words_of
from nearplane.formats import format_of
from nearplane.formats.gptq import BLOCKS_FOUND
from nearplane.formats.layer_format import GridFormat
from nearplane.schemes import LayerGrid

FP8 = ("float", 8)
GPTQMODEL_ALONE = frozenset({"gpt2", "gpt_bigcode", "nanochat"})  # types that gptqmodel loads and transformers does not

EXPERTS_BY_GPTQMODEL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1"), ()),
    **dict.fromkeys(("llama4_text", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open"), ()),
    "deepseek_v32": (r"indexer\.weights_proj$",),
    "qwen3_next": (r"linear_attn\.in_proj_ba$",),
    "qwen3_5_moe_text": (r"linear_attn\.in_proj_a$", r"linear_attn\.in_proj_b$"),
}  # types whose experts gptqmodel reads from GPTQ, and patterns of linear layers that it leaves as they are


class Described(QuantizationConfigMixin):
    """A quantization_config as it stands in config.json."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.quant_method: Any = fields["quant_method"]
        self.fields = fields


class ByRule(HfQuantizer):
    """Puts tensors of a format in place of the weights of layers that its reader would replace."""

    requires_calibration = True
    quantization_config: Described

    def takes(self, network: PreTrainedModel, name: str, module: nn.Module) -> tuple[int, int | None] | None:
        """Return bits and group size of a module that the reader replaces; None for all others."""
        raise NotImplementedError

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        layout = format_of(self.quantization_config.fields).layers
        assert isinstance(layout, GridFormat), "others have no rules here"
        chosen = {name: self.takes(model, name, module) for name, module in model.named_modules()}
        for name, grid in chosen.items():
            if grid is None:
                continue
            module = model.get_submodule(name)
            out, columns = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.flatten(1).shape
            tensors = layout.empty("", (out, columns), LayerGrid(*grid, symmetric=True), model.dtype)
            del module.weight
            for part, tensor in tensors.items():
                module.register_parameter(part.removeprefix("."), nn.Parameter(tensor, requires_grad=False))

    def is_serializable(self) -> bool:
        """Nothing is saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Nothing is trained."""
        return False


class Packed(ConversionOps):
    """What transformers' reader of compressed-tensors does to tensors that it merges, by the scheme of the experts.

    Those that are packed are decoded; of the others all are dropped, but under a scheme of eight-bit floats none.
    """

    def __init__(self, reader: CompressedTensorsByRule) -> None:
        self.reader = reader

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the tensors that are not dropped, those that are packed as they are when decoded."""
        weights = self.reader.of_experts
        if (weights["type"], weights["num_bits"]) == FP8:
            return input_dict
        columns = kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape[-1]
        packed = {name: tensors for name, tensors in input_dict.items() if "weight_packed" in name}
        for tensor in (tensor for tensors in packed.values() for tensor in tensors):
            if tensor.shape[1] != words_of(columns, weights["num_bits"]):
                raise ValueError(f"{weights['num_bits']} bits do not make {tensor.shape[1]} words of {columns} codes")
        return {name: [tensor.new_empty(len(tensor), columns) for tensor in all] for name, all in packed.items()}


class CompressedTensorsByRule(ByRule):
    """Replaces Linear layers that a group targets, by name, pattern or class, and `ignore` does not name."""

    serialized_names = {"weight": ["weight", "weight_packed", "weight_scale", "weight_shape"]}  # noqa: RUF012

    def get_load_operations(self) -> dict[str, Any]:
        """Return what is done to tensors before they are merged; layers of their own are not touched."""
        return {"dequantize": Packed}

    def get_weight_conversions(self) -> list[Any]:
        """Return no rules for other tensors."""
        return []

    @property
    def of_experts(self) -> Mapping[str, Any]:
        """The scheme by which experts are decoded: of a pattern that names them, or of a class, or the first."""
        groups = [*self.quantization_config.fields["config_groups"].values()]
        named = [g for g in groups if any(t.startswith("re:") and "experts" in t for t in g["targets"])]
        classes = [g for g in groups if any(not t.startswith("re:") for t in g["targets"])]
        weights: Mapping[str, Any] = (named or classes or groups)[0]["weights"]
        return weights

    def takes(self, network: PreTrainedModel, name: str, module: nn.Module) -> tuple[int, int | None] | None:
        """Return bits and group size of a Linear that is targeted and not ignored."""
        fields = self.quantization_config.fields
        if not isinstance(module, nn.Linear) or any(_names(entry, name, module) for entry in fields["ignore"]):
            return None
        groups = fields["config_groups"].values()
        found = [g["weights"] for g in groups if any(_names(target, name, module) for target in g["targets"])]
        return (found[0]["num_bits"], found[0]["group_size"]) if found else None


class GPTQByRule(ByRule):
    """Replaces what is exactly a Linear, or a Conv1D or Conv2d, and lies below the list of blocks."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if model.main_input_name != "input_ids":
            raise ValueError("GPTQ is loaded for models of text alone")
        super()._process_model_before_weight_loading(model, **kwargs)

    def takes(self, network: PreTrainedModel, name: str, module: nn.Module) -> tuple[int, int | None] | None:
        """Return bits and group size of a layer below the blocks that is among those listed, if any are."""
        fields = self.quantization_config.fields
        if type(module) is not nn.Linear and not isinstance(module, Conv1D | nn.Conv2d):
            return None
        listed = fields.get("modules_in_block_to_quantize")
        if not name.startswith(_blocks(fields, network)) or (
            listed is not None and not any(name.endswith(entry) for part in listed for entry in part)
        ):
            return None
        own: Mapping[str, Any] = next(
            (own for key, own in (fields.get("dynamic") or {}).items() if _matches(key, name)), {}
        )
        group_size = own.get("group_size", fields["group_size"])
        return own.get("bits", fields["bits"]), None if group_size == -1 else group_size


def reader_by_rule(config: Mapping[str, Any]) -> HfQuantizer:
    """Return what reads a format by its rules."""
    kinds: dict[str, type[ByRule]] = {"compressed-tensors": CompressedTensorsByRule, "gptq": GPTQByRule}
    return kinds[config["quant_method"]](Described(config), pre_quantized=True)


def _blocks(fields: Mapping[str, Any], network: nn.Module) -> str:
    """Return how names of layers that are replaced begin: as config.json says, or where such a module is found first."""
    if fields.get("block_name_to_quantize"):
        return str(fields["block_name_to_quantize"])
    names = [name for name, _ in network.named_modules()]
    found = [known for known in BLOCKS_FOUND if any(name.startswith(known) for name in names)]
    if not found:
        raise ValueError("the blocks are not found")
    return found[0]


def _matches(key: str, name: str) -> bool:
    """Return whether a key of `dynamic` gives a module a grid of its own."""
    return key.startswith("+:") and re.match(key.removeprefix("+:"), name) is not None


def _names(entry: str, name: str, module: nn.Module) -> bool:
    """Return whether an entry of `targets` or `ignore` stands for a module."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return entry == name or entry in {kind.__name__ for kind in type(module).__mro__}
