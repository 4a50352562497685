"""How the folder of an original model says that its weights are stored, and the reader that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nearplane.errors import ModelError
from nearplane.system.files import read_object
from nearplane.system.fp8_mxfp4 import CODES, OWN_SCALE, SCALE, WidenedReader, form_of, weights_of
from nearplane.system.paths import RECORD
from nearplane.system.safetensors_files import ShardReader, TensorInfo, TensorReader

DENSE = {"F64", "F32", "F16", "BF16", "BOOL", "I64"}  # dtypes of weights and buffers of a model that is not quantized
METHODS = ("fp8", "mxfp4")
MODELOPT_FILE = "hf_quant_config.json"  # by which older versions of ModelOpt describe weights, instead of config.json
MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")  # its algorithms with 8-bit floats
CT = "compressed-tensors"


def section_of(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return what a model's folder says about the storage of its weights: an object, or None.

    Args:
        folder: Folder of the model.
        config: Contents of its config.json.
    """
    section = config.get("quantization_config")
    if section is None and (folder / MODELOPT_FILE).is_file():
        content = read_object(folder / MODELOPT_FILE, expected="ModelOpt writes one. Fetch it again", error=ModelError)
        section = {"quant_method": "modelopt"} | dict(content.get("quantization") or {})
    return section


def method_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the entry of `METHODS` that stores the weights of an original model, or None; see `section_of`.

    A checkpoint of nearplane, which has a run record, is no original.
    """
    section = section_of(folder, config)
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not isinstance(method, str) or (folder / RECORD).is_file():
        return None
    if method == "fbgemm_fp8" or (method == "modelopt" and section.get("quant_algo") in MODELOPT_FP8):
        return "fp8"
    if method == CT and not section.get("transform_config"):
        groups = section.get("config_groups")
        kinds = [weights_of(group) for group in (groups.values() if isinstance(groups, Mapping) else ())]
        if kinds and all((kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds):
            return "fp8"
    return method if method in METHODS else None


def refuse_leftover(folder: Path, section: Any, infos: Iterable[TensorInfo]) -> None:
    """Refuse a model whose config says that it is quantized, and whose weights are not.

    Args:
        folder: Folder of the model.
        section: What it says, see `section_of`.
        infos: Descriptions of its tensors as they are stored.

    Raises:
        ModelError: No tensor is stored in few bits.
    """
    dtypes = {info.dtype for info in infos}
    if section is not None and dtypes and dtypes <= DENSE:
        raise ModelError(
            f"{folder}: quantization_config says {form_of(section)}, but every tensor is stored as {' or '.join(sorted(dtypes))}. "
            f"If these are the model's own weights, delete that entry of config.json, or {MODELOPT_FILE} if it is there; else "
            f"fetch the folder again."
        )


def source_reader(folder: Path, config: Mapping[str, Any]) -> TensorReader:
    """Return a reader of the tensors of an original model, which decodes weights in 8 or 4 bits.

    Args:
        folder: Folder of safetensors files.
        config: Contents of its config.json.

    Raises:
        ModelError: The folder cannot be read, or a weight and its factors do not match.
    """
    reader, section, method = ShardReader(folder), section_of(folder, config), method_of(folder, config)
    if method is not None:
        refuse_leftover(folder, section, reader.infos.values())
        return WidenedReader(reader, method, section)
    if section is None:
        for name, info in reader.infos.items():
            if info.dtype in CODES and (factors := {name + OWN_SCALE, name + SCALE} & reader.infos.keys()):
                raise ModelError(
                    f"{folder}: {name} is stored as {info.dtype} with factors {factors.pop()}, but config.json has no "
                    f"quantization_config, so that programs would leave them out. Fetch config.json again."
                )
    return reader
