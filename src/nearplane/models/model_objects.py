"""Model objects: saved to a temporary folder and read from there like any model, with their weights as they act.

A compiled part, a parametrization or a pruning mask gives a weight another name; transformers would save it under that
name and find it missing afterwards. What takes part in the computation beside these weights, such as adapters, is refused.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import ModelError, first_few, first_line
from nearplane.models.pretrained import GENERATION, as_model_error, without_bars

COMPILED = "_orig_mod."  # in the names of what torch.compile has wrapped
PARAMETRIZED = ".parametrizations."  # in the names of what torch.nn.utils.parametrize has wrapped


def acting_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of a model object by the names that its class has; weights may share memory only if they are tied.

    Raises:
        ModelError: Adapters are not merged, the tensors are not those that the class and the config describe, or one is not
            finite.
    """
    kind = type(model).__name__
    adapted = [name.replace(COMPILED, "") for name, module in model.named_modules() if hasattr(module, "base_layer")]
    if adapted:
        raise ModelError(
            f"The {kind} passed as model has adapters of peft that are not merged, first in {adapted[0]}. Merge them: pass what "
            f"merge_and_unload() of the PeftModel returns."
        )
    with as_model_error(f"The config of the {kind} passed as model does not describe a {kind}"), torch.device("meta"):
        described = type(model)(copy.deepcopy(model.config))
    expected, weights = described.state_dict(), dict[str, Tensor]()
    faults = list(_unused(model, expected.keys()))
    for name, like in expected.items():
        found = reduce(lambda part, each: getattr(part, each, None), name.split("."), model)
        if not isinstance(found, Tensor):
            faults.append(f"it lacks {name}")
        elif found.shape != like.shape:
            faults.append(f"{name} is {tuple(found.shape)}, not {tuple(like.shape)}")
        elif like.is_floating_point() and (not found.is_floating_point() or found.itemsize == 1):
            raise ModelError(f"The {kind} passed as model is already quantized, first {name}. Pass the original model.")
        elif not bool(torch.isfinite(found).all()):
            raise ModelError(f"The {kind} passed as model has NaN or Inf in {name}. Load it again, or repair it.")
        else:
            weights[name] = found.detach()
    if faults:
        raise ModelError(
            f"The {kind} passed as model is not what its config describes: {first_few(faults, 2, '; ')}. Merge or remove what was "
            f"added to it, or change its config with it."
        )
    firsts = _firsts(expected)  # value heads and the like are not among them
    beside = {name: tensor for name, tensor in model.state_dict().items() if name.partition(".")[0] not in firsts}
    return _apart(weights | beside, getattr(model, "all_tied_weights_keys", None) or {})


def _firsts(names: Iterable[str]) -> set[str]:
    """Return the first parts of dotted names."""
    return {name.partition(".")[0] for name in names}


def _unused(model: PreTrainedModel, expected: Collection[str]) -> Iterator[str]:
    """Yield a fault for every parameter of which no expected weight is made, except in parts beside the network."""
    firsts = _firsts(expected)
    for name, _ in model.named_parameters():
        plain = name.replace(COMPILED, "")
        if plain in expected or PARAMETRIZED in name or plain.partition(".")[0] not in firsts:
            continue
        owner, own = name.rpartition(".")[0], f"{plain.rpartition('.')[0]}."
        stored = model.get_submodule(owner)._parameters
        if all(key.removeprefix(own) in stored for key in expected if key.startswith(own)):  # else pruned, by a mask
            yield f"{plain} is not part of its class"


def _apart(weights: dict[str, Tensor], tied: Collection[str]) -> dict[str, Tensor]:
    """Return the weights with copies of those that share memory with others, except tied ones."""
    seen = set[int]()
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        if place in seen and name not in tied:
            weights[name] = tensor.clone()
        seen.add(place)
    return weights


@contextmanager
def as_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[str]:
    """Save a model object to a temporary folder, perhaps with a tokenizer; yield its path.

    Raises:
        ModelError: The object is not a model that transformers can save, or not what its config describes.
    """
    packed = any(getattr(module, "holds_codes", False) for module in model.modules())
    if packed or getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ModelError(f"The {type(model).__name__} passed as model is already quantized. Pass the original model.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"The {type(model).__name__} passed as model has weights on the meta device, or offloaded by accelerate. "
            f"Pass the folder from which it was loaded."
        )
    weights = acting_weights(model)
    with tempfile.TemporaryDirectory(prefix="nearplane-") as place:
        with without_bars(), as_model_error(f"transformers cannot save the {type(model).__name__} passed as model"):
            try:
                _save(model, weights, Path(place))
                if tokenizer is not None:
                    tokenizer.save_pretrained(place)
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"The {type(model).__name__} passed as model could not be saved to {place} ({first_line(error)}). Free some "
                    f"space there, or choose another folder (TMPDIR)."
                ) from error
        yield place


def _save(model: PreTrainedModel, weights: dict[str, Tensor], place: Path) -> None:
    """Save a model object with these weights, and its generation config as it is, which transformers may call invalid."""
    saved = copy.copy(model)  # transformers changes the config that it saves
    saved.config = copy.deepcopy(model.config)
    settings = getattr(model, "generation_config", None)
    if model.can_generate():
        saved.generation_config = GenerationConfig()
    saved.save_pretrained(place, state_dict=weights)
    (place / GENERATION).unlink(missing_ok=True)
    if settings is not None:
        settings.to_json_file(place / GENERATION, keys_to_pop=["compile_config"])


def check_model(model: object) -> PreTrainedModel:
    """Return a model object; refuse anything but a transformers model.

    Raises:
        ModelError: The object is not a PreTrainedModel.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model is a {type(model).__name__}; expected a folder, a hub id or a PreTrainedModel of transformers. For adapters "
            f"or compiled modules, pass the model inside: merge_and_unload(), _orig_mod."
        )
    return model
