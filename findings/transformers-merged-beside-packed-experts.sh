#!/usr/bin/env bash
# transformers cannot load a checkpoint whose experts are packed integers if it also merges anything that is not quantized.
#
# For compressed-tensors, transformers puts its decoding step before every rule that merges or splits tensors, not only
# before those of experts. The step takes one scheme, that of the experts, for all of them. If that scheme is packed
# integers it passes on what it has unpacked and drops all else: the three short convolutions of Kimi Linear, which no
# one quantizes, reach the rule that joins them as nothing ("expected a non-empty list of Tensors" is the cause in its
# report), and loading ends with an error. If the experts are 8-bit floats, the same step lets weights without a scale through, and the same network
# loads with exactly the decoded weights. The same happens to the q, k and v that transformers splits from one matrix
# in the vision tower of Kimi K2.5 and in Sarvam. So whether a layer that nobody touched loads depends on the number
# format of other layers.
#
# Seen on 2026-11-29 with transformers 5.24.0, compressed-tensors 0.20.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0 accelerate==1.15.0

cat > ask.py <<'PY'
import json
import pathlib

import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
config = CONFIG_MAPPING["kimi_linear"](
    vocab_size=64, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, num_local_experts=4,
    num_experts_per_tok=2, n_shared_experts=1, linear_head_dim=16, linear_num_heads=4, pad_token_id=0, bos_token_id=0,
    eos_token_id=1, layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
)
AutoModelForCausalLM.from_config(config).save_pretrained("original")
original, said = load_file("original/model.safetensors"), json.loads(pathlib.Path("original/config.json").read_text())


def integers(weight):
    groups = weight.view(len(weight), -1, 32)
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7)
    packed = {"weight_packed": pack_to_int32(codes.view_as(weight).to(torch.int8), 4), "weight_scale": scale}
    return packed | {"weight_shape": torch.tensor(weight.shape)}, (codes * scale[..., None]).view_as(weight)


def floats(weight):
    scale = weight.abs().amax(-1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
channel = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
for title, numbers, weights, layout in (
    ("experts in fp8", floats, channel, "float-quantized"),
    ("experts in int4", integers, group, "pack-quantized"),
):
    stored, decoded = {}, {}
    for name, weight in original.items():
        stored[name] = decoded[name] = weight
        if ".experts." in name:
            parts, decoded[name] = numbers(weight)
            del stored[name]
            stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
    scheme = {"targets": ["re:.*[.]experts[.].*"], "weights": weights, "format": layout}
    quantized = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    for folder, tensors, more in (
        ("stored", stored, {"quantization_config": quantized | {"ignore": [], "config_groups": {"group_0": scheme}}}),
        ("decoded", decoded, {}),
    ):
        pathlib.Path(folder).mkdir(exist_ok=True)
        save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
        pathlib.Path(folder, "config.json").write_text(json.dumps(said | more))
    expected = AutoModelForCausalLM.from_pretrained("decoded", dtype=torch.float32)
    try:
        found = AutoModelForCausalLM.from_pretrained("stored", dtype=torch.float32)
    except RuntimeError as error:
        print(f"{title}: {type(error).__name__}: {str(error)[:50]}...")
        continue
    same = all(torch.equal(each, found.get_parameter(name)) for name, each in expected.named_parameters())
    print(f"{title}: loads, all weights equal to the decoded ones: {same}")
PY
venv/bin/python ask.py > seen 2> errors || { cat errors; exit 1; }
cat seen

diff seen - <<'SEEN'
experts in fp8: loads, all weights equal to the decoded ones: True
experts in int4: RuntimeError: We encountered some issues during automatic conver...
SEEN
