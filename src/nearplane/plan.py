"""What every layer may take: its width on fixed grids, or its rate where codes are entropy-coded, so that the budget is met.

Made once before the quantization; while it runs, bits that one block leaves over go to those after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from nearplane.allocate import (
    LOW,
    allocate,
    allocate_widths,
    probe,
    probed_rates,
    probed_widths,
    to_rates,
    to_widths,
)
from nearplane.certificate import PROFILED
from nearplane.errors import RecipeError
from nearplane.formats.beside import names_copied, size_copied
from nearplane.formats.folder import FORMATS, config_text
from nearplane.formats.native import Native
from nearplane.models.layers import Layer
from nearplane.models.sensitivity import sensitivity
from nearplane.models.statistics import Statistics
from nearplane.models.stream import Model
from nearplane.recipe import Rate, Recipe, Rule
from nearplane.record import WIDE, LayerRecord, Profile, RunRecord, row_groups
from nearplane.shards import index_text

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
HUFFMAN = 1.1  # bits per weight that a Huffman coder needs at least
SWAY = 0.02  # of its rate, by which a layer takes up what the blocks before it left over or took too much


@dataclass(slots=True, kw_only=True)
class Plan:
    """What every layer may take.

    Args:
        widths: bits of the codes by layer, on fixed grids whose widths differ; None where they do not.
        rates: bits per weight by layer, every byte counted; empty on fixed grids.
        sensitivity: (out,) how much the network minds errors of a layer's outputs, by layer; may be empty.
        moments: what stands for the second moments of the inputs of layers that have none: of embeddings, see `Sensitivity`.
        to_come: weights of the layers that are still to be quantized.
    """

    widths: dict[str, int] | None = None
    rates: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Statistics] = field(default_factory=dict)
    to_come: int = 0
    _left: float = 0.0  # bits that layers so far have left over
    _shift: float = 0.0  # bits per weight by which rates differ from those planned, until settled anew

    def rule(self, rule: Rule, layer: Layer) -> Rule:
        """Return the rule with the layer's own width."""
        return rule if self.widths is None else replace(rule, bits=self.widths[layer.name])

    def settle(self) -> None:
        """Spread what the layers so far left over, or took too much, over all that are still to come. Call it before a block.

        Within a block rates stay, so that its layers do not depend on each other's sizes; the last block absorbs what is left.
        """
        self._shift = self._left / self.to_come if self.to_come else 0.0

    def rate(self, layer: Layer) -> float:
        """Return what the layer should take now, in bits per weight."""
        asked = self.rates[layer.name]
        return asked + min(SWAY * asked, max(-SWAY * asked, self._shift))

    def spend(self, layer: Layer, size: int) -> None:
        """Note the bytes that a layer took."""
        if self.rates:
            weights = math.prod(layer.shape)
            self._left += self.rates[layer.name] * weights - 8 * size
            self.to_come -= weights


def plan(model: Model, recipe: Recipe, tokens: Tensor | None, device: torch.device, progress: Progress) -> Plan:
    """Decide what every layer may take, by measuring the network where the recipe asks for it.

    Args:
        model: to be quantized.
        recipe: rate or width, how to allocate it.
        tokens: (windows, seqlen) for calibration; None where nothing is measured.
        device: where to compute.
        progress: wraps the iterator over blocks of the probe.

    Raises:
        RecipeError: the rate or size cannot be met.
    """
    if not recipe.rate.wanted:
        return Plan() if recipe.allocate == "uniform" else Plan(widths=_widths(model, recipe, tokens, device, progress))
    budget = budget_of(model, recipe)
    planned = Plan(
        rates=dict.fromkeys((layer.name for layer in model.layers), budget),
        to_come=sum(math.prod(layer.shape) for layer in model.layers),
    )
    if tokens is not None:
        look(planned, model, recipe, tokens, device)
    probed, low = any(block.layers for block in model.blocks), _least(recipe.rate)
    if recipe.allocate == "uniform" or tokens is None or budget <= low or not probed:
        return planned
    rates = probed_rates(budget)
    curves = probe(
        model, tokens, to_rates(rates, recipe.rule), points=len(rates), together=False, device=device,
        progress=progress,
    )  # fmt: skip
    planned.rates |= allocate(curves, budget, low=low)  # embeddings and head, which are not probed, keep the mean
    return planned


def look(planned: Plan, model: Model, recipe: Recipe, tokens: Tensor, device: torch.device) -> None:
    """Measure by one backward pass what errors cost the network, for rows of all layers and for columns of embeddings."""
    rows = recipe.rate.method == "waterfill" and recipe.rate.rows == "sensitivity"
    columns = model.embeddings is not None and recipe.rule.solver != "round-to-nearest"
    if not rows and not columns:
        return
    measured = sensitivity(model, tokens, device=device, dtype=torch.float32 if device.type == "cpu" else model.dtype)
    planned.sensitivity = measured.outputs if rows else {}
    if model.embeddings is not None and columns and measured.embeddings is not None:
        planned.moments[model.embeddings.name] = Statistics(H=measured.embeddings, tokens=tokens.numel())


def budget_of(model: Model, recipe: Recipe) -> float:
    """Return the bits per quantized weight that the recipe leaves.

    Raises:
        RecipeError: the size leaves more or fewer than can be had, or the rate is less than the side information of small layers.
    """
    layers = model.layers
    weights = sum(math.prod(layer.shape) for layer in layers)
    rate, size = recipe.rate.rate, recipe.rate.bytes()
    if size is not None:
        rest = _rest(model, recipe)
        rate = 8 * (size - rest) / weights
        smallest, largest = (rest + math.ceil(bits * weights / 8) for bits in (0.5, 7))
        if not 0.5 <= rate <= 7:
            raise RecipeError(
                f"--size {recipe.rate.size} is {size:,} bytes, of which {rest:,} are not quantized: {rate:.2f} bits are left for "
                f"each of {weights:,} weights. Ask for {smallest:,} to {largest:,} bytes (0.5 to 7 bits per weight)."
            )
    assert rate is not None, "a plan for rates needs a rate or a size"
    if rate < _least(recipe.rate):
        raise RecipeError(
            f"{rate:.3f} bits per weight asked for; a Huffman code takes at least one bit for every code. Use --coder tans, or "
            f"ask for {HUFFMAN} bits or more."
        )
    least = 8 * sum(_side(layer, recipe.rate) for layer in layers) / weights
    if rate < least:
        raise RecipeError(
            f"{rate:.3f} bits per weight asked for; what is stored beside the codes of such small layers takes {least:.3f}. "
            f"Ask for more than that, use --method hptq, or leave small layers out with --ignore."
        )
    return rate


def check_bits(model: Model, recipe: Recipe, bits: float) -> None:
    """Raise RecipeError if some layer cannot be stored at this width."""
    rule = recipe.rule
    for layer in model.layers:
        FORMATS[recipe.format].check(
            layer.name, layer.shape, layer.kind,
            bits=bits, group_size=rule.group_size, symmetric=rule.symmetric, permuted=False,
        )  # fmt: skip


def usable_widths(model: Model, recipe: Recipe) -> list[int]:
    """Return the widths that the format has for all layers; raise as the format does if there are none."""
    usable: list[int] = []
    refused: RecipeError | None = None
    for bits in FORMATS[recipe.format].BITS:
        try:
            check_bits(model, recipe, bits)
            usable.append(bits)
        except RecipeError as error:
            refused = refused or error
    if not usable and refused is not None:
        raise refused
    return usable


def _widths(
    model: Model, recipe: Recipe, tokens: Tensor | None, device: torch.device, progress: Progress
) -> dict[str, int]:
    """Give every layer a width, more where the network needs it; `--bits` on average."""
    assert tokens is not None, "widths are allocated by measuring"
    usable = usable_widths(model, recipe)
    probed = probed_widths(recipe.rule.bits, usable)
    perturb = to_widths(probed, recipe.rule, FORMATS[recipe.format].scale_dtype(model.dtype))
    curves = probe(model, tokens, perturb, points=len(probed), together=True, device=device, progress=progress)
    return allocate_widths(curves, recipe.rule.bits, [bits for bits in usable if bits >= probed[0]])


def _least(rate: Rate) -> float:
    """Return the least rate that a layer may get."""
    return HUFFMAN if rate.coder == "huffman" else LOW


def _side(layer: Layer, rate: Rate) -> float:
    """Return about the fewest bytes that a layer takes beside its codes: a header, and where steps differ their exponents."""
    return 16 if rate.method == "hptq" else 16 + 3 * layer.shape[1] / 8


def _rest(model: Model, recipe: Recipe) -> int:
    """Return the bytes of the folder that are not the quantized layers' tensors.

    Exact are all other tensors, config.json and what is copied; the files' headers, the index and the record to some digits.
    """
    layers, reader = model.layers, model.reader
    again = {name for layer in layers for name in model.copies(layer)}  # also tied ones, which are not written twice
    sizes = {name: reader.nbytes(name) for name in reader.names() if name not in again}
    entries: dict[str, tuple[str, tuple[int, ...]]] = {name: (reader.dtype(name), reader.shape(name)) for name in sizes}
    entries |= {
        f"{model.written_name(each.name)}.{Native.KEY}": ("U8", (math.prod(each.shape) // 3,)) for each in layers
    }
    entries[f"{model.written_name(layers[0].name)}.{Native.STOP}"] = ("U8", (0,))
    shards = len(model.blocks) + 1
    middle = sum(map(reader.nbytes, reader.names())) // (8 * shards)  # of a file, about: has the digits of most offsets
    headers = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": (middle, middle)}
        for name, (dtype, shape) in entries.items()
    }
    config = Native(coder=recipe.rate.coder, classes=recipe.rate.classes).quantization_config(
        quantized=[layer.name for layer in layers], version=version("nearplane")
    )
    texts = (
        json.dumps(headers, separators=(",", ":")),
        index_text(
            dict.fromkeys(entries, f"model-00001-of-{shards:05d}.safetensors"), dict.fromkeys(entries, 8 * "0"), 10**7
        ),
        config_text(model.folder, config),
        _record(model, recipe).to_json(),
    )
    return (
        sum(sizes.values())
        + sum(len(text.encode()) for text in texts)
        + shards * (8 + 4 + len('{"__metadata__":{"format":"pt"}}'))
        + size_copied(model.folder, trust_remote_code=model.trust_remote_code)
    )


def _record(model: Model, recipe: Recipe) -> RunRecord:
    """Return a record as long as that of a run, on average."""
    little, middling, large = 1.234567890123456e-05, 0.012345678901234567, 2.345678901234567
    records = tuple(
        LayerRecord(
            name=layer.name, out_features=layer.shape[0], in_features=layer.shape[1], loss=little, relative_loss=middling,
            row_losses=(1.23456789e-05,) * row_groups(*layer.shape), damped_loss=little, correction=large, damp=0.01, dead=0,
            tokens=10**5, order=recipe.rule.order, seconds=middling, nearest_loss=little, worst_case=little, expected=little,
            gamma=large, sweep_damp=0.1, asked=large, base=middling, entropy=large, limit=large,
            bytes=math.prod(layer.shape) // 3, stored=layer.name, checksum=64 * "0",
        )
        for layer in model.layers
    )  # fmt: skip
    packages = ("python", "nearplane", "torch", "transformers", "numba", "safetensors")
    chosen = {0, len(model.blocks) // 2, len(model.blocks) - 1} if recipe.rule.solver != "round-to-nearest" else set()
    inputs = [
        layer.name for index in chosen for layer in model.blocks[index].layers[:4] if layer.shape[1] <= WIDE
    ]  # about four inputs a block
    profiles = tuple(
        Profile(layer=name, order="activation", lengths=(0.123456,) * 32, trace=large, spread=middling)
        for name in inputs
        for _ in PROFILED
    )
    files = [f"model-{n:05d}-of-{n:05d}.safetensors" for n in range(len(model.blocks) + 1)] + [
        "config.json", "model.safetensors.index.json", *names_copied(model.folder, trust_remote_code=model.trust_remote_code),
    ]  # fmt: skip
    return RunRecord(
        recipe=recipe, source=str(model.folder), versions=dict.fromkeys(packages, "0.00.0"), device="cpu", windows=256,
        seqlen=2048, tokens=10**5, text=64 * "0", layers=records, profiles=profiles, skipped=tuple(model.skipped),
        seconds=large, bytes=10**7, folder=10**7, files=dict.fromkeys(files, 64 * "0"), digest=64 * "0",
    )  # fmt: skip
