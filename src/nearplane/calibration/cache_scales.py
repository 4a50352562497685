"""Scales of a key-value cache in 8-bit floats: measured while a network is quantized, applied while it is evaluated.

A server stores keys, behind their rotary embedding, and values as E4M3 numbers, divided by one scale each for a layer:
`scale * e4m3(x / scale)`. vLLM reads the scales from the checkpoint, and takes 1.0 where there are none. Here networks get a
cache that keeps nothing and passes on what it is shown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from nearplane.calibration.recorder import Call
from nearplane.errors import CalibrationError, FormatError, ModelError, RecipeError
from nearplane.models.kinds import has_head, has_two_stacks
from nearplane.models.model import Block, Model
from nearplane.system.ranks import Ranks

ATTENTION = "self_attn"  # name of the modules whose scales vLLM looks for
NAMES = ("cache", "past_key_values")  # of the argument of blocks and networks: of transformers 5.24, and before
LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)

Pair = tuple[Tensor, Tensor]  # of keys and of values


class Passing(DynamicCache):  # type: ignore[misc]
    """A cache that keeps nothing: attention computes with what a function makes of keys and values.

    Args:
        change: Function from number of a layer, keys and values to what attention is to use.
    """

    def __init__(self, change: Callable[[int, Tensor, Tensor], Pair]) -> None:
        super().__init__()
        self._change = change

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> Pair:
        """Return the keys and values of all tokens so far, of which these are the first."""
        return self._change(layer_idx, key_states, value_states)


class CacheRange:
    """Largest magnitudes of keys and values in the quantized network, block by block.

    A batch that passes a block several times counts as it did the last time, with the weights that are written.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, dict[int, Tensor]] = {}

    def watched(self, block: str, batch: int, call: Call) -> Call:
        """Return a call of a block with a batch, in which keys and values are looked at.

        Raises:
            CalibrationError: The block takes no cache.
        """
        peaks = self._peaks.setdefault(block, {})

        def look(_: int, keys: Tensor, values: Tensor) -> Pair:
            with torch._C.DisableTorchFunction():  # what looks at a pass is no result of it
                peaks[batch] = torch.stack([keys.abs().max(), values.abs().max()])
            return keys, values

        return with_cache(call, block, Passing(look))

    def scales(self, block: str, ranks: Ranks) -> tuple[float, float] | None:
        """Return the scales of keys and values of a block over the windows of all ranks; None if it kept none."""
        peaks = [*self._peaks.pop(block, {}).values()]
        own = torch.stack(peaks).amax(0).tolist() if peaks else [0.0, 0.0]
        largest = [max(each) for each in zip(*ranks.gather(own), strict=True)]
        if not any(largest):
            return None
        keys, values = (peak / LARGEST if peak else 1.0 for peak in largest)
        return keys, values


class RoundedCaches:
    """Keys and values rounded as a server keeps them, in a network whose blocks are called one by one.

    Args:
        scales: Scales of keys and of values by the number of the layer; layers without have 1.0, as in vLLM.
    """

    def __init__(self, scales: Mapping[int, Pair]) -> None:
        self._cache = rounding_cache(scales)

    def watched(self, block: str, batch: int, call: Call) -> Call:
        """Return a call of a block in which keys and values are rounded."""
        del batch
        return with_cache(call, block, self._cache)


def with_cache(call: Call, block: str, cache: Passing) -> Call:
    """Return a call of a block with this cache.

    Raises:
        CalibrationError: The block takes no cache.
    """
    if (name := next((each for each in NAMES if each in call.kwargs), None)) is None:
        raise CalibrationError(f"{block} takes no {NAMES[0]} of keys and values. Leave out --kv-cache.")
    return replace(call, kwargs=call.kwargs | {name: cache})


def cache_argument(network: nn.Module) -> str:
    """Return the name of the argument by which a network takes a cache.

    Raises:
        ModelError: It takes none.
    """
    taken = inspect.signature(network.forward).parameters
    if (name := next((each for each in NAMES if each in taken), None)) is None:
        raise ModelError(f"{type(network).__name__} takes no {NAMES[0]} of keys and values. Leave out --kv-cache.")
    return name


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return keys or values (windows, heads, tokens, width) as they come back from a cache in E4M3.

    Args:
        x: The numbers; larger ones than the cache holds are cut.
        scale: (1,) or (heads,) scale.
    """
    scale = scale.to(x.device).float().view(1, -1, 1, 1)
    codes = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def rounding_cache(scales: Mapping[int, Pair]) -> Passing:
    """Return a cache that rounds keys and values; see `RoundedCaches`."""

    def change(layer: int, keys: Tensor, values: Tensor) -> Pair:
        of_keys, of_values = scales.get(layer, (torch.ones(1), torch.ones(1)))
        return rounded(keys, of_keys), rounded(values, of_values)

    return Passing(change)


def cache_tensors(scales: Mapping[str, tuple[float, float]]) -> dict[str, Tensor]:
    """Return the tensors of the scales of keys and values, by the names that vLLM reads."""
    return {
        f"{name}.{letter}_scale": torch.tensor([scale], dtype=torch.float32)
        for name, pair in scales.items()
        for letter, scale in zip("kv", pair, strict=True)
    }


def scales_by_layer(network: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[int, Pair]:
    """Return the scales of keys and values by the number of the layer.

    Args:
        network: The network; it may be without weights.
        tensors: Scales by name in the files: `model.layers.0.self_attn.k_scale`.

    Raises:
        FormatError: A scale is missing beside the other one, or is no positive number.
    """
    heads = getattr(network.config.get_text_config(), "num_key_value_heads", 1)
    places = {
        _tail(name): module.layer_idx
        for name, module in network.named_modules()
        if name.endswith(f".{ATTENTION}") and hasattr(module, "layer_idx")
    }
    found: dict[int, Pair] = {}
    for stem in dict.fromkeys(name.rpartition(".")[0] for name in tensors if name.endswith((".k_scale", ".v_scale"))):
        if (place := places.get(_tail(stem))) is None:
            continue
        found[place] = _scale(tensors, f"{stem}.k_scale", heads), _scale(tensors, f"{stem}.v_scale", heads)
    return found


def _scale(tensors: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """Return a scale, checked."""
    scale = tensors.get(name)
    if scale is None or scale.numel() not in (1, heads) or not bool(((scale > 0) & scale.isfinite()).all()):
        found = "missing" if scale is None else scale.flatten()[:4].tolist()
        raise FormatError(
            f"{name} is {found}, expected a positive number, or one for each of {heads} heads. Fetch the folder again."
        )
    return scale


def _tail(name: str) -> str:
    """Return the parts of a name that files and networks have in common: layers.0.self_attn."""
    return ".".join(name.split(".")[-3:])


def check_cache(network: PreTrainedModel) -> None:
    """Refuse a network in which a server would find no scales of a cache, or that keeps other states besides.

    Raises:
        RecipeError: The message says why.
    """
    name = type(network).__name__
    if has_two_stacks(network) or not has_head(network):
        raise RecipeError(f"{name} is no decoder alone and has no such cache. Leave out --kv-cache.")
    config = network.config.get_text_config()
    if getattr(config, "kv_lora_rank", None) is not None:
        raise RecipeError(
            f"{name} caches the inputs of its keys and values, whose scales are not measured yet. Leave out --kv-cache."
        )
    if other := set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }:
        raise RecipeError(
            f"{name} has layers of type {min(other)}, which keep other states than keys and values: scales of such networks are "
            f"not measured yet. Leave out --kv-cache."
        )
    if not any(place.endswith(f".{ATTENTION}") for place, _ in network.named_modules()):
        raise RecipeError(f"{name} has no module {ATTENTION}, where vLLM looks for scales. Leave out --kv-cache.")
    cache_argument(network)


def cache_name(model: Model, block: Block) -> str:
    """Return the name under which the files have the attention of a block, which has one.

    Raises:
        RecipeError: They call it otherwise.
    """
    attention = getattr(block.empty, ATTENTION, None)
    if not isinstance(attention, nn.Module):
        raise RecipeError(f"{block.name} has no module {ATTENTION}, where vLLM looks for scales. Leave out --kv-cache.")
    parameter = next(iter(dict(attention.named_parameters())))
    stored = model.weights.written_name(f"{block.name}.{ATTENTION}.{parameter}")
    path, found, _ = stored.partition(f".{ATTENTION}.")
    if not found:
        raise RecipeError(
            f"The files have {stored}, not {ATTENTION}, where vLLM looks for scales. Leave out --kv-cache."
        )
    return f"{path}.{ATTENTION}"
