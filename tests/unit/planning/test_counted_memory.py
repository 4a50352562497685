"""The bound of a GPU's memory beside the bytes that are counted on a pretended one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import nearplane
from families import config_of, random_model
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.sensitivity import sensitivity
from nearplane.calibration.stages import try_blocks
from nearplane.calibration.windows import Windows
from nearplane.lattice import kernels
from nearplane.models.model import open_model
from nearplane.planning import forecast
from nearplane.planning.divergences import divergences
from nearplane.planning.estimates import estimated
from nearplane.planning.forecast import Planned, shapes_of
from nearplane.planning.memory_bound import bound
from nearplane.planning.parts import Extent, Parts
from nearplane.planning.request import resolved
from nearplane.planning.roundings import Rounded
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.system.device import Device
from pretended import pretended

GRID = dict(bits=4, group_size=32, rounds=0, polish=0)
FEW = {"intermediate_size": 512}  # few tokens for so many inputs: solving takes most
MANY = {"intermediate_size": 128}


@pytest.fixture
def planned(monkeypatch):
    """Return the list of what the forecasts of runs chose."""
    chosen: list[Planned] = []
    choose = forecast.within_limits

    def noted(*args: Any) -> Planned | None:
        found = choose(*args)
        assert found is not None
        chosen.append(found)
        return found

    monkeypatch.setattr(forecast, "within_limits", noted)
    monkeypatch.setattr(
        kernels, "GPU", replace(kernels.GPU, span=64)
    )  # as few beside these layers as it is beside real ones
    return chosen


def counted(folder, planned, windows, seqlen, config, dtype=torch.float32, **options) -> tuple[int, Any]:
    """Quantize a random model; return the most bytes that were on the device, and the bound."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)
    model = random_model(config_of("llama", num_hidden_layers=1, **(sizes | config)))
    model.to(dtype).save_pretrained(folder / "model")
    tokens = torch.randint(96, (windows, seqlen), generator=torch.Generator().manual_seed(0))
    with pretended() as gpu:
        nearplane.quantize(folder / "model", folder / "out", calibration=tokens, device="pretend:0", **options)
    return gpu.peak, planned[0].bounds[0]


@pytest.mark.parametrize(
    ("windows", "seqlen", "config", "options", "while_", "states"),
    [
        pytest.param(64, 64, MANY, GRID, "running a block", "device", id="many tokens"),
        pytest.param(36, 16, FEW, GRID | {"dtype": torch.bfloat16}, "solving a layer", "device", id="few tokens"),
        pytest.param(
            256, 32, MANY, GRID | {"device_memory": "4.8MB", "positions": "equal"}, "running a block", "host",
            id="states on the host", marks=pytest.mark.nightly,
        ),
        pytest.param(24, 16, MANY, {"rate": 3.0}, "solving a layer", "device", id="a rate", marks=pytest.mark.nightly),
        pytest.param(
            256, 16, MANY, {"bits": 3.5, "group_size": 32}, "solving a layer", "device", id="chosen widths",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_the_bound_is_what_is_counted(windows, seqlen, config, options, while_, states, planned, tmp_path) -> None:
    """Within a tenth before slack, and never less with it."""
    peak, bound = counted(tmp_path, planned, windows, seqlen, config, **options)
    assert (bound.place, bound.while_, bound.setting.states) == ("device", while_, states)
    assert abs(bound.live / peak - 1) <= 0.1
    assert peak <= bound.bytes


def turned(W, inputs, gradients) -> Rounded:
    """Return a rounding that needs no factors."""
    return Rounded(W + 0.05 * W.roll(1, 0))


def test_hidden_states_before_a_choice_lie_where_those_of_the_run_do(tmp_path) -> None:
    """On the host or on disk, the GPU does without them; the figures are the same, and the bound is not below."""
    random_model(config_of("llama", num_hidden_layers=2)).float().save_pretrained(tmp_path)
    tokens = torch.randint(96, (64, 16), generator=torch.Generator().manual_seed(0))
    model, peaks, bounds, figures = open_model(str(tmp_path)), [], [], []
    settled = resolved(model, Recipe.from_spellings(rate=3.0))
    windows = Windows(seqlen=16, fitted=tokens, extra=tokens[:0])
    for states in ("device", "host", "disk"):
        with pretended() as gpu:
            device = Device(torch.device("pretend:0"))
            shapes = shapes_of(model, settled, windows, try_blocks(model, tokens, device), device)
            assert shapes is not None
            setting = MemorySetting(batch=1, room=0, device=device, states=states)
            effect = sensitivity(model, tokens, device=device.place, dtype=torch.float32)
            gpu.forget()
            figures.append(
                estimated(model, tokens[:32], tokens[32:], [turned], effect, device=device.place, keep=setting.keep)
            )
            extent = Extent.of(Parts(tokens, tokens[:32], tokens[32:], tokens[32:]), points=1)
            shapes = replace(shapes, windows=1, streams=1, backward=0, choosing=extent)  # little else
            bounds.append(bound(shapes, setting, 0, "device"))
            peaks.append(gpu.peak)
    assert figures[0] == figures[1] == figures[2]
    aside, left = 4 * shapes.hidden * extent.seen, 2 * 4 * shapes.hidden * extent.batch  # one is used, and one is sent
    assert peaks[0] - peaks[1] >= (aside - left) / 2  # the fullest moment is another one
    for peak, most in zip(peaks, bounds, strict=True):
        assert most.while_ == "measuring what errors cost"
        assert peak <= most.bytes


def test_measuring_a_choice_takes_at_most_its_bound(tmp_path) -> None:
    """Hidden states of both networks lie where those of the run do; the figures are the same."""
    random_model(config_of("llama", num_hidden_layers=2)).float().save_pretrained(tmp_path)
    tokens = torch.randint(96, (96, 16), generator=torch.Generator().manual_seed(0))
    model, peaks, bounds, figures = open_model(str(tmp_path)), [], [], []
    roundings = {layer.name: turned for layer in model.layers}
    recipe = Recipe.from_spellings(mix="int3,int4", bits_per_weight=4.0, group_size=16)
    windows = Windows(seqlen=16, fitted=tokens, extra=tokens[:0])
    for states in ("device", "host", "disk"):
        with pretended() as gpu:
            device = Device(torch.device("pretend:0"))
            plan = Plan.of(recipe, [layer.name for layer in model.layers])
            shapes = shapes_of(model, plan, windows, try_blocks(model, tokens, device), device)
            assert shapes is not None
            assert shapes.choosing is not None
            assert shapes.choosing.compared
            setting = MemorySetting(batch=1, room=0, device=device, states=states)
            gpu.forget()
            texts = tokens[32:64], tokens[64:]
            figures.append(
                divergences(model, tokens[:32], texts, roundings, {}, device=device.place, keep=setting.keep)
            )
            extent = Extent.of(Parts(tokens, tokens[:32], *texts), points=1, compares=True)
            shapes = replace(shapes, windows=1, streams=1, backward=0, choosing=extent)  # little else
            bounds.append(bound(shapes, setting, 0, "device"))
            peaks.append(gpu.peak)
    assert figures[0] == figures[1] == figures[2]
    assert peaks[0] > peaks[1]
    for peak, most in zip(peaks, bounds, strict=True):
        assert most.while_ == "measuring a choice"
        assert 0.4 * most.bytes <= peak <= most.bytes
