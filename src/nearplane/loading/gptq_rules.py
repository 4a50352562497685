"""Which layers the programs that read GPTQ replace, by rule: they need versions of other packages that exclude ours.

The rules are those of optimum 2.3 with gptqmodel 7.6, through which transformers reads GPTQ. tests/journeys/test_survey.py
holds them against the programs where these are installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nearplane.formats.gptq import BLOCKS_FOUND
from nearplane.formats.layer_format import GridFormat
from nearplane.formats.table import format_of
from nearplane.lattice.number_formats import integers

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


class GPTQByRule(HfQuantizer):
    """Puts tensors of GPTQ in place of the weights of layers that its readers replace.

    These are what is exactly a Linear, or a Conv1D or Conv2d, and lies below the list of blocks.
    """

    requires_calibration = True
    quantization_config: Described

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if model.main_input_name != "input_ids":
            raise ValueError("GPTQ is loaded for models of text alone")
        layout = format_of(self.quantization_config.fields).layers
        assert isinstance(layout, GridFormat), "GPTQ is written on grids"
        chosen = {name: self.takes(model, name, module) for name, module in model.named_modules()}
        for name, grid in chosen.items():
            if grid is None:
                continue
            module = model.get_submodule(name)
            out, columns = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.flatten(1).shape
            tensors = layout.empty("", (out, columns), integers(*grid), model.dtype)
            del module.weight
            for part, tensor in tensors.items():
                module.register_parameter(part.removeprefix("."), nn.Parameter(tensor, requires_grad=False))

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
        ruled = {
            key.removeprefix("+:"): own for key, own in (fields.get("dynamic") or {}).items() if key.startswith("+:")
        }
        own: Mapping[str, Any] = next((own for key, own in ruled.items() if re.match(key, name)), {})
        group_size = own.get("group_size", fields["group_size"])
        return own.get("bits", fields["bits"]), None if group_size == -1 else group_size

    def is_serializable(self) -> bool:
        """Nothing is saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Nothing is trained."""
        return False


def _blocks(fields: Mapping[str, Any], network: nn.Module) -> str:
    """Return how names of layers that are replaced begin: as config.json says, or where such a module is found first."""
    if fields.get("block_name_to_quantize"):
        return str(fields["block_name_to_quantize"])
    names = [name for name, _ in network.named_modules()]
    found = [known for known in BLOCKS_FOUND if any(name.startswith(known) for name in names)]
    if not found:
        raise ValueError("the blocks are not found")
    return found[0]
