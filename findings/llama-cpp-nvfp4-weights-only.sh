#!/usr/bin/env bash
# llama.cpp's converter forgets that NVFP4 weights are meant for 16-bit inputs, if compressed-tensors wrote them.
#
# The same codes, block scales and tensor scale come in two dialects. ModelOpt says quant_algo "W4A16_NVFP4", and the
# GGUF gets a list, general.tensor_extra.prec_a4, that marks its NVFP4 tensors as not to be met by 4-bit inputs.
# compressed-tensors says "input_activations": null in the group, which the converter does not look at: the GGUF holds
# the same tensors, byte for byte, and no list. llama.cpp keeps the inputs of marked tensors at 8 bits or more and
# lets a device round those of the others to 4: which inputs a model gets depends on who wrote its folder. In both,
# the tensor scale goes into a tensor of its own, NAME.scale, for NAME.weight: the reciprocal of weight_global_scale
# and the very value of weight_scale_2. gguf's dequantize knows nothing of that tensor and gives weights that are 512
# times too large here.
#
# The converter is no package of its own; llama-cpp-python's source archive carries it with the matching gguf.
# Seen on 2026-11-27 with llama-cpp-python 0.3.36's llama.cpp, transformers 5.24.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 sentencepiece==0.2.3 \
    protobuf==7.36.2 numpy==2.4.6
venv/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
tar xzf llama_cpp_python-0.3.36.tar.gz
llama=$PWD/llama_cpp_python-0.3.36/vendor/llama.cpp
export PYTHONPATH=$llama/gguf-py

cat > write.py <<'PY'
import json
import pathlib
import random
import shutil

import sentencepiece
import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCABULARY = 64, 128, 64
random.seed(0)
words = ["".join(random.choices("abcdefgh", k=random.randint(2, 6))) for _ in range(300)]
text = [" ".join(random.choices(words, k=8)) for _ in range(500)]
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text), model_prefix="tokenizer", vocab_size=VOCABULARY, model_type="bpe", minloglevel=2
)

generator = torch.Generator().manual_seed(0)
kept = {f"{name}.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16() for name in ("model.embed_tokens", "lm_head")}
for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
    kept[f"{name}.weight"] = torch.ones(HIDDEN).bfloat16()
shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
theirs = {"compressed-tensors": {}, "modelopt": {}}
for name, (rows, columns) in shapes.items():
    name = f"model.layers.0.{name}"
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0x30, 0x70, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    theirs["compressed-tensors"] |= {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales}
    theirs["compressed-tensors"][f"{name}.weight_global_scale"] = torch.tensor([512.0])
    theirs["modelopt"] |= {f"{name}.weight": codes, f"{name}.weight_scale": scales}
    theirs["modelopt"][f"{name}.weight_scale_2"] = torch.tensor(1 / 512)

weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
weights |= {"dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}
layout = "nvfp4-pack-quantized"
group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": layout}
said = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]},
}
config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
for name, tensors in theirs.items():
    folder = pathlib.Path(name)
    folder.mkdir()
    save_file(kept | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said[name]}))
    shutil.copy("tokenizer.model", folder)
PY
cat > ask.py <<'PY'
import gguf
import numpy as np

files = {name: gguf.GGUFReader(f"{name}.gguf") for name in ("compressed-tensors", "modelopt")}
tensors = {name: {tensor.name: tensor for tensor in file.tensors} for name, file in files.items()}
first, second = tensors.values()
same = first.keys() == second.keys() and all(np.array_equal(first[name].data, second[name].data) for name in first)
print("tensors are the same:", same)
for name, file in files.items():
    marks = file.fields.get("general.tensor_extra.prec_a4")
    print(f"{name}: marks {marks.contents() if marks else None}")
weight, scale = first["blk.0.attn_q.weight"], first["blk.0.attn_q.scale"]
decoded = gguf.dequantize(weight.data, weight.tensor_type)
print(f"{weight.tensor_type.name}, scale 1/{1 / scale.data[0]:.0f}, largest of gguf's dequantize {np.abs(decoded).max():.0f}")
PY
venv/bin/python write.py
for name in compressed-tensors modelopt; do
    venv/bin/python "$llama/convert_hf_to_gguf.py" "$name" --outfile "$name.gguf" 2> said || { cat said; exit 1; }
done
venv/bin/python ask.py | tee seen

diff seen - <<'SEEN'
tensors are the same: True
compressed-tensors: marks None
modelopt: marks [False, False, False, False, False, False, False]
NVFP4, scale 1/512, largest of gguf's dequantize 720
SEEN
