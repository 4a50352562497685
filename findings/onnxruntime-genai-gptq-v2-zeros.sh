#!/usr/bin/env bash
# ONNX Runtime GenAI's model builder reads the zero points of GPTQ checkpoints one step too high if they say gptq_v2.
#
# A GPTQ checkpoint stores each zero point less one, unless its config has "checkpoint_format": "gptq_v2", the form that
# GPTQModel writes on request and that has the zero point itself. The builder does not look at that field: it adds one
# to what is stored in both. The network that it writes for a gptq_v2 folder has every weight shifted by one whole step
# and predicts badly; nothing is said. Whoever exports for it has to write the older form.
#
# Seen on 2026-11-28 with onnxruntime-genai 0.18.0, onnxruntime 1.32.0, onnx 1.23.2, transformers 5.24.0, torch 2.13.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 \
    transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6 torch==2.13.0

cat > ask.py <<'PY'
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

SIZE, GROUP, ZERO = 64, 32, 5
rng = np.random.default_rng(0)


def packed(values, axis):
    """Eight values of 4 bits in each int32 along an axis, the first in the lowest bits."""
    values = np.moveaxis(values.astype(np.uint32), axis, -1).reshape(*np.moveaxis(values, axis, -1).shape[:-1], -1, 8)
    words = (values << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)
    return torch.from_numpy(np.moveaxis(words, -1, axis).copy())


def folder(form, stored):
    out = Path(form)
    out.mkdir()
    tensors = {"model.embed_tokens.weight": torch.randn(32, SIZE), "lm_head.weight": torch.randn(32, SIZE)}
    tensors["model.norm.weight"] = torch.ones(SIZE)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{norm}.weight"] = torch.ones(SIZE)
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    for layer in (*(f"self_attn.{each}" for each in attention), *(f"mlp.{each}" for each in mlp)):
        at = f"model.layers.0.{layer}"
        tensors[f"{at}.qweight"] = packed(rng.integers(0, 16, (SIZE, SIZE)), 0)
        tensors[f"{at}.qzeros"] = packed(np.full((SIZE // GROUP, SIZE), stored), 1)
        tensors[f"{at}.scales"] = torch.full((SIZE // GROUP, SIZE), 0.01, dtype=torch.float16)
        tensors[f"{at}.g_idx"] = torch.arange(SIZE, dtype=torch.int32) // GROUP
    tensors = {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    quantization["checkpoint_format"] = form
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZE, "intermediate_size": SIZE,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
        "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "float16", "quantization_config": quantization,
    }
    (out / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({str(number): number for number in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="1", eos_token="2").save_pretrained(out)
    return out


for form, stored in (("gptq", ZERO - 1), ("gptq_v2", ZERO)):
    source = folder(form, stored)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "", "-i", str(source)]
    done = subprocess.run([*command, "-o", f"{form}-onnx", "-p", "int4", "-e", "cpu"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    graph = onnx.load(f"{form}-onnx/model.onnx").graph
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "MatMulNBits" and "lm_head" not in node.input[1]]
    zeros = [arrays[node.input[3]] for node in nodes]
    found = sorted({int(half) for each in zeros for half in np.concatenate([each.ravel() & 15, each.ravel() >> 4])})
    print(f"{form}: zero point {ZERO}, stored as {stored}, read as {found}")
PY
venv/bin/python ask.py 2> errors | tee seen || { cat errors; exit 1; }

diff seen - <<'SEEN'
gptq: zero point 5, stored as 4, read as [5]
gptq_v2: zero point 5, stored as 5, read as [6]
SEEN
