"""Loading what a run is going to write, before it is written: transformers' own loader on tensors without contents.

The network is built on the meta device, the reader of the format puts its layers into it, and every tensor that will be written,
as shape and dtype alone, goes through the renaming and merging that transformers has for the model. What does not find its place,
what finds none, and what fails on the way is a `Fault`. Nothing is read from the disk.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from textwrap import shorten
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer

from nearplane.errors import first_line
from nearplane.loading.gptq_rules import Described, GPTQByRule
from nearplane.models.model import Model

SAYS_SO = ("transformers", "compressed_tensors")  # loggers that are quiet meanwhile: what they would say is returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that would not load.

    Args:
        place: name of a module in the network; "" where no place is to blame.
        why: what is wrong with it, a clause.
        late: whether all tensors have found their places, and what fails comes after: a program that reads them with a loader of
            its own is not stopped by it.
    """

    place: str
    why: str
    late: bool = False


def faults(model: Model, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Fault]:
    """Return what transformers would not load.

    Args:
        model: the original.
        config: quantization_config of config.json, of compressed-tensors or GPTQ.
        tensors: all tensors that will be written, on the meta device.
    """
    shared = {id(part): part for part in model.configs()}
    network: PreTrainedModel = deepcopy(model.network, dict(shared))
    with quiet():
        try:
            reader = reader_of(config)
            reader.validate_environment(device_map=None, weights_only=True)
            reader.preprocess_model(model=network, dtype=model.dtype, device_map=None, checkpoint_files=None)
            found = list(_load(model, network, reader, tensors))
        except Exception as error:  # of compressed-tensors and transformers, which raise what they like
            return [Fault(place="", why=shorten(first_line(error), 160))]
        return found + list(_initialised(network))


def reader_of(config: Mapping[str, Any]) -> HfQuantizer:
    """Return the reader of a format: that of transformers, for GPTQ one that follows its rules."""
    if config["quant_method"] == "gptq":
        return GPTQByRule(Described(config), pre_quantized=True)
    return AutoHfQuantizer.from_config(deepcopy(dict(config)), pre_quantized=True)


def _load(
    model: Model, network: PreTrainedModel, reader: HfQuantizer, tensors: Mapping[str, Tensor]
) -> Iterator[Fault]:
    """Put tensors into a network and say what did not fit."""
    plan = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=model.dtype,
        hf_quantizer=reader,
        weight_mapping=get_model_conversion_mapping(network, None, reader),
    )
    found, _ = convert_and_load_state_dict_in_model(network, dict(tensors), plan)
    network.mark_tied_weights_as_initialized(found)
    network._adjust_missing_and_unexpected_keys(found)
    for name, why in found.conversion_errors.items():
        last = [line for line in why.splitlines() if line.strip()]
        yield Fault(place=_module(name), why=f"its tensors are not put together ({last[-2] if len(last) > 1 else why})")
    for name, shape, wanted in sorted(found.mismatched_keys):
        yield Fault(place=_module(name), why=f"{name} is {tuple(shape)}, {tuple(wanted)} is expected")
    tied = network.all_tied_weights_keys
    for name in sorted(found.missing_keys):
        if name not in tied and not model.weights.lacks(name) and name not in found.conversion_errors:
            yield Fault(place=_module(name), why=f"it looks for {name}, which no file has")
    for name in sorted(found.unexpected_keys & tensors.keys()):
        if name not in model.reader.names():
            yield Fault(place=_module(name), why=f"it has no place for {name}")


def _initialised(network: PreTrainedModel) -> Iterator[Fault]:
    """Let every module set what was not loaded, as the loader does at the end, and say which quantized layers it misses.

    Some set weights of the layers in them, which quantized layers do not have.
    """
    names = {module: name for name, module in network.named_modules()}

    def walk(module: nn.Module, owner: PreTrainedModel) -> Iterator[Fault]:
        for child in module.children():
            yield from walk(child, child if isinstance(child, PreTrainedModel) else owner)
        try:
            owner._initialize_weights(module, network.is_custom_code())
        except AttributeError as error:
            missing = _last_self(error.__traceback__)
            if missing in names:
                yield Fault(
                    place=names[missing], why=f"{type(module).__name__} sets its weight, which is packed", late=True
                )
        except Exception:  # of code that looks into tensors, which have no contents here
            return

    with torch.no_grad(), guard_torch_init_functions():
        yield from walk(network, network)


def _last_self(trace: TracebackType | None) -> Any:
    """Return the object in whose method an error was raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_locals.get("self")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and progress bars of the loaders from the terminal."""
    loggers = [logging.getLogger(name) for name in SAYS_SO]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
