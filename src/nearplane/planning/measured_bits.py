"""Bits, rates and types of layers, chosen by what each costs the network, which is measured before the first layer.

`allocate.py` divides the budget by the curves; `ledger.py` passes bits that one block leaves over on to the blocks after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from nearplane.formats.gguf.mixes import fitting
from nearplane.formats.table import FORMATS
from nearplane.models.model import Model
from nearplane.number_formats import TYPES, BlockType, NumberFormat
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
from nearplane.planning.perturb import Perturbations, to_rates, to_types, to_widths
from nearplane.planning.size_budget import Choice, budget_of
from nearplane.recipe.block_scheme import MEASURED_TYPES
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import GridScheme

Measure = Callable[[Perturbations], list[Curve]]

"""Function like `probe`, applied to the model and tokens of the run."""


def probes_rates(model: Model, recipe: Recipe, budget: float) -> bool:
    """Return whether rates of layers are allocated by measuring."""
    return recipe.allocate != "uniform" and budget > MIN_RATE and any(block.layers for block in model.blocks)


def measured_rates(
    model: Model, settled: Plan, rows: Mapping[str, Tensor], measure: Measure | None
) -> dict[str, float]:
    """Return a rate for every layer, `--rate` on average, higher where the network is more sensitive."""
    budget, scheme = budget_of(model, settled.recipe), settled.recipe.scheme
    fixed = {
        name: asked[0]
        for name, each in settled.layers.items()
        if (asked := each.scheme.asked) is not None and asked != scheme.asked
    }
    rates = dict.fromkeys(settled.layers, budget) | fixed
    if measure is not None and probes_rates(model, settled.recipe, budget):
        curves = measure(replace(to_rates(probed_rates(budget), scheme), sensitivity=rows))
        curves = [curve for curve in curves if not fixed.keys() & set(curve.layers)]
        rates |= allocate(curves, budget)  # embeddings and head are not probed and keep the mean
    return rates


def measured_widths(
    model: Model, scheme: GridScheme, format: str, usable: Sequence[int], measure: Measure
) -> dict[str, NumberFormat]:
    """Return integers of some width for every layer, `--bits` on average in blocks, more where the network is more sensitive.

    Embeddings and head get the largest width within the average.

    Args:
        model, scheme, format: The model, and scheme and format of its recipe.
        usable: Widths that the format has for all layers.
        measure: Function that measures the curves.
    """
    probed = probed_widths(scheme.bits, usable)
    curves = measure(to_widths(probed, scheme, FORMATS[format].layers.scale_dtype(model.dtype)))
    routed = {layer.name for layer in model.layers if layer.routed}
    expert_curves = [curve for curve in curves if routed.issuperset(curve.layers)]
    if expert_curves:  # readers of fixed grids have one grid for all experts
        curves = [*(curve for curve in curves if not routed.issuperset(curve.layers)), sum_of(expert_curves)]
    ends = [layer.name for part in (model.embeddings, model.head) if part is not None for layer in part.layers]
    blocks = [curve for curve in curves if not set(ends) & set(curve.layers)]
    widths = allocate_widths(blocks, scheme.bits, [bits for bits in usable if bits >= probed[0]])
    widths |= dict.fromkeys(ends, max(bits for bits in usable if bits <= scheme.bits))
    formats = {bits: replace(scheme, bits=bits).number_format for bits in usable}
    return {name: formats[bits] for name, bits in widths.items()}


def measured_types(model: Model, free: Choice, measure: Measure) -> dict[str, BlockType]:
    """Return a type for every layer of `free`, its budget on average, larger where the network is more sensitive."""
    rates = {TYPES[name].rate: name for name in MEASURED_TYPES}
    probed = probed_widths(free.budget, list(rates))
    columns = {layer.name: layer.shape[1] for layer in model.layers}
    curves = measure(to_types([rates[rate] for rate in probed], free.scheme))
    curves = [curve for curve in curves if free.layers.issuperset(curve.layers)]
    names = [rates[rate] for rate in rates if rate >= probed[0]]
    usable = [[fitting(name, columns[curve.layers[0]]) for name in names] for curve in curves]
    chosen = allocate_choices(curves, free.budget, [sorted({kind.rate for kind in kinds}) for kinds in usable])
    return free.ends | {
        layer: next(kind for kind in kinds if kind.rate == rate)
        for curve, kinds, rate in zip(curves, usable, chosen, strict=True)
        for layer in curve.layers
    }
