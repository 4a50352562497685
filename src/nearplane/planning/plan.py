"""Bit budget of each layer: its width on fixed grids, or its rate where codes are entropy-coded.

The budget is planned once before the quantization; bits that one block leaves over go to the blocks after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from nearplane.calibration.sensitivity import sensitivity, sensitivity_windows
from nearplane.calibration.states_on_disk import Keep
from nearplane.errors import RecipeError
from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.table import FORMATS
from nearplane.lattice.moments import Moments
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.number_formats import TYPES
from nearplane.planning.allocate import (
    MIN_RATE,
    Curve,
    allocate,
    allocate_choices,
    allocate_widths,
    probed_rates,
    probed_widths,
    sum_of,
)
from nearplane.planning.folder_size import Choice, budget_of
from nearplane.planning.perturb import Perturbations, to_rates, to_types, to_widths
from nearplane.planning.probe import Extent, extent, probe
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import Scheme
from nearplane.recipe.schemes import MEASURED_TYPES, AnyScheme, BlockScheme, GridScheme, RateScheme
from nearplane.system.device import Device
from nearplane.system.progress import Progress

POINTS = 3  # widths or types that are measured of each layer, about
Measure = Callable[[Perturbations], list[Curve]]
"""Function like `probe`, applied to the model and tokens of the run."""
MAX_CARRYOVER = 0.02  # largest relative deviation from a planned rate, to absorb surplus or excess of earlier blocks


@dataclass(slots=True, kw_only=True)
class Plan:
    """Bit budget of each layer.

    Args:
        widths: Bits per code by layer, on fixed grids of different widths; None if all layers have their scheme's width.
        types: Types of blocks by layer, if they were chosen by measuring.
        rates: Bits per weight by layer, with every byte counted; empty on fixed grids.
        sensitivity: (out,) sensitivity of the network to errors of each output, by layer; may be empty.
        together: (rows, rows) moments of gradients for each run of rows, by layer with joined rows; see `Sensitivity`.
        moments: Substitute for second moments of inputs, for embeddings, which have no inputs; see `Sensitivity`.
        to_come: Number of weights of each layer that is not quantized yet.
        bounds: Lowest and highest rate that a layer may be moved to; None: within `MAX_CARRYOVER` of its planned rate.
    """

    widths: dict[str, int] | None = None
    types: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, Tensor] = field(default_factory=dict)
    together: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    to_come: dict[str, int] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    _left: float = 0.0  # bits that the layers so far have left over
    _shift: float = 0.0  # bits per weight by which rates currently differ from the plan

    def state(self) -> dict[str, Any]:
        """Return all but the tensors and the bounds as JSON, for `restored`."""
        return {name: getattr(self, name) for name in ("widths", "types", "rates", "to_come", "_left", "_shift")}

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return the tensors, for `restored`."""
        moments = {name: each.H for name, each in self.moments.items()}
        return {"sensitivity": self.sensitivity, "together": self.together, "moments": moments}

    @classmethod
    def restored(cls, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]], tokens: int) -> Plan:
        """Return the plan with this state and these tensors, which was made with so many tokens of text."""
        return cls(
            sensitivity=dict(tensors["sensitivity"]),
            together={name: tuple(runs) for name, runs in tensors["together"].items()},
            moments={name: Moments(H=H, tokens=tokens) for name, H in tensors["moments"].items()},
            **state,
        )

    def scheme_of(self, layer: Layer, scheme: AnyScheme) -> AnyScheme:
        """Return the scheme with the layer's own number of bits."""
        return scheme.with_bits((self.widths or {}).get(layer.name))

    def settle(self, bits: float | None = None) -> None:
        """Distribute surplus or excess bits over the remaining layers. Call it before a block.

        Rates are fixed within a block, so its layers do not depend on each other's sizes; the last block absorbs the rest.

        Args:
            bits: Total bits of the remaining layers; None: the sum of their planned rates.
        """
        if not self.to_come:
            return
        if bits is not None:
            self._left = bits - sum(self.rates[name] * weights for name, weights in self.to_come.items())
        self._shift = self._left / sum(self.to_come.values())

    def move(self, bits: float, layers: Iterable[Layer]) -> bool:
        """Change the rates by `bits` per weight until `settle`; return whether a rate of these layers changes."""
        before = [self.rate(layer) for layer in layers]
        self._shift += bits
        return before != [self.rate(layer) for layer in layers]

    def rate(self, layer: Layer) -> float:
        """Return the present rate of a layer in bits per weight."""
        asked = self.rates[layer.name]
        least, most = self.bounds or (asked - MAX_CARRYOVER * asked, asked + MAX_CARRYOVER * asked)
        return min(max(most, asked), max(min(least, asked), asked + self._shift))

    def spend(self, layer: Layer, size: int) -> None:
        """Note the bytes that a layer took in the file."""
        if self.rates:
            self._left += self.rates[layer.name] * self.to_come.pop(layer.name) - 8 * size


def plan(
    model: Model,
    recipe: Recipe,
    tokens: Tensor | None,
    device: Device,
    progress: Progress,
    *,
    free: Choice | None = None,
    keep: Keep = list,
) -> Plan:
    """Plan the bit budget of each layer, by measuring the network if the recipe asks for it.

    Args:
        model: The model to quantize.
        recipe: Recipe with the rate or width, and its allocation.
        tokens: (windows, seqlen) calibration tokens; None if nothing is measured.
        device: Device of the computation.
        progress: Function that wraps the iterator over blocks of the probe.
        free: Layers whose types of llama.cpp are chosen by measuring, and their budget.
        keep: Function that makes the lists of hidden states of the probe.

    Raises:
        RecipeError: The rate or size cannot be met.
    """
    planned, measure = Plan(), None
    if tokens is not None:
        measure_sensitivity(planned, model, recipe.scheme, tokens, device)
        measure = partial(probe, model, tokens, device=device.place, keep=keep, progress=progress)
    match recipe.scheme:
        case RateScheme() as scheme:
            _plan_rates(planned, model, recipe, scheme, measure)
        case BlockScheme() as scheme if free is not None and measure is not None:
            planned.types = _types(model, scheme, free, measure)
        case GridScheme() as scheme if recipe.allocate == "slope":
            assert measure is not None, "widths are allocated by measuring, which needs tokens"
            planned.widths = _widths(model, recipe, scheme, measure)
    if tokens is not None and (joined_names := joined_layers(model, recipe)):
        dtype = device.compute_dtype(model.dtype)
        planned.together = sensitivity(model, tokens, device=device.place, dtype=dtype, together=joined_names).together
    return planned


def expected_work(model: Model, recipe: Recipe, tokens: Tensor) -> tuple[Extent | None, int]:
    """Return the work that `plan` is going to do: the extent of the probe or None, and tokens of the backward pass or 0.

    Args:
        model, recipe: Arguments of `plan`.
        tokens: (windows, seqlen) calibration tokens.
    """
    match scheme := recipe.scheme:
        case RateScheme():
            points = int(_probes_rates(model, recipe, budget_of(model, recipe, scheme)))
        case BlockScheme():
            points = POINTS if scheme.mixed else 0
        case GridScheme():
            points = POINTS if recipe.allocate == "slope" else 0
    joined = bool(joined_layers(model, recipe))
    needs_backward = scheme.weighs_rows or joined or (model.embeddings is not None and scheme.calibrated)
    backward = sensitivity_windows(model, tokens, joined=joined) * tokens.shape[1] if needs_backward else 0
    return extent(model, tokens, points) if points and any(block.layers for block in model.blocks) else None, backward


def _probes_rates(model: Model, recipe: Recipe, budget: float) -> bool:
    """Return whether rates of layers are allocated by measuring."""
    return recipe.allocate != "uniform" and budget > MIN_RATE and any(block.layers for block in model.blocks)


def joined_layers(model: Model, recipe: Recipe) -> set[str]:
    """Return the names of the layers whose rows compensate each other's errors."""
    names = (layer.name for block in model.blocks for layer in block.layers)
    return {name for name in names if recipe.scheme_of(name).joins_rows}


def _plan_rates(planned: Plan, model: Model, recipe: Recipe, scheme: RateScheme, measure: Measure | None) -> None:
    """Plan a rate for every layer, `--rate` on average, higher where the network is more sensitive."""
    budget = budget_of(model, recipe, scheme)
    fixed = {
        layer.name: asked[0]
        for layer in model.layers
        if (asked := recipe.scheme_of(layer.name).asked) is not None and asked != scheme.asked
    }
    planned.rates = dict.fromkeys((layer.name for layer in model.layers), budget) | fixed
    planned.to_come = {layer.name: math.prod(layer.shape) for layer in model.layers}
    if measure is not None and _probes_rates(model, recipe, budget):
        perturb = replace(to_rates(probed_rates(budget), scheme), sensitivity=planned.sensitivity)
        curves = [curve for curve in measure(perturb) if not fixed.keys() & set(curve.layers)]
        planned.rates |= allocate(curves, budget)  # embeddings and head are not probed and keep the mean


def measure_sensitivity(planned: Plan, model: Model, scheme: Scheme, tokens: Tensor, device: Device) -> None:
    """Measure the effect of errors on the network by a backward pass, for rows of layers and columns of embeddings."""
    rows = scheme.weighs_rows
    columns = model.embeddings is not None and scheme.calibrated
    if not rows and not columns:
        return
    measured = sensitivity(model, tokens, device=device.place, dtype=device.compute_dtype(model.dtype))
    planned.sensitivity = measured.outputs if rows else {}
    if model.embeddings is not None and columns and measured.embeddings is not None:
        planned.moments[model.embeddings.name] = Moments(H=measured.embeddings, tokens=tokens.numel())


def moments_of_embeddings(model: Model, scheme: Scheme, tokens: Tensor | None, device: Device) -> dict[str, Moments]:
    """Return the substitute for second moments of embeddings that `plan` measures; empty if they are not quantized."""
    planned = Plan()
    if model.embeddings is not None and tokens is not None:
        measure_sensitivity(planned, model, scheme, tokens, device)
    return planned.moments


def check_budget(model: Model, recipe: Recipe) -> None:
    """Refuse layers that the format cannot hold, and a rate or size that cannot be met.

    Raises:
        RecipeError: A layer or the budget is not possible; the message names the layer or the possible range.
    """
    match recipe.scheme:
        case GridScheme() if recipe.allocate != "uniform":
            if recipe.layers:
                raise RecipeError(
                    "--layer sets the scheme of some layers, but --allocate slope chooses the bits of every layer. Leave out one."
                )
            usable_widths(model, recipe)
            return
        case RateScheme() as scheme:
            budget_of(model, recipe, scheme)
    check_layers(model, recipe)


def check_layers(model: Model, recipe: Recipe, bits: int | None = None) -> None:
    """Raise RecipeError if a layer cannot be stored by its scheme, or with these bits."""
    for layer in model.layers:
        format = recipe.scheme_of(layer.name).with_bits(bits).number_format
        FORMATS[str(recipe.format)].layers.check(layer.name, layer.shape, layer.kind, format)


def usable_widths(model: Model, recipe: Recipe) -> list[int]:
    """Return the widths that the format has for all layers; if there are none, raise the format's error."""
    usable: list[int] = []
    widths = recipe.files.bits
    for bits in widths:
        with suppress(RecipeError):
            check_layers(model, recipe, bits)
            usable.append(bits)
    if not usable:
        check_layers(model, recipe, widths[0])  # raises the format's error
    return usable


def _widths(model: Model, recipe: Recipe, scheme: GridScheme, measure: Measure) -> dict[str, int]:
    """Return a width for every layer, `--bits` on average in blocks, larger where the network is more sensitive.

    Embeddings and head get the largest width within the average.
    """
    usable = usable_widths(model, recipe)
    probed = probed_widths(scheme.bits, usable)
    curves = measure(to_widths(probed, scheme, FORMATS[str(recipe.format)].layers.scale_dtype(model.dtype)))
    routed = {layer.name for layer in model.layers if layer.routed}
    expert_curves = [curve for curve in curves if routed.issuperset(curve.layers)]
    if expert_curves:  # readers of fixed grids have one grid for all experts
        curves = [*(curve for curve in curves if not routed.issuperset(curve.layers)), sum_of(expert_curves)]
    ends = [layer.name for part in (model.embeddings, model.head) if part is not None for layer in part.layers]
    blocks = [curve for curve in curves if not set(ends) & set(curve.layers)]
    widths = allocate_widths(blocks, scheme.bits, [bits for bits in usable if bits >= probed[0]])
    return widths | dict.fromkeys(ends, max(bits for bits in usable if bits <= scheme.bits))


def _types(model: Model, scheme: BlockScheme, free: Choice, measure: Measure) -> dict[str, str]:
    """Return a type for every layer of `free`, its budget on average, larger where the network is more sensitive."""
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
