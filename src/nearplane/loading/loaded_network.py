"""Networks that transformers loads from a folder with all weights, and how they generate text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from nearplane.errors import ModelError
from nearplane.models.pretrained import (
    GENERATION,
    as_model_error,
    builder_of,
    empty_network,
    is_installed,
    without_bars,
)
from nearplane.system.files import read_object
from nearplane.system.paths import INDEX, WEIGHTS_FILE

logger = logging.getLogger(__name__)

# settings of generation_config.json that belong to the model; others are for sampling, or stop a text early
TOKEN_SETTINGS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
)  # fmt: skip
CPU = torch.device("cpu")
GPTQ_READERS = "pip install optimum gptqmodel"  # packages with which transformers loads GPTQ


def network_of(
    folder: Path,
    *,
    dtype: torch.dtype | str,
    device: torch.device = CPU,
    weights: dict[str, Tensor] | None = None,
    empty: PreTrainedModel | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the language model of a folder, or the encoder, with all weights.

    On another device than the CPU each weight is sent as it is read, if accelerate is installed, which transformers needs
    for that; else the whole network is read first, and then sent.

    Args:
        folder: The folder of the model.
        dtype: Dtype of the loaded weights; "auto" is the dtype in config.json.
        device: Device of the loaded weights.
        weights: {name: tensor} in place of the weights in the folder; None: transformers reads the folder.
        empty: The network from `empty_network`, if it was built already.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ModelError: transformers cannot load the network, or would fill missing weights with random numbers.
    """
    empty = empty or empty_network(folder, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if device.type != "cpu" and is_installed("accelerate"):
        options["device_map"] = {"": device}
    elif device.type != "cpu":
        logger.warning(
            "%s is read into main memory before it is sent to %s. To send each weight as it is read, run pip install accelerate",
            folder,
            device,
        )
    with without_bars(), as_model_error(f"transformers cannot load a language model from {folder}{_needs(folder)}"):
        if weights is None:
            options["trust_remote_code"] = trust_remote_code
            if (name := _other_name(folder)) is not None:  # which a reader of the tensors takes, too
                options["config"] = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
                options["config"].transformers_weights = name
            model, report = builder_of(empty.config).from_pretrained(folder, **options)
        else:
            model, report = type(empty).from_pretrained(None, config=empty.config, state_dict=weights, **options)
            if model.can_generate() and (folder / GENERATION).is_file():  # transformers looks beside weight files alone
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    missing = sorted({*report["missing_keys"], *(str(name) for name, *_ in report["mismatched_keys"])})
    if missing:
        raise ModelError(
            f"{folder}: the weight files lack {len(missing)} of the weights that config.json describes, first "
            f"{missing[0]}; they would be random numbers. These files do not belong together. Fetch the folder again."
        )
    model.config.return_dict = True  # as in `_built`
    return model.to(device).eval()


def _other_name(folder: Path) -> str | None:
    """Return the name of the only weight file of a folder, if it is not the usual one; see `ShardReader`."""
    names = [path.name for path in folder.glob("*.safetensors")]
    return names[0] if len(names) == 1 and names[0] != WEIGHTS_FILE and not (folder / INDEX).exists() else None


def _needs(folder: Path) -> str:
    """Return the packages that transformers needs to load the quantized weights, as part of a sentence."""
    plain = read_object(folder / "config.json", expected="Every model's folder has one", error=ModelError)
    config = plain.get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == "gptq":
        return f"; to load its gptq weights packed, run {GPTQ_READERS}"
    return ""


@contextmanager
def only_token_settings(model: PreTrainedModel) -> Iterator[None]:
    """Let `model.generate` take nothing but `TOKEN_SETTINGS` from generation_config.json within the context, as llama.cpp does."""
    before = model.generation_config
    kept = {name: value for name in TOKEN_SETTINGS if (value := getattr(before, name, None)) is not None}
    model.generation_config = transformers.GenerationConfig(**kept)
    try:
        yield
    finally:
        model.generation_config = before
