"""Rules by which readers of GPTQ and AWQ select the layers that they replace; they cannot be installed beside nearplane.

The rules are those of optimum 2.3 with gptqmodel 7.6, through which transformers reads GPTQ.
tests/journeys/test_survey.py compares them with these programs where they are installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.awq import AWQ_SCALES_MAPPINGS
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from nearplane.errors import RecipeError
from nearplane.formats.gptq import BLOCKS_FOUND
from nearplane.formats.layer_format import GridFormat
from nearplane.formats.table import format_of
from nearplane.models.model import Model
from nearplane.number_formats import integers

GPTQMODEL_ONLY_TYPES = frozenset({"gpt2", "gpt_bigcode", "nanochat"})  # model types that only gptqmodel loads

EXPERTS_BY_GPTQMODEL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1"), ()),
    **dict.fromkeys(("llama4_text", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open"), ()),
    "deepseek_v32": (r"indexer\.weights_proj$",),
    "qwen3_next": (r"linear_attn\.in_proj_ba$",),
    "qwen3_5_moe_text": (r"linear_attn\.in_proj_a$", r"linear_attn\.in_proj_b$"),
}  # model types whose experts gptqmodel reads from GPTQ, with patterns of linear layers that it does not replace


class Described(QuantizationConfigMixin):
    """The quantization_config of config.json, unchanged."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.quant_method: Any = fields["quant_method"]
        self.fields = fields


class GPTQByRule(HfQuantizer):
    """Quantizer that replaces the weights of layers by tensors of GPTQ, as readers of GPTQ do.

    These layers are exactly Linear, or are or inherit from Conv1D or Conv2d, and lie below the list of blocks.
    """

    requires_calibration = True
    quantization_config: Described

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if model.main_input_name != "input_ids":
            raise ValueError("GPTQ and AWQ are loaded for text models only")
        layout = format_of(self.quantization_config.fields).layers
        assert isinstance(layout, GridFormat), "both store grids"
        grids = {name: self.takes(model, name, module) for name, module in model.named_modules()}
        for name, grid in grids.items():
            if grid is None:
                continue
            module = model.get_submodule(name)
            out, columns = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.flatten(1).shape
            tensors = layout.empty("", (out, columns), integers(*grid), model.dtype)
            del module.weight
            for part, tensor in tensors.items():
                module.register_parameter(part.removeprefix("."), nn.Parameter(tensor, requires_grad=False))

    def takes(self, network: PreTrainedModel, name: str, module: nn.Module) -> tuple[int, int | None] | None:
        """Return bits and group size of a replaced layer: one below the blocks, and in the list if there is one."""
        fields = self.quantization_config.fields
        if type(module) is not nn.Linear and not isinstance(module, Conv1D | nn.Conv2d):
            return None
        listed = fields.get("modules_in_block_to_quantize")
        if not name.startswith(_blocks(fields, network)) or (
            listed is not None and not any(name.endswith(entry) for part in listed for entry in part)
        ):
            return None
        rules = {
            key.removeprefix("+:"): options
            for key, options in (fields.get("dynamic") or {}).items()
            if key.startswith("+:")
        }
        options: Mapping[str, Any] = next((options for key, options in rules.items() if re.match(key, name)), {})
        group_size = options.get("group_size", fields["group_size"])
        return options.get("bits", fields["bits"]), None if group_size == -1 else group_size

    def is_serializable(self) -> bool:
        """Return False: no model is saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: no model is trained."""
        return False


class AWQByRule(GPTQByRule):
    """Quantizer that replaces the weights of layers by tensors of AWQ, as transformers 5.23 does.

    These are all Linear layers but the head and those that `modules_to_not_convert` names.
    """

    skipped: Sequence[str] = ()  # names and patterns of modules that keep their weights

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if (kind := model.config.model_type) in AWQ_SCALES_MAPPINGS:
            raise ValueError(f"readers of AWQ expect factors of activations in {kind}")
        named = self.quantization_config.fields["modules_to_not_convert"]
        self.skipped = self.get_modules_to_not_convert(model, list(named), add_default_skips=True)
        super()._process_model_before_weight_loading(model, **kwargs)

    def takes(self, network: PreTrainedModel, name: str, module: nn.Module) -> tuple[int, int | None] | None:
        """Return bits and group size of a replaced layer."""
        fields = self.quantization_config.fields
        if not isinstance(module, nn.Linear) or not should_convert_module(name, list(self.skipped)):
            return None
        return fields["bits"], None if fields["group_size"] == -1 else fields["group_size"]


RULES: Mapping[str, type[GPTQByRule]] = {"gptq": GPTQByRule, "awq": AWQByRule}  # by quant_method


def _blocks(fields: Mapping[str, Any], network: nn.Module) -> str:
    """Return the name prefix of replaced layers: from config.json, or the first known one that the network has."""
    if fields.get("block_name_to_quantize"):
        return str(fields["block_name_to_quantize"])
    names = [name for name, _ in network.named_modules()]
    prefixes = [known for known in BLOCKS_FOUND if any(name.startswith(known) for name in names)]
    if not prefixes:
        raise ValueError("the network has no list of blocks of a known name")
    return prefixes[0]


def check_experts(model: Model) -> None:
    """Refuse experts in GPTQ if gptqmodel does not read those of this type of model.

    Raises:
        RecipeError: gptqmodel does not read the experts, or does not replace one of the layers.
    """
    kind = model.config.model_type
    left = EXPERTS_BY_GPTQMODEL.get(kind)
    if left is None:
        first = next(layer for layer in model.layers if layer.routed)
        raise RecipeError(
            f"{first.name} is one of several experts in one parameter. Neither transformers nor GPTQModel reads the experts "
            f"of {kind} from GPTQ. Use --runtime vllm or nearplane, which do, another --format, or --ignore 'experts'."
        )
    dense = {pattern: layer.name for pattern in left for layer in model.layers if re.search(pattern, layer.name)}
    if dense:
        patterns = " ".join(f"'{pattern}'" for pattern in dense)
        raise RecipeError(
            f"{next(iter(dense.values()))} would not load: GPTQModel, which reads the experts of {kind} from GPTQ, keeps this "
            f"layer unquantized. Leave such layers unquantized with --ignore {patterns}."
        )
