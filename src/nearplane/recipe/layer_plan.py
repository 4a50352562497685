"""What is decided of every layer of a model: one table by name, which `resolved` makes and `plan` completes. No torch.

The patterns of a recipe are what was asked. They are looked at once, when the table is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nearplane.number_formats import InputRounding, NumberFormat
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import AnyScheme

Numbers = Any  # a tensor, of which a recipe knows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What is decided of one layer.

    Args:
        scheme: Options of its solver, with its own bits, groups or type of blocks.
        measured: Whether its number format is chosen by measuring.
        inputs: How runtimes round its inputs; None: they do not.
        rate: Bits per weight with every byte counted; None on fixed grids.
        max_loss: Upper limit of the relative loss of entropy-coded weights; None: no limit.
        sensitivity: (out,) sensitivity of the network to errors of each output; None: equal.
        positions: Weights of positions in a window, see `calibration/positions.py`; None: equal.
    """

    scheme: AnyScheme
    measured: bool = False
    inputs: InputRounding | None = None
    rate: float | None = None
    max_loss: float | None = None
    sensitivity: Numbers | None = None
    positions: Numbers | None = None

    @property
    def number_format(self) -> NumberFormat:
        """Number format of the layer's weights."""
        return self.scheme.number_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is decided of a run.

    Args:
        recipe: The recipe, with group sizes and the number of windows settled for the model.
        layers: What is decided of every quantized layer, by name.
        moments: Substitutes for the second moments of inputs by name, for embeddings, which have no inputs.
    """

    recipe: Recipe
    layers: Mapping[str, LayerPlan]
    moments: Mapping[str, Numbers] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe, names: Iterable[str]) -> Plan:
        """Return the plan of layers as a recipe asks; its patterns are looked at here alone.

        Args:
            recipe: The recipe, with settled group sizes.
            names: Names of all layers to quantize.
        """
        schemes = {name: recipe.scheme_of(name) for name in names}
        layers = {
            name: LayerPlan(
                scheme=scheme, measured=scheme.measured, inputs=recipe.inputs_of(name), max_loss=recipe.max_loss
            )
            for name, scheme in schemes.items()
        }
        return cls(recipe=recipe, layers=layers)

    @property
    def formats(self) -> dict[str, NumberFormat]:
        """Number format of every layer, by name."""
        return {name: layer.number_format for name, layer in self.layers.items()}

    @property
    def positions(self) -> dict[str, Numbers]:
        """Weights of positions of the layers that have some, by name."""
        return {name: layer.positions for name, layer in self.layers.items() if layer.positions is not None}

    def stored_in(self, formats: Mapping[str, NumberFormat]) -> Plan:
        """Return the plan with these number formats of layers, by name."""
        layers = dict(self.layers)
        for name, format in formats.items():
            layers[name] = replace(layers[name], scheme=layers[name].scheme.stored_in(format))
        return replace(self, layers=layers)
