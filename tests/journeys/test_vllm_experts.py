"""The real client: vLLM's own methods and loaders take our experts, and hold what we wrote (`make test-vllm`).

Its CPU has no kernels for quantized experts: their choice is replaced, and weights are decoded from vLLM's parameters.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_engine import distance, engine, in_this_process
from written_folders import PYTHON, Written, needs_project, written

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.nightly, needs_project]
assert in_this_process  # a fixture
SAVE = """
import sys, torch
from pathlib import Path
from families import LLAMA, MOE, add_tokenizer, config_of, random_model
sizes = dict(hidden_size=128, intermediate_size=128, head_dim=32, vocab_size=4096, max_position_embeddings=256, num_local_experts=4)
config = config_of("mixtral", **LLAMA | MOE | sizes)
random_model(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
add_tokenizer(Path(sys.argv[1]))
"""
CLOSE = 2e-4  # nats, of log-probabilities
EXPERTS = ("w1", "w3", "w2")
DENSE: dict[str, Any] = {"runtime": "vllm", "ignore": ["self_attn"]}
SAME: dict[str, dict[str, Any]] = {  # weights alone: predictions are compared, too
    **{f"int{bits}": DENSE | {"bits": bits, "group_size": 32} for bits in range(2, 9)},
    **{f"int{bits}, zero points": DENSE | {"bits": bits, "group_size": 32, "symmetric": False} for bits in range(2, 9)},
    "nvfp4": DENSE | {"grid": "nvfp4"},
    "mxfp4": DENSE | {"grid": "mxfp4"},
    "mxfp8": DENSE | {"grid": "mxfp8"},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "nvfp4, inputs fp4, attention in fp8": {
        "grid": "nvfp4", "activations": "fp4", "runtime": "vllm",
        "layers": {"self_attn": {"grid": "fp8", "activations": "fp8"}}, "solver": "nearest-plane",
    },
    "fp8, inputs fp8": DENSE | {"grid": "fp8", "activations": "fp8"},
    "fp8-block, inputs fp8": DENSE | {"grid": "fp8-block", "activations": "fp8"},
    "int8, inputs int8": DENSE | {"grid": "int8", "activations": "int8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([PYTHON, "-c", SAVE, str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return written(SAME | ROUNDED, tmp_path_factory.mktemp("folders"), source=source)


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    from plain_vllm_experts import plain_experts

    with plain_experts():
        yield


def loaded(network: Any) -> dict[str, dict[str, Tensor]]:
    return {
        name.removesuffix(".routed_experts"): module.plain
        for name, module in network.named_modules()
        if isinstance(getattr(module, "plain", None), dict)
    }


@pytest.mark.parametrize("form", SAME | ROUNDED)
def test_experts_are_decoded_bit_for_bit(form: str, folders: dict[str, Written]) -> None:
    """Gate and up stand one above the other; predictions are compared where inputs are not rounded."""
    with engine(folders[form].folder) as made:
        (theirs,), ours = made.apply_model(loaded), folders[form].weights()
        assert len(theirs) == 3
        for name, matrices in theirs.items():
            for expert in range(4):
                own = [ours[f"{name}.{expert}.{each}.weight"] for each in EXPERTS]
                assert torch.equal(matrices["w13"][expert], torch.cat(own[:2])), name
                assert torch.equal(matrices["w2"][expert], own[2]), name
        if form in SAME:
            assert distance(made, folders[form].predicted) < CLOSE


def test_experts_in_8_bit_floats_without_rounded_inputs_are_refused(source: Path, tmp_path: Path) -> None:
    """As our own table says, which refuses them for vLLM."""
    made = written({"fp8": {"grid": "fp8", "ignore": ["self_attn"]}}, tmp_path, source=source)
    with (
        pytest.raises((RuntimeError, ValueError), match="only format: pack-quantized and bits"),
        engine(made["fp8"].folder),
    ):
        pass
