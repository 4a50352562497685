"""Weights that config.json ties and the files hold apart, or the reverse: the tensors decide, as when transformers loads them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nearplane.errors import ModelError
from nearplane.models.conversion import renamed
from nearplane.system.model_files import TIED
from nearplane.system.safetensors_files import TensorReader

logger = logging.getLogger(__name__)


def believe_tensors(network: PreTrainedModel, reader: TensorReader) -> None:
    """Give tied weights with different values in the files a parameter each, and say so in the network's config.

    Args:
        network: The empty network as config.json describes it; changed in place.
        reader: Reader of the weight files.

    Raises:
        ModelError: The head is not tied, and not in the files.
    """
    stored = {new: name for name, new in renamed(network, reader.names()).items()}  # by name in the network
    for target, source in [*network.all_tied_weights_keys.items()]:
        one, other = stored.get(target), stored.get(source)
        if one is None or other is None or reader.same(one, other):
            continue
        path, _, name = target.rpartition(".")
        setattr(network.get_submodule(path), name, nn.Parameter(torch.empty_like(network.get_parameter(source))))
        del network.all_tied_weights_keys[target]
        logger.warning(
            f"{reader.folder}: config.json ties {target} to {source}, but the files hold other values for each. The files are "
            f"believed, as by transformers."
        )
        if not network.all_tied_weights_keys:  # else encoder and decoder share other weights by this field
            for config in _configs(network):
                setattr(config, TIED, False)
    _check_head(network, reader, stored)


def _configs(network: PreTrainedModel) -> Iterator[Any]:
    """Yield the config of a network, and of its language model if that has its own."""
    config: Any = network.config
    yield from (each for each in (config, getattr(config, "text_config", None)) if getattr(each, TIED, False))


def _check_head(network: PreTrainedModel, reader: TensorReader, stored: dict[str, str]) -> None:
    """Refuse a head that is neither tied nor in the files."""
    head = network.get_output_embeddings()
    path = next((name for name, module in network.named_modules() if module is head), None)
    if not path or not isinstance(weight := getattr(head, "weight", None), nn.Parameter):
        return
    tied = f"{path}.weight" in network.all_tied_weights_keys or weight is network.get_input_embeddings().weight
    if not tied and not any(name.startswith(f"{path}.") for name in stored):
        raise ModelError(
            f"{reader.folder}: the files lack {path}.weight, and {TIED} of config.json is false: transformers would predict with "
            f"random numbers. If embeddings and head are one matrix, set it to true; else fetch the folder again."
        )
