"""What a run measures before its first layer: nothing where the recipe says all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import save_part_of_the_demo
from nearplane.models.model import open_model
from nearplane.planning.plan import allocates
from nearplane.planning.request import resolved
from nearplane.recipe.recipe import Recipe


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ({}, True),
        ({"down_proj": {"rate": 4}}, True),
        ({".*": {"solver": "nearest-plane"}}, True),  # other options leave the rate open
        ({".*": {"rate": 4}}, False),
        ({"self_attn": {"rate": 4}, "mlp": {"rate": 2.5}}, False),
    ],
)
def test_rates_are_measured_unless_every_layer_has_its_own(
    layers: dict[str, Any], chosen: bool, tmp_path: Path
) -> None:
    model = open_model(str(save_part_of_the_demo(tmp_path / "model")))
    assert allocates(model, resolved(model, Recipe.from_spellings(rate=3, layers=layers))) == chosen
