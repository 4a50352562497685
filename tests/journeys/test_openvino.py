"""The real client: OpenVINO GenAI reads our GGUF files, and predicts what our values say where it keeps them.

Needs openvino-genai, in an environment of its own (`make test-openvino`). Written for 2026.4.1. It keeps the minimum of a group as
a whole number of steps, so that types with a minimum are read with an error of up to half a step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from written_folders import TOKENS, Written, needs_project, written

openvino = pytest.importorskip("openvino", reason="needs openvino")
openvino_genai = pytest.importorskip("openvino_genai", reason="needs openvino-genai")
pytestmark = [pytest.mark.nightly, needs_project]
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
KEPT = {"q8_0": 1e-7, "q4_0": 1e-6, "q6_k": 1e-5}  # KL in nats per token
ROUNDED = ("q4_1", "q4_k_m")
PROMPT = "Return the number of"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    forms: dict[str, dict[str, Any]] = {grid: {"grid": grid} for grid in (*KEPT, *ROUNDED)}
    return written(forms, tmp_path_factory.mktemp("folders"))


def opened(form: Written, scratch: Path) -> tuple[str, float]:
    """Return the text after PROMPT, and the mean KL from our predictions in nats per token."""
    file = scratch / "model.gguf"
    shutil.copy(form.folder / "model.gguf", file)
    pipeline = openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True, **EXACT)
    text = str(pipeline.generate(PROMPT, max_new_tokens=16, do_sample=False))
    network = openvino.Core().compile_model(scratch / "openvino_model.xml", "CPU", EXACT)
    feed = {
        "input_ids": np.array([TOKENS]),
        "attention_mask": np.ones((1, len(TOKENS)), np.int64),
        "position_ids": np.arange(len(TOKENS))[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    logits = next(iter(network.create_infer_request().infer(feed).values()))[0].astype(np.float64)
    theirs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    ours = form.predicted.astype(np.float64)
    return text, float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


@pytest.mark.parametrize("grid", KEPT)
def test_types_without_a_minimum_predict_what_we_say(grid: str, folders: dict[str, Written], tmp_path: Path) -> None:
    text, kl = opened(folders[grid], tmp_path)
    assert kl < KEPT[grid]
    assert "the number of" in text  # its tokenizer is made from the file, too


@pytest.mark.parametrize("grid", ROUNDED)
def test_types_with_a_minimum_are_read_with_a_rounded_one(
    grid: str, folders: dict[str, Written], tmp_path: Path
) -> None:
    """Where this fails, OpenVINO keeps minimums, and serving.md should say so."""
    _, kl = opened(folders[grid], tmp_path)
    assert 1e-3 < kl < 1
