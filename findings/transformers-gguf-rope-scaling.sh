#!/usr/bin/env bash
# transformers reads a GGUF without the scaling of its rotary positions, and says nothing.
#
# A GGUF of the llama architecture stretches its positions in one of two ways: by the keys llama.rope.scaling.type and
# llama.rope.scaling.factor (files of "linear" models), or by a tensor rope_freqs.weight with a divisor for each
# frequency (how llama.cpp's converter writes Llama 3.1 and later). llama.cpp applies both. transformers maps neither:
# the keys are missing in its table of metadata and the tensor matches no parameter, so the configuration ends with
# rope_type "default" and the logits equal those of the same file without any scaling. No warning, no entry in the
# load report. Short prompts still read well, which hides it; a perplexity of a GGUF that was measured through
# transformers is that of another model. Only gpt-oss has code of its own that reads the keys.
#
# Seen on 2026-11-27 with transformers 5.24.0, gguf 0.19.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0

cat > ask.py <<'PY'
import gguf
import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
HIDDEN, VOCABULARY, INNER = 64, 32, 96


def write(path, linear=None, divisors=None):
    random = np.random.default_rng(0)
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(4096)
    file.add_embedding_length(HIDDEN)
    file.add_block_count(1)
    file.add_feed_forward_length(INNER)
    file.add_head_count(4)
    file.add_head_count_kv(4)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(16)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(VOCABULARY)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    file.add_token_types([1] * VOCABULARY)
    file.add_token_merges(["t 0"])
    if linear:
        file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        file.add_rope_scaling_factor(linear)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER)}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32) * 0.1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        file.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    if divisors is not None:
        file.add_tensor("rope_freqs.weight", divisors)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


write("plain.gguf")
write("keys.gguf", linear=8.0)
write("tensor.gguf", divisors=np.full(8, 8, np.float32))
tokens = torch.arange(24)[None]
read = {
    name: transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{name}.gguf", dtype=torch.float32)
    for name in ("plain", "keys", "tensor")
}
for name, model in read.items():
    same = torch.equal(model(tokens).logits, read["plain"](tokens).logits)
    print(f"{name}: {model.config.rope_parameters}, logits of the file without scaling: {same}")

config = read["plain"].config
config.rope_parameters = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
meant = transformers.LlamaForCausalLM(config)
meant.load_state_dict(read["plain"].state_dict())
print(f"with the factor as written: same logits: {torch.equal(meant(tokens).logits, read['plain'](tokens).logits)}")
PY
venv/bin/python ask.py | tee seen

diff seen - <<'SEEN'
plain: {'rope_theta': 10000.0, 'rope_type': 'default'}, logits of the file without scaling: True
keys: {'rope_theta': 10000.0, 'rope_type': 'default'}, logits of the file without scaling: True
tensor: {'rope_theta': 10000.0, 'rope_type': 'default'}, logits of the file without scaling: True
with the factor as written: same logits: False
SEEN
