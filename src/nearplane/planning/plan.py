"""What every layer may take: its width on fixed grids, or its rate where codes are entropy-coded, so that the budget is met.

Made once before the quantization; while it runs, bits that one block leaves over go to those after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from nearplane.calibration.sensitivity import sensitivity, windows_of_the_pass
from nearplane.errors import RecipeError
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.table import FORMATS
from nearplane.lattice.moments import Moments
from nearplane.lattice.number_formats import TYPES
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.allocate import (
    LOW,
    Curve,
    allocate,
    allocate_choices,
    allocate_widths,
    probed_rates,
    probed_widths,
    sum_of,
)
from nearplane.planning.folder_size import Free, budget_of
from nearplane.planning.perturb import Perturbations, to_rates, to_types, to_widths
from nearplane.planning.probe import Extent, extent, probe
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import MEASURED_TYPES, AnyScheme, BlockScheme, GridScheme, RateScheme
from nearplane.system.device import Device
from nearplane.system.progress import Progress

POINTS = 3  # widths or types that are tried of a layer, about
Measure = Callable[[Perturbations], list[Curve]]
"""What `probe` finds on the model and the tokens at hand."""
SWAY = 0.02  # of its rate, by which a layer takes up what the blocks before it left over or took too much


@dataclass(slots=True, kw_only=True)
class Plan:
    """What every layer may take.

    Args:
        widths: bits of the codes by layer, on fixed grids whose widths differ; None where they do not.
        types: of blocks by layer, where they were chosen by measuring.
        rates: bits per weight by layer, every byte counted; empty on fixed grids.
        sensitivity: (out,) how much the network minds errors of a layer's outputs, by layer; may be empty.
        together: what errors of a layer's outputs cost together, by layer whose rows make up for each other's; see `Sensitivity`.
        moments: what stands for the second moments of the inputs of layers that have none: of embeddings, see `Sensitivity`.
        to_come: number of weights of the layers that are still to be quantized.
        bounds: least and highest rate that a layer may be moved to; None: `SWAY` off its own.
    """

    widths: dict[str, int] | None = None
    types: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, Tensor] = field(default_factory=dict)
    together: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    to_come: dict[str, int] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    _left: float = 0.0  # bits that layers so far have left over
    _shift: float = 0.0  # bits per weight by which rates differ from those planned, until settled anew

    def state(self) -> dict[str, Any]:
        """Return as JSON all but the tensors, for `restored`, and the bounds."""
        return {name: getattr(self, name) for name in ("widths", "types", "rates", "to_come", "_left", "_shift")}

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return the tensors, for `restored`."""
        moments = {name: each.H for name, each in self.moments.items()}
        return {"sensitivity": self.sensitivity, "together": self.together, "moments": moments}

    @classmethod
    def restored(cls, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]], tokens: int) -> Plan:
        """Return the plan of which these are state and tensors, made with so many tokens."""
        return cls(
            sensitivity=dict(tensors["sensitivity"]),
            together={name: tuple(runs) for name, runs in tensors["together"].items()},
            moments={name: Moments(H=H, tokens=tokens) for name, H in tensors["moments"].items()},
            **state,
        )

    def scheme_of(self, layer: Layer, scheme: AnyScheme) -> AnyScheme:
        """Return the scheme with the layer's own width."""
        return scheme.with_bits((self.widths or {}).get(layer.name))

    def settle(self, bits: float | None = None) -> None:
        """Spread what the layers so far left over, or took too much, over all that are still to come. Call it before a block.

        Within a block rates stay, so that its layers do not depend on each other's sizes; the last block absorbs what is left.

        Args:
            bits: that these may take together; None: those of the rates planned.
        """
        if not self.to_come:
            return
        if bits is not None:
            self._left = bits - sum(self.rates[name] * weights for name, weights in self.to_come.items())
        self._shift = self._left / sum(self.to_come.values())

    def move(self, bits: float, layers: Iterable[Layer]) -> bool:
        """Change the rates by `bits` per weight until settled anew; returns whether that changes one of these layers'."""
        before = [self.rate(layer) for layer in layers]
        self._shift += bits
        return before != [self.rate(layer) for layer in layers]

    def rate(self, layer: Layer) -> float:
        """Return what the layer should take now, in bits per weight."""
        asked = self.rates[layer.name]
        least, most = self.bounds or (asked - SWAY * asked, asked + SWAY * asked)
        return min(max(most, asked), max(min(least, asked), asked + self._shift))

    def spend(self, layer: Layer, size: int) -> None:
        """Note the bytes that a layer took."""
        if self.rates:
            self._left += self.rates[layer.name] * self.to_come.pop(layer.name) - 8 * size


def plan(
    model: Model, recipe: Recipe, tokens: Tensor | None, device: Device, progress: Progress, *, free: Free | None = None
) -> Plan:
    """Decide what every layer may take, by measuring the network where the recipe asks for it.

    Args:
        model: to be quantized.
        recipe: rate or width, how to allocate it.
        tokens: (windows, seqlen) for calibration; None where nothing is measured.
        device: where to compute.
        progress: wraps the iterator over blocks of the probe.
        free: what is free where layers get types of llama.cpp.

    Raises:
        RecipeError: the rate or size cannot be met.
    """
    planned, measure = Plan(), None
    if tokens is not None:
        look(planned, model, recipe.scheme, tokens, device)
        measure = partial(probe, model, tokens, device=device.place, progress=progress)
    match recipe.scheme:
        case RateScheme() as scheme:
            _give_rates(planned, model, recipe, scheme, measure)
        case BlockScheme() as scheme if free is not None and measure is not None:
            planned.types = _types(model, scheme, free, measure)
        case GridScheme() as scheme if recipe.allocate == "slope":
            assert measure is not None, "widths are allocated by measuring"
            planned.widths = _widths(model, recipe, scheme, measure)
    if tokens is not None and (joined := joined_layers(model, recipe)):
        dtype = device.compute_dtype(model.dtype)
        planned.together = sensitivity(model, tokens, device=device.place, dtype=dtype, together=joined).together
    return planned


def foreseen_probe(model: Model, recipe: Recipe, tokens: Tensor) -> tuple[Extent | None, int]:
    """Return how much `plan` is going to measure: by perturbing layers, None if not, and tokens of the pass back, 0 without one.

    Args:
        model, recipe: as for `plan`.
        tokens: (windows, seqlen) for calibration.
    """
    match scheme := recipe.scheme:
        case RateScheme():
            points = int(_probes_rates(model, recipe, budget_of(model, recipe, scheme)))
        case BlockScheme():
            points = POINTS if scheme.mixed else 0
        case GridScheme():
            points = POINTS if recipe.allocate == "slope" else 0
    joined = bool(joined_layers(model, recipe))
    back = scheme.weighs_rows or joined or (model.embeddings is not None and scheme.calibrated)
    passed = windows_of_the_pass(model, tokens, joined=joined) * tokens.shape[1] if back else 0
    return extent(model, tokens, points) if points and any(block.layers for block in model.blocks) else None, passed


def _probes_rates(model: Model, recipe: Recipe, budget: float) -> bool:
    """Return whether the rates of layers are allocated by measuring."""
    return recipe.allocate != "uniform" and budget > LOW and any(block.layers for block in model.blocks)


def joined_layers(model: Model, recipe: Recipe) -> set[str]:
    """Return the names of the layers whose rows make up for each other's errors."""
    names = (layer.name for block in model.blocks for layer in block.layers)
    return {name for name in names if recipe.scheme_of(name).joins_rows}


def _give_rates(planned: Plan, model: Model, recipe: Recipe, scheme: RateScheme, measure: Measure | None) -> None:
    """Give every layer a rate, more where the network needs it; `--rate` on average."""
    budget = budget_of(model, recipe, scheme)
    own = {
        layer.name: asked[0]
        for layer in model.layers
        if (asked := recipe.scheme_of(layer.name).asked) is not None and asked != scheme.asked
    }
    planned.rates = dict.fromkeys((layer.name for layer in model.layers), budget) | own
    planned.to_come = {layer.name: math.prod(layer.shape) for layer in model.layers}
    if measure is not None and _probes_rates(model, recipe, budget):
        perturb = replace(to_rates(probed_rates(budget), scheme), sensitivity=planned.sensitivity)
        curves = [curve for curve in measure(perturb) if not own.keys() & set(curve.layers)]
        planned.rates |= allocate(curves, budget)  # embeddings and head, which are not probed, keep the mean


def look(planned: Plan, model: Model, scheme: Scheme, tokens: Tensor, device: Device) -> None:
    """Measure by one backward pass what errors cost the network, for rows of all layers and for columns of embeddings."""
    rows = scheme.weighs_rows
    columns = model.embeddings is not None and scheme.calibrated
    if not rows and not columns:
        return
    measured = sensitivity(model, tokens, device=device.place, dtype=device.compute_dtype(model.dtype))
    planned.sensitivity = measured.outputs if rows else {}
    if model.embeddings is not None and columns and measured.embeddings is not None:
        planned.moments[model.embeddings.name] = Moments(H=measured.embeddings, tokens=tokens.numel())


def moments_of_embeddings(model: Model, scheme: Scheme, tokens: Tensor | None, device: Device) -> dict[str, Moments]:
    """Return what stands for the second moments of the inputs of embeddings, as `plan` measured it; empty if they stay."""
    planned = Plan()
    if model.embeddings is not None and tokens is not None:
        look(planned, model, scheme, tokens, device)
    return planned.moments


def check_budget(model: Model, recipe: Recipe) -> None:
    """Refuse layers that the format cannot hold, and a rate or size that cannot be had.

    Raises:
        RecipeError: names the layer, or what can be had.
    """
    match recipe.scheme:
        case GridScheme() if recipe.allocate != "uniform":
            if recipe.layers:
                raise RecipeError(
                    "--layer gives layers schemes of their own, --allocate slope gives every layer a width: leave out one of them."
                )
            usable_widths(model, recipe)
            return
        case RateScheme() as scheme:
            budget_of(model, recipe, scheme)
    check_layers(model, recipe)


def check_layers(model: Model, recipe: Recipe, bits: int | None = None) -> None:
    """Raise RecipeError if some layer cannot be stored by its scheme, or at a width."""
    for layer in model.layers:
        format = recipe.scheme_of(layer.name).with_bits(bits).number_format
        FORMATS[str(recipe.format)].layers.check(layer.name, layer.shape, layer.kind, format)


def usable_widths(model: Model, recipe: Recipe) -> list[int]:
    """Return the widths that the format has for all layers; raise as the format does if there are none."""
    usable: list[int] = []
    widths = FORMATS[str(recipe.format)].layers.BITS
    for bits in widths:
        with suppress(RecipeError):
            check_layers(model, recipe, bits)
            usable.append(bits)
    if not usable:
        check_layers(model, recipe, widths[0])  # says why
    return usable


def _widths(model: Model, recipe: Recipe, scheme: GridScheme, measure: Measure) -> dict[str, int]:
    """Give every layer a width, more where the network needs it; `--bits` on average."""
    usable = usable_widths(model, recipe)
    probed = probed_widths(scheme.bits, usable)
    curves = measure(to_widths(probed, scheme, FORMATS[str(recipe.format)].layers.scale_dtype(model.dtype)))
    routed = {layer.name for layer in model.layers if layer.routed}
    alike = [curve for curve in curves if routed.issuperset(curve.layers)]
    if alike:  # readers of fixed grids have one grid for all experts
        curves = [*(curve for curve in curves if not routed.issuperset(curve.layers)), sum_of(alike)]
    return allocate_widths(curves, scheme.bits, [bits for bits in usable if bits >= probed[0]])


def _types(model: Model, scheme: BlockScheme, free: Free, measure: Measure) -> dict[str, str]:
    """Give every layer in blocks whose type is free one of more bits where the network needs it; the budget on average."""
    rates = {TYPES[name].rate: name for name in MEASURED_TYPES}
    probed = probed_widths(free.budget, list(rates))
    columns = {layer.name: layer.shape[1] for layer in model.layers}
    curves = measure(to_types([rates[rate] for rate in probed], scheme))
    curves = [curve for curve in curves if free.layers.issuperset(curve.layers)]
    names = [rates[rate] for rate in rates if rate >= probed[0]]
    usable = [[fitting(name, columns[curve.layers[0]]) for name in names] for curve in curves]
    chosen = allocate_choices(curves, free.budget, [sorted({kind.rate for kind in kinds}) for kinds in usable])
    return free.ends | {
        layer: next(kind.name for kind in kinds if kind.rate == rate)
        for curve, kinds, rate in zip(curves, usable, chosen, strict=True)
        for layer in curve.layers
    }
