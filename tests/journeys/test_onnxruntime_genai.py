"""The real client: ONNX Runtime GenAI's builder converts our folders, and its engine predicts what our values say.

Needs onnxruntime-genai, in an environment of its own (`make test-ort`). Written for 0.18.0. Its builder reads gptq and awq, and
adds 1 to the zero points of gptq whatever the version of the checkpoint says, so that it reads gptq_v2 one step off.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from written_folders import TOKENS, Written, needs_project, written

onnxruntime_genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
onnx = pytest.importorskip("onnx", reason="needs onnx")
pytestmark = [pytest.mark.nightly, needs_project]
RIGHT: dict[str, dict[str, Any]] = {
    "gptq, 4 bits": {"format": "gptq"},
    "gptq, 8 bits": {"format": "gptq", "bits": 8},
    "awq, 4 bits": {"format": "awq", "symmetric": False},
}
ONE_STEP_OFF: dict[str, dict[str, Any]] = {
    "gptq_v2, 4 bits": {"format": "gptq_v2"},
    "gptq_v2, zero points": {"format": "gptq_v2", "symmetric": False},
}
OTHERS: dict[str, dict[str, Any]] = {"compressed-tensors, 4 bits": {"bits": 4}}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return written(RIGHT | ONE_STEP_OFF | OTHERS, tmp_path_factory.mktemp("folders"))


def built(folder: Path, out: Path) -> str:
    """Let the builder convert a folder, and return the last line of what it says where it fails."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "", "-i", str(folder), "-o", str(out)]
    done = subprocess.run([*command, "-p", "int4", "-e", "cpu"], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def matrices(out: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, weights (out, in) and steps of each quantized layer but the head, which the builder itself quantizes."""
    graph = onnx.load(out / "model.onnx").graph
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMulNBits" and "lm_head" not in node.input[1]:
            has = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            codes, steps, zeros = (arrays[name].reshape(has["N"], -1) for name in node.input[1:4])
            if has["bits"] == 4:
                codes, zeros = (np.stack([each & 15, each >> 4], -1).reshape(has["N"], -1) for each in (codes, zeros))
            steps, zeros = (
                np.repeat(each.astype(np.float32)[:, : steps.shape[1]], has["block_size"], 1) for each in (steps, zeros)
            )
            yield node.input[1], (codes - zeros) * steps, steps


def furthest(out: Path, folder: Written) -> float:
    """Return the largest distance of a weight from ours, in steps."""
    ours, far = folder.weights(), 0.0
    for name, weight, steps in matrices(out):
        _, _, block, part, layer, *_ = name.split(".")
        within = f"model.layers.{block}.{'self_attn' if part == 'attn' else part}"
        wanted = torch.cat([ours[f"{within}.{each}.weight"] for each in FUSED.get(layer, (layer,))])
        far = max(far, float(np.abs((weight - wanted.numpy()) / steps).max()))
    return far


def divergence(out: Path, folder: Written) -> float:
    """Return the mean KL from our predictions to the engine's, in nats per token."""
    model = onnxruntime_genai.Model(str(out))
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=len(TOKENS))
    generator, total = onnxruntime_genai.Generator(model, params), 0.0
    for token, ours in zip(TOKENS, torch.from_numpy(folder.predicted), strict=True):
        generator.append_tokens(np.array([[token]], np.int32))
        theirs = torch.tensor(np.array(generator.get_logits())).flatten().log_softmax(-1)
        total += float((ours.exp() * (ours - theirs)).sum())
    return total / len(TOKENS)


@pytest.mark.parametrize("form", RIGHT)
def test_weights_are_ours_bit_for_bit(form: str, folders: dict[str, Written], tmp_path: Path) -> None:
    """Predictions differ, as the builder itself rounds the inputs of layers to 8 bits and the head to 4."""
    assert built(folders[form].folder, tmp_path) == ""
    assert furthest(tmp_path, folders[form]) == 0
    assert 1e-3 < divergence(tmp_path, folders[form]) < 5e-2


@pytest.mark.parametrize("form", ONE_STEP_OFF)
def test_gptq_v2_is_read_one_step_off(form: str, folders: dict[str, Written], tmp_path: Path) -> None:
    """Where this fails, the builder reads `checkpoint_format`, and serving.md should say so."""
    assert built(folders[form].folder, tmp_path) == ""
    assert furthest(tmp_path, folders[form]) == 1
    assert divergence(tmp_path, folders[form]) > 1


def test_compressed_tensors_is_taken_for_another_format(folders: dict[str, Written], tmp_path: Path) -> None:
    said = built(folders["compressed-tensors, 4 bits"].folder, tmp_path)
    assert said == "ValueError: ModelOpt FP8/NVFP4 checkpoints are only supported on the CUDA EP."
