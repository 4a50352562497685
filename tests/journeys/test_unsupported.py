"""Architectures that are not supported are refused in one sentence, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSpeechSeq2Seq

import nearplane
from model_types import save_type
from nearplane.errors import NearplaneError
from nearplane.models import layers

WINDOWS = torch.randint(3, 96, (8, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("whisper", r"^WhisperForCausalLM never runs model\.decoder\.layers\.0\.encoder_attn\.k"),
        ("mamba", r"^MambaForCausalLM never runs backbone\.layers\.0\.mixer\.dt_proj .*--ignore 'mixer\\.dt_proj\$'\.$"),
    ],
)  # fmt: skip
def test_the_architecture_and_the_module_are_named(kind: str, match: str, tmp_path: Path) -> None:
    save_type(tmp_path / "model", kind)
    with pytest.raises(NearplaneError, match=match):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", calibration=WINDOWS, rate=3, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_types_of_matrices_that_no_one_knows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's would be such if it were not known that they compute what a Linear does."""
    monkeypatch.setattr(layers, "LINEAR_SUBCLASSES", set())
    save_type(tmp_path / "model", "falcon")
    said = r"^The architecture FalconForCausalLM is not supported: its matrices have the type FalconLinear \(for example transf"
    with pytest.raises(NearplaneError, match=said):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", calibration=WINDOWS, rate=3, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_continues_no_text_is_refused(tmp_path: Path) -> None:
    save_type(tmp_path / "model", "bert")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(
        NearplaneError, match=r"^The architecture BertForMaskedLM is not supported because it does not predict the next"
    ):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", bits=4, solver="round-to-nearest", device="cpu")


def test_what_hears_in_a_way_that_was_never_tried_is_refused(tmp_path: Path) -> None:
    """transformers would name a hundred types of configs."""
    made = CONFIG_MAPPING["pop2piano"](d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=96)
    AutoModelForSpeechSeq2Seq.from_config(made).save_pretrained(tmp_path / "model")
    said = (
        r"^The architecture Pop2PianoForConditionalGeneration is not supported: it takes sound, and .* whisper, moonsh"
    )
    with pytest.raises(NearplaneError, match=said):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", calibration=WINDOWS, bits=4, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_network_that_does_not_run_on_such_windows_is_refused(tmp_path: Path) -> None:
    save_type(tmp_path / "model", "big_bird", attention_type="block_sparse")
    with pytest.raises(
        NearplaneError, match=r"^BigBirdForCausalLM does not run on a window of 32 tokens \(Query sided"
    ):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", calibration=WINDOWS, bits=4, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
