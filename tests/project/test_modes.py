"""The losses that `nearplane suggest` names are those of the measured rows."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import nearplane
from nearplane.planning.modes import ENERGY, KL_OF_4_BITS, MODES, Mode
from nearplane.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rows", ROOT / "benchmarks" / "quality" / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rows", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.words)
def test_a_loss_is_the_mean_over_models_of_what_was_measured(mode: Mode, rows: ModuleType) -> None:
    """To the two digits that are printed."""
    measured = rows.where(rows.read(ROOT / "docs" / "results" / "tables.jsonl"), tool="nearplane")
    of_mode = [row | {"setting": "4"} for row in rows.where(measured, setting=mode.setting)]
    ratios = [each.value for each in rows.paired(rows.where(measured, setting="4"), of_mode).values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    figures = tuple(float(f"{value:.2g}") for value in (mean, min(ratios), max(ratios)))
    assert (*figures, len(ratios)) == tuple(mode.loss)


def test_what_4_bits_lose_is_the_mean_over_published_networks(rows: ModuleType) -> None:
    """To two digits; the control, which has noise added to its weights, does not count."""
    measured = rows.read(ROOT / "docs" / "results" / "real-models.jsonl")
    of_4_bits = rows.where(measured, tool="nearplane", setting="4", samples=64)
    means = []
    for model in ("smollm2", "gemma3"):
        of_model = [row["kl"] for row in rows.where(of_4_bits, model=model)]
        means.append(sum(of_model) / len(of_model))
    assert float(f"{sum(means) / len(means):.2g}") == KL_OF_4_BITS


@pytest.mark.parametrize("name", ENERGY)
def test_the_energy_that_a_type_loses_is_that_of_normal_weights(name: str) -> None:
    """To two digits."""
    scheme = Recipe.from_spellings(grid=name, solver="round-to-nearest").scheme
    W = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    matrix, _ = nearplane.quantize_matrix(W, torch.eye(1024, dtype=torch.float64), scheme)
    lost = float((W - matrix.decode()).square().sum() / W.square().sum())
    assert ENERGY[name] == pytest.approx(lost, rel=0.03)


def test_every_mode_is_a_recipe_of_its_own() -> None:
    recipes = [Recipe.from_spellings(**mode.options) for mode in MODES]
    assert len({recipe.to_json() for recipe in recipes}) == len(MODES)
