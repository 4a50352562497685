"""Whole runs write the same whether forwards pause or passes repeat; the record says which repeat, and why."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nearplane
from alive import paused
from families import VOCABULARY, config_of, random_model
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import Stage, walk
from nearplane.calibration.windows import Windows
from nearplane.matrix.inputs import Target
from nearplane.models.model import open_model
from nearplane.system.device import Device
from nightly import daily

TOKENS = torch.randint(3, VOCABULARY, (14, 20), generator=torch.Generator().manual_seed(1))  # two batches
FAST = {"calibration": TOKENS, "bits": 4, "group_size": 16, "format": "compressed-tensors", "solver": "nearest-plane"}
CHANGES = {"gptj": dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=VOCABULARY)}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to the folder of a model of two blocks."""

    def of(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "model"
        config = config_of(family, **CHANGES.get(family, {}) | dict(num_hidden_layers=2))
        random_model(config).float().save_pretrained(folder)
        return folder

    return of


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.nightly
@pytest.mark.parametrize("family", daily(["llama", "gemma2", "gptj"], ["gemma2"]))
def test_without_free_memory_the_same_is_written(
    family: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then passes repeat; that is said, and verify measures the same either way. What is recorded does not depend on it."""
    model, records = folder_of(family), []
    for name, free in (("much", 1 << 40), ("none", 0)):
        monkeypatch.setattr("nearplane.system.device.free_memory", lambda free=free: free)
        with caplog.at_level(logging.INFO):
            records.append(nearplane.quantize(model, tmp_path / name, **FAST))
        said = [message for message in caplog.messages if "paused at " in message]
        assert len(said) == (2 if name == "none" and family != "gptj" else 0)
        never = [message for message in caplog.messages if "is added to a tensor that is computed later" in message]
        assert len(never) == (2 if family == "gptj" else 0)
        caplog.clear()
    monkeypatch.setattr("nearplane.system.device.free_memory", lambda: 1 << 40)
    assert weights(tmp_path / "much") == weights(tmp_path / "none") != {}
    losses = [[(layer.loss, layer.row_losses, layer.extra_loss) for layer in record.layers] for record in records]
    assert losses[0] == losses[1]
    assert all("more than the 0 bytes" in message for message in said)
    assert nearplane.verify(tmp_path / "none", against=model, calibration=TOKENS).faults == ()


@pytest.mark.parametrize("how", [FAST, {"calibration": TOKENS, "rate": 3.0}])
def test_while_layers_are_solved_only_their_hessian_is_left_of_the_moments(
    how: dict[str, Any],
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a target is made of is as large as the Hessian: the last layer of a stage lets go of it before it is solved."""
    asked: list[int] = []
    target = Stage.target

    def watched(stage: Stage, number: int, *rest: Any, **options: Any) -> Target:
        moments = stage.inputs[number].moments
        if not moments.tokens:  # the layer that loads libraries
            return target(stage, number, *rest, **options)
        assert moments.held_out is not None
        parts = (moments.C, moments.lost, moments.held_out.H, moments.held_out.C, moments.held_out.lost)
        refs = [weakref.ref(part) for part in parts if part is not None]
        shared = stage.inputs[number].shared
        last = all(later.shared is not shared for later in stage.inputs[number + 1 :])
        del moments, parts, shared
        asked.append(number)
        found = target(stage, number, *rest, **options)
        if last:
            assert refs, "targets are corrected"
            assert [ref() for ref in refs] == [None] * len(refs)
        return found

    monkeypatch.setattr(Stage, "target", watched)
    nearplane.quantize(folder_of("llama"), tmp_path / "out", **how)
    assert len(asked) == 14


@pytest.mark.parametrize("layer", ["q_proj", "gate_proj", "down_proj"])
def test_an_error_in_a_solve_leaves_no_forward_paused(layer: str, folder_of: Callable[[str], Path]) -> None:
    """While the error, and so every frame that it passed, is still held."""
    recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16)

    model = open_model(str(folder_of("llama")))
    windows = Windows(seqlen=20, fitted=TOKENS)
    error = None
    try:
        with walk(model, recipe, windows, MemorySetting.usual(windows.seqlen, Device(torch.device("cpu")))) as stages:
            for stage in stages:
                if stage.layers and layer in stage.layers[0].name:
                    assert paused() != []
                    raise RuntimeError("in a solve")
                stage.write([None for _ in stage.layers])
    except RuntimeError as raised:
        error = raised
    assert str(error) == "in a solve"
    assert paused() == []
