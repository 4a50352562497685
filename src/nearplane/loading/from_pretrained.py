"""Loading of native checkpoints by transformers, through its public registration; nothing is patched.

    nearplane.register()
    model = AutoModelForCausalLM.from_pretrained(OUT)     # or, in one call: nearplane.load(OUT)

transformers builds the model on the meta device. `NearplaneQuantizer` replaces the quantized layers by packed ones,
each with a buffer `weight_coded` that transformers loads; at the end it decodes all of them in parallel on all cores.
Before a weight is read, every tensor of the folder is checked against its checksum. Embeddings and weights tied to them
are decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
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
from nearplane.formats.stored import quantization_of, reader_of
from nearplane.formats.table import FORMATS
from nearplane.loading.coded_linear import CodedLinear
from nearplane.loading.dense_network import (
    JoinedBlobs,
    SingleBlob,
    dense_network,
    fill_all,
    make_places,
)
from nearplane.loading.loaded_network import network_of
from nearplane.loading.packed_grids import round_head
from nearplane.loading.packed_linear import PackedLinear
from nearplane.loading.rounded_layers import round_inputs, rounded_layers
from nearplane.loading.source_folder import source_folder
from nearplane.models.conversion import renamed
from nearplane.models.pretrained import empty_network
from nearplane.system.arguments import checked
from nearplane.system.device import WITHOUT_FLOAT64, Device
from nearplane.system.fp8_mxfp4 import WidenedReader
from nearplane.system.recorded_hashes import check_hashes
from nearplane.system.safetensors_files import ShardReader

KEY, STOP = Native.KEY, Native.STOP
logger = logging.get_logger(__name__)


def register() -> None:
    """Register native checkpoints with `from_pretrained` of transformers in this process. May be called again."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(NearplaneConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(NearplaneQuantizer)


@checked()
def load(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    packed: bool = True,
    head: str | None = None,
    check: bool = True,
    activations: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model: a checkpoint of nearplane in any format, or any folder of safetensors that transformers loads.

    On the CPU, layers on grids stay packed and are multiplied without decoding them, where `grid_linear.py` takes the
    grid; all others are decoded. The log says how many. On another device, grids are decoded to `dtype`. Where runtimes
    round the inputs of layers (`quantize --activations`), the weights alone are loaded and inputs are not rounded, unless
    `activations` asks for it.

    Args:
        source: A folder, a hub id, or a .gguf file of an architecture that nearplane writes.
        dtype: Dtype of the computation; "auto" is the dtype in config.json.
        device: Device as in `Device.named`; "auto" is the GPU if there is one. Each weight is sent to it as it is read.
        packed: Whether weights stay packed where they can, in 2 to 8 bits each; else they are decoded.
        head: "int8" rounds the head, the layer that predicts tokens, to 8 bits while it is loaded on the CPU. It is then
            read twice as fast; None leaves it as it is.
        check: Whether the files are compared with the hashes in the run record, if there is one.
        activations: Whether the network rounds the inputs of its layers as runtimes do.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        FormatError: A file is damaged, has a future version or contradicts config.json or the run record.
        ModelError: There is no model, or it is incomplete.
        RecipeError: There is no such dtype, or the device lacks it; or the head cannot be rounded.
    """
    register()
    place = Device.named(device, in_float64=False).place
    compute_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point):
        raise RecipeError(f"dtype is {dtype!r}; expected auto, or a dtype of torch: float32, float16, bfloat16.")
    check_head(head, place)
    folder = source_folder(source, trust_remote_code=trust_remote_code)
    quantization = quantization_of(folder) or {}  # refuses an unfinished folder
    config = read_config(folder)
    method = quantization.get("quant_method")
    grid_format = isinstance(method, str) and method in FORMATS and method != METHOD  # a list in a damaged config
    if dtype == "auto":
        compute_dtype = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
    if compute_dtype == torch.float64 and place.type in WITHOUT_FLOAT64:
        raise RecipeError(f"dtype is float64, which {place} does not have. Pass another dtype, or use --device cpu.")
    on_kernels = packed and not activations and place.type == "cpu" and compute_dtype != torch.float64
    reader = reader_of(folder)
    widened = isinstance(reader, WidenedReader) and not reader.by_transformers
    if widened or grid_format:
        options = {"check": check, "trust_remote_code": trust_remote_code, "packed": on_kernels}
        model = dense_network(folder, dtype=dtype, device=place, **options)
    else:
        empty = empty_network(folder, trust_remote_code=trust_remote_code, reader=reader)
        if check:
            check_hashes(folder, weights=method != METHOD)  # transformers reads the files, native ones through `verify`
        model = network_of(folder, dtype=dtype, device=place, empty=empty, trust_remote_code=trust_remote_code)
    if not packed and isinstance(getattr(model, "hf_quantizer", None), NearplaneQuantizer):
        model = model.dequantize(model.dtype)
    if activations:
        round_inputs(rounded_layers(model, folder), model)
    if head is not None:
        round_head(model)
    return model


def check_head(head: str | None, place: torch.device) -> None:
    """Refuse a head in another form than `load` makes.

    Raises:
        RecipeError: It is not int8, or the device is not the CPU.
    """
    if head not in (None, "int8"):
        raise RecipeError(f"head is {head!r}; expected int8, or nothing to leave the head as it is.")
    if head is not None and place.type != "cpu":
        raise RecipeError(f"head is int8, which is for the CPU; the device is {place}. Use --device cpu.")


class NearplaneConfig(QuantizationConfigMixin):
    """The `quantization_config` of config.json, as transformers passes it on.

    Raises:
        FormatError: The version or the coder is unknown, or the list of modules is missing.
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
    """Quantizer class for transformers that loads native checkpoints; it never quantizes."""

    requires_calibration = True  # so that from_pretrained refuses to quantize with a NearplaneConfig
    quantization_config: NearplaneConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a device_map that keeps weights on disk."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ModelError(
                "device_map maps layers to disk, but nearplane checkpoints are decoded in memory. Map them to a device."
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the config entry that stops transformers without this class, so that files are found by name."""
        if hasattr(config, WEIGHTS):
            delattr(config, WEIGHTS)
        return config

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor is a blob: transformers then accepts the size in the file."""
        return param_name in self._places

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Return bytes per element, for device_map="auto"; a placeholder of coded weights counts as packed weights."""
        place = self._places.get(param_name)
        return param.element_size() if place is None or place.tensor != KEY else math.prod(place.shape) / 2

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return the conversions by which transformers loads blobs into weights that are decoded."""
        self._conversions = []
        for parameter, place in self._places.items():
            if place.tensor == KEY:
                continue
            matrices = [rf"\.[0-9]+\.{word}" for word in place.words] or [""]
            step = JoinedBlobs() if place.layers else SingleBlob()
            # some files have no prefix
            for start in dict.fromkeys(("", self._prefix if place.name.startswith(self._prefix) else "")):
                head = re.escape(place.name.removeprefix(start))
                parts = [rf"^{head}{matrix}\.{part}" for matrix in matrices for part in (KEY, STOP)]
                self._conversions.append(WeightConverter(parts, parameter.removeprefix(start), [step]))
        return self._conversions

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Return these conversions before those of the model, which convert the dense weights of experts."""
        return self.get_weight_conversions() + weight_conversions

    def is_serializable(self) -> bool:
        """Return False: packed layers no longer hold the bytes of the file."""
        logger.warning(
            "To save a nearplane model, copy its folder. To save decoded weights, call `model.dequantize()` first."
        )
        return False

    @property
    def is_trainable(self) -> bool:
        """False: codes are integers."""
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Check the files, and prepare the place of every blob."""
        files: Sequence[str | Path] | None = kwargs.get("checkpoint_files")
        if not files:
            raise ModelError(
                "A nearplane checkpoint is loaded from its files, not from a state_dict. Leave state_dict out."
            )
        reader = ShardReader(Path(files[0]).parent)
        reader.verify()
        stored = set(reader.names())
        coded = [name for name in reader.names() if name.endswith(f".{KEY}")]
        expected_stops = {name.removesuffix(KEY) + STOP for name in coded} & stored
        stops = {name for name in stored if name.endswith(f".{STOP}") and reader.shape(name) == (0,)}
        for name in expected_stops - stops:
            raise FormatError(
                f"{reader.file(name)}: {name} is {reader.shape(name)}; expected (0,) next to its codes. Fetch the folder again."
            )
        unexpected = {rf"(^|\.){re.escape(name)}$" for name in stops.union(renamed(model, stops).values())}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *unexpected}
        for name in coded:
            if reader.dtype(name) != "U8" or len(reader.shape(name)) != 1:
                form = f"{reader.dtype(name)} {reader.shape(name)}"
                raise FormatError(f"{reader.file(name)}: {name} is {form}; expected bytes (U8) in one dimension.")
        for name, tensor in model.state_dict().items():  # transformers' own message is less precise
            if name in stored and name not in stops and reader.shape(name) != tuple(tensor.shape):
                raise FormatError(
                    f"{reader.file(name)}: {name} is {reader.shape(name)}, but config.json describes {tuple(tensor.shape)}. "
                    f"These files do not belong together. Fetch the folder again."
                )
        modules = self.quantization_config.modules
        if len(coded) != len(modules):
            raise FormatError(
                f"{reader.folder} has {len(coded)} tensors {KEY}, but config.json names {len(modules)} modules. These files do "
                f"not belong together. Fetch the folder again."
            )
        prefix = self._prefix = f"{model.base_model_prefix}."
        files_of = {name.removesuffix(f".{KEY}").removeprefix(prefix): reader.file(name) for name in coded}
        self._dtype = kwargs.get("dtype") or torch.get_default_dtype()
        labels = (f"{files_of.get(name.removeprefix(prefix), reader.folder)}: {name}.{KEY}" for name in modules)
        self._places = make_places(model, modules, labels, self._dtype)  # {name of the tensor that is loaded: place}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Decode all blobs; see `fill_all`."""
        model._weight_conversions = [step for step in model._weight_conversions if step not in self._conversions]
        fill_all(model, self._places.values(), self._dtype)
        if any(place.decoded for place in self._places.values()):
            model.tie_weights(recompute_mapping=False)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Replace packed layers by ordinary layers with decoded weights."""
        for place in self._places.values():
            module = model.get_submodule(place.name)
            if not isinstance(module, CodedLinear | PackedLinear):
                continue
            values = module.weight if dtype is None else module.weight.to(dtype)
            values = values.T.contiguous() if type(place.module) is Conv1D else values
            place.module.register_parameter("weight", nn.Parameter(values, requires_grad=False))
            place.module.register_parameter("bias", module.bias)
            model.set_submodule(place.name, place.module.eval())
        for parameter in model.parameters():  # buffers keep their dtype: frequencies, complex numbers
            if dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        return model
