"""Loading of native checkpoints by transformers, through its public registration; nothing is patched.

    nearplane.register()
    model = AutoModelForCausalLM.from_pretrained(OUT)     # or, in one call: nearplane.load(OUT)

transformers builds the model on the meta device, `NearplaneQuantizer` puts packed layers in place of the quantized ones, each
with a `weight_coded` that transformers fills like any buffer, and at the end decodes them all at once with all cores. Before a
weight is read, every tensor of the folder is checked against its checksum. Embeddings, and what is tied to them, are decoded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from nearplane.errors import FormatError, ModelError, RecipeError
from nearplane.formats.layer_format import METHOD, WEIGHTS, read_config
from nearplane.formats.native import DEFAULT, Native
from nearplane.formats.stored import quantization_of
from nearplane.formats.table import FORMATS
from nearplane.loading.dense_network import Coded, Joined, Place, StackPlace, dense_network, fill, make_places
from nearplane.loading.packed_linear import PackedLinear
from nearplane.models.conversion import renamed
from nearplane.models.pretrained import find_folder, network_of
from nearplane.system.device import Device
from nearplane.system.safetensors_files import ShardReader

KEY, STOP = Native.KEY, Native.STOP
logger = logging.get_logger(__name__)


def register() -> None:
    """Let `from_pretrained` of transformers load native checkpoints in this process. May be called again."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(NearplaneConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(NearplaneQuantizer)


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    packed: bool = True,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model: what nearplane wrote, in any format, or any folder of safetensors that transformers loads.

    Grids are decoded to `dtype`, but those of compressed-tensors stay packed where transformers decodes them to `dtype` and the
    model is no encoder with a decoder.

    Args:
        source: a folder or hub id.
        dtype: to compute in; auto is that of the checkpoint.
        device: as `Device.named` reads it; auto is the GPU where there is one.
        packed: keep native weights packed, half a byte or a byte each; else decode them to `dtype`.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        FormatError: a file is damaged, of a future version or not what config.json says.
        ModelError: there is no model there, or it is incomplete.
        RecipeError: there is no such dtype.
    """
    register()
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise RecipeError(f"dtype is {dtype!r}; expected auto, or one of torch: float32, float16, bfloat16.")
    folder = find_folder(str(source), trust_remote_code=trust_remote_code)
    quantization = quantization_of(folder) or {}  # refuses what is not finished
    config = read_config(folder)
    method = quantization.get("quant_method")
    known = isinstance(method, str) and method in FORMATS and method != METHOD  # of a damaged config, a list
    apart = config.get("is_encoder_decoder") is True  # whose parts are called one by one: nothing stays packed
    if dtype == "auto":
        wanted = getattr(torch, str(config.get("dtype")), None)
    dense = known and (apart or not FORMATS[str(method)].layers.stays_packed(quantization, wanted))
    model = (dense_network if dense else network_of)(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    if not packed and isinstance(getattr(model, "hf_quantizer", None), NearplaneQuantizer):
        model = model.dequantize(model.dtype)
    return model.to(Device.named(device).place)


class NearplaneConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json as transformers passes it around.

    Raises:
        FormatError: it is of a version or has a coder that is not understood, or does not name the modules.
    """

    def __init__(self, **fields: Any) -> None:
        DEFAULT.configured(fields)
        modules = fields.get("modules")
        if not isinstance(modules, list) or not modules or not all(isinstance(name, str) for name in modules):
            raise FormatError(
                f"quantization_config: modules is {str(modules)[:60]!r}, expected a list of names. Fetch config.json again."
            )
        self.modules: list[str] = modules
        self.__dict__.update(fields | {"quant_method": METHOD})


class NearplaneQuantizer(HfQuantizer):
    """Loads native checkpoints; never quantizes."""

    requires_calibration = True  # so that from_pretrained refuses to quantize with a NearplaneConfig
    quantization_config: NearplaneConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to keep weights on disk or in another process' memory."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ModelError(
                "device_map sends layers to disk; nearplane checkpoints are decoded in memory. Map them to a device."
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Take from the config the sentence at which transformers stops without this class: files are found by their names."""
        if hasattr(config, WEIGHTS):
            delattr(config, WEIGHTS)
        return config

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor's size is the file's to say: transformers then takes it as it comes."""
        return param_name in self._places

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Return bytes per element, for device_map="auto"; what stands for coded weights counts as packed ones."""
        place = self._places.get(param_name)
        if not isinstance(place, Place) or place.tensor == "weight":
            return param.element_size()
        return place.shape[0] * place.shape[1] / 2

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Let transformers put the blobs of modules that are decoded where their weights will be."""
        dense = [place.name for place in self._places.values() if isinstance(place, Place) and place.tensor == "weight"]
        dense += [
            name.removeprefix(self._prefix) for name in dense if name.startswith(self._prefix)
        ]  # as some files have
        self._conversions = [
            WeightConverter([rf"^{re.escape(name)}\.{part}" for part in (KEY, STOP)], f"{name}.weight", [Coded()])
            for name in dense
        ]
        stacks = {name: place for name, place in self._places.items() if isinstance(place, StackPlace)}
        for parameter, place in stacks.items():
            for start in dict.fromkeys(("", self._prefix if place.name.startswith(self._prefix) else "")):
                head = re.escape(place.name.removeprefix(start))
                parts = [rf"^{head}\.[0-9]+\.{word}\.{part}" for word in place.words for part in (KEY, STOP)]
                self._conversions.append(WeightConverter(parts, parameter.removeprefix(start), [Joined()]))
        return self._conversions

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Put ours before those of the model, which has some for the dense weights of experts."""
        return self.get_weight_conversions() + weight_conversions

    def is_serializable(self) -> bool:
        """Return False; packed layers hold no longer what the file held."""
        logger.warning(
            "A nearplane model is saved by copying its folder; `model.dequantize()` makes one that saves densely."
        )
        return False

    @property
    def is_trainable(self) -> bool:
        """Codes are integers."""
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Check the files, and put a place for a blob where each quantized weight is."""
        files: Sequence[str | Path] | None = kwargs.get("checkpoint_files")
        if not files:
            raise ModelError(
                "A nearplane checkpoint is loaded from its files; a state_dict beside it is not understood."
            )
        reader = ShardReader(Path(files[0]).parent)
        reader.verify()
        stored = set(reader.names())
        coded = [name for name in reader.names() if name.endswith(f".{KEY}")]
        beside = {name.removesuffix(KEY) + STOP for name in coded} & stored
        stops = {name for name in stored if name.endswith(f".{STOP}") and reader.shape(name) == (0,)}
        for name in beside - stops:
            raise FormatError(
                f"{reader.file(name)}: {name} is {reader.shape(name)}, beside its codes (0,) is expected. Fetch the folder again."
            )
        unexpected = {rf"(^|\.){re.escape(name)}$" for name in stops | renamed(model, stops)}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *unexpected}
        for name in coded:
            if reader.dtype(name) != "U8" or len(reader.shape(name)) != 1:
                found = f"{reader.dtype(name)} {reader.shape(name)}"
                raise FormatError(f"{reader.file(name)}: {name} is {found}, expected bytes (U8) in one dimension.")
        for name, tensor in model.state_dict().items():  # transformers says less of it
            if name in stored and name not in stops and reader.shape(name) != tuple(tensor.shape):
                raise FormatError(
                    f"{reader.file(name)}: {name} is {reader.shape(name)}, config.json asks for {tuple(tensor.shape)}. The two "
                    f"do not belong together; fetch the folder again."
                )
        modules = self.quantization_config.modules
        if len(coded) != len(modules):
            raise FormatError(
                f"{reader.folder} holds {len(coded)} tensors {KEY}, config.json names {len(modules)} modules: the two do not "
                f"belong together. Fetch the folder again."
            )
        prefix = self._prefix = f"{model.base_model_prefix}."
        files_of = {name.removesuffix(f".{KEY}").removeprefix(prefix): reader.file(name) for name in coded}
        self._dtype = kwargs.get("dtype") or torch.get_default_dtype()
        called = (f"{files_of.get(name.removeprefix(prefix), reader.folder)}: {name}.{KEY}" for name in modules)
        self._places = make_places(model, modules, called, self._dtype)  # by the name of what transformers loads
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Decode all blobs, with all cores."""
        model._weight_conversions = [step for step in model._weight_conversions if step not in self._conversions]
        work = [(place, model.get_submodule(place.name)) for place in self._places.values()]
        work.sort(key=lambda entry: -getattr(entry[1], entry[0].tensor).numel())
        many = len(work) >= 2 * (cores := os.cpu_count() or 1)
        with ThreadPoolExecutor(cores if many else 1) as pool:
            for part in [pool.submit(fill, *entry, self._dtype, 1 if many else None) for entry in work]:
                part.result()
        if any(isinstance(place, Place) and place.tensor == "weight" for place, _ in work):
            model.tie_weights(recompute_mapping=False)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Put ordinary layers with decoded weights in place of packed ones."""
        for place in self._places.values():
            module = model.get_submodule(place.name)
            if not isinstance(place, Place) or not isinstance(module, PackedLinear):
                continue
            values = module.weight if dtype is None else module.weight.to(dtype)
            values = values.T.contiguous() if type(place.module) is Conv1D else values
            place.module.register_parameter("weight", nn.Parameter(values, requires_grad=False))
            place.module.register_parameter("bias", module.bias)
            model.set_submodule(place.name, place.module.eval())
        for parameter in model.parameters():  # buffers keep their own: frequencies, complex ones
            if dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        return model
