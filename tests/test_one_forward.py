"""Whole runs write the same whether forwards pause or passes repeat; the record says which repeat, and why."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nearplane
from alive import paused
from families import VOCABULARY, config_of, random_model
from nearplane.matrix.inputs import Inputs, corrected
from nearplane.models.model import open_model
from nearplane.record import NAME, RunRecord, read_record
from nearplane.tokens import Windows
from nearplane.walk import Stage, walk

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


@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj"])
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
        monkeypatch.setattr("nearplane.models.staged.free_memory", lambda free=free: free)
        with caplog.at_level(logging.INFO):
            records.append(nearplane.quantize(model, tmp_path / name, **FAST))
        said = [message for message in caplog.messages if "paused at " in message]
        assert len(said) == (2 if name == "none" and family != "gptj" else 0)
    monkeypatch.setattr("nearplane.models.staged.free_memory", lambda: 1 << 40)
    assert weights(tmp_path / "much") == weights(tmp_path / "none") != {}
    losses = [[(layer.loss, layer.row_losses, layer.extra_loss) for layer in record.layers] for record in records]
    assert losses[0] == losses[1]
    much, none = (record.repeated for record in records)
    if family == "gptj":
        assert [why for _, why in much] == [
            f"what the output of transformer.h.{i}.attn.out_proj is added to is not known before it runs"
            for i in (0, 1)
        ]
    else:
        assert all("of the 0 bytes" in message for message in said)
        assert much == ()
    assert read_record(tmp_path / "none").repeated == none == much
    assert nearplane.verify(tmp_path / "none", against=model, calibration=TOKENS).faults == ()


@pytest.mark.parametrize(("how", "where"), [(FAST, "on_grid"), ({"calibration": TOKENS, "rate": 3.0}, "to_rate")])
def test_while_layers_are_solved_only_their_hessian_is_left_of_the_moments(
    how: dict[str, Any],
    where: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a target is made of is as large as the Hessian: the last layer of a stage lets go of it before it is solved."""
    asked: list[Inputs] = []

    def watched(W: Tensor, inputs: Inputs, *rest: Any) -> tuple[Tensor, float]:
        moments = inputs.moments
        assert moments.held_out is not None
        parts = (moments.C, moments.lost, moments.held_out.H, moments.held_out.C, moments.held_out.lost)
        refs = [weakref.ref(part) for part in parts if part is not None]
        del moments, parts
        asked.append(inputs)
        found = corrected(W, inputs, *rest)
        if inputs._last:
            assert refs, "targets are corrected"
            assert [ref() for ref in refs] == [None] * len(refs)
        return found

    monkeypatch.setattr(f"nearplane.matrix.{where}.corrected", watched)
    nearplane.quantize(folder_of("llama"), tmp_path / "out", **how)
    assert len(asked) == 14


def test_records_of_before_are_read(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """They say nothing of passes."""
    record = nearplane.quantize(folder_of("llama"), tmp_path / "out", **FAST)
    said = json.loads((tmp_path / "out" / NAME).read_text())
    assert said.pop("repeated") == []
    assert RunRecord.from_json(json.dumps(said)).layers == record.layers


@pytest.mark.parametrize("layer", ["q_proj", "gate_proj", "down_proj"])
def test_an_error_in_a_solve_leaves_no_forward_paused(layer: str, folder_of: Callable[[str], Path]) -> None:
    """While the error, and so every frame that it passed, is still held."""
    recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16)

    def solve(stage: Stage) -> list[None]:
        if layer in stage.layers[0].name:
            assert paused() != []
            raise RuntimeError("in a solve")
        return [None for _ in stage.layers]

    model = open_model(str(folder_of("llama")))
    windows = Windows(seqlen=20, fitted=TOKENS)
    error = None
    try:
        for _ in walk(model, recipe, windows, solve, device=torch.device("cpu")):
            pass
    except RuntimeError as raised:
        error = raised
    assert str(error) == "in a solve"
    assert paused() == []
