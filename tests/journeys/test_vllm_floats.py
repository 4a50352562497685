"""The real client: vLLM's own schemes and loaders take our layers in four- and eight-bit floats (`make test-vllm`).

Its CPU has no kernels for them: their choice is replaced, and weights are decoded as vLLM hands them to a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_engine import FUSED, decoded, distance, engine, in_this_process
from written_folders import Written, needs_project, written

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.nightly, needs_project]
assert in_this_process  # a fixture
FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"grid": "fp8"},
    "nvfp4": {"grid": "nvfp4"},
    "mxfp4": {"grid": "mxfp4"},
    "mxfp8": {"grid": "mxfp8"},
    "nvfp4, inputs fp4": {"grid": "nvfp4", "activations": "fp4", "solver": "nearest-plane"},
    "mxfp4, inputs fp4": {"grid": "mxfp4", "activations": "fp4"},
    "mxfp8, inputs fp8": {"grid": "mxfp8", "activations": "fp8"},
    "nvfp4 in a mix": {
        "mix": "nvfp4a16,mxfp8a16,bf16",
        "bits_per_weight": 7.0,
        "runtime": "vllm",
        "solver": "nearest-plane",
    },
    "nvfp4 beside bits": {"grid": "nvfp4", "layers": {"down_proj": {"grid": "mxfp8"}}},
}
BLOCK: dict[str, dict[str, Any]] = {"fp8-block": {"grid": "fp8-block"}}
CLOSE = 5e-5  # nats, of log-probabilities; the plain product does not round inputs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return written(FORMS | BLOCK, tmp_path_factory.mktemp("folders"))


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    from plain_vllm_floats import plain_floats

    with plain_floats():
        yield


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_decoded_as_ours(form: str, folders: dict[str, Written]) -> None:
    """Bit for bit but for NVFP4, of whose global scale vLLM takes the reciprocal; joined layers stand above each other."""
    with engine(folders[form].folder) as made:
        (theirs,), ours = made.apply_model(decoded), folders[form].weights()
        assert theirs
        for name, weight in theirs.items():
            path, _, last = name.rpartition(".")
            expected = torch.cat([ours[f"{path}.{part}.weight"] for part in FUSED.get(last, (last,))])
            if form.startswith("nvfp4"):
                torch.testing.assert_close(weight, expected, rtol=3e-7, atol=0)
            else:
                assert torch.equal(weight, expected), name
        if "inputs" not in form:
            assert distance(made, folders[form].predicted) < CLOSE


def test_blocks_of_fp8_without_rounded_inputs_are_refused(folders: dict[str, Written]) -> None:
    """Whatever the kernel: it wants is_static_input_scheme to be False, and sets it to None where inputs are not rounded."""
    with pytest.raises(AssertionError), engine(folders["fp8-block"].folder):
        pass
