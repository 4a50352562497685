#!/usr/bin/env bash
# transformers opens a Mixtral GGUF as a dense Llama whose feed-forward weights are random.
#
# llama.cpp files Mixtral under the architecture "llama": two keys (llama.expert_count, llama.expert_used_count) and
# the stacked tensors ffn_gate_exps, ffn_up_exps, ffn_down_exps tell it from a dense model. transformers looks at the
# architecture alone: it builds LlamaForCausalLM, finds none of the stacked tensors among that model's parameters,
# leaves them out, and initializes the dense feed-forward layers at random. What comes back answers, and answers
# differently at each load. The load report does list the three parameters as missing, with the advice to train them;
# neither an error nor a word says that the file holds experts, and the tensors that were left out are not listed.
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
HIDDEN, VOCABULARY, INNER, EXPERTS = 64, 32, 96, 4

random = np.random.default_rng(0)
file = gguf.GGUFWriter("mixture.gguf", "llama")
file.add_context_length(4096)
file.add_embedding_length(HIDDEN)
file.add_block_count(1)
file.add_feed_forward_length(INNER)
file.add_head_count(4)
file.add_head_count_kv(4)
file.add_layer_norm_rms_eps(1e-5)
file.add_rope_dimension_count(16)
file.add_vocab_size(VOCABULARY)
file.add_expert_count(EXPERTS)
file.add_expert_used_count(2)
file.add_tokenizer_model("gpt2")
file.add_token_list([f"t{i}" for i in range(VOCABULARY)])
file.add_token_types([1] * VOCABULARY)
file.add_token_merges(["t 0"])
shapes = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN), "blk.0.ffn_gate_inp": (EXPERTS, HIDDEN)}
shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
shapes |= {f"blk.0.ffn_{name}_exps": (EXPERTS, INNER, HIDDEN) for name in ("gate", "up")}
shapes |= {"blk.0.ffn_down_exps": (EXPERTS, HIDDEN, INNER)}
for name, shape in shapes.items():
    file.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32) * 0.1)
for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
    file.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()


def load():
    model = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="mixture.gguf", dtype=torch.float32)
    return model, model(torch.arange(24)[None]).logits


model, first = load()
_, second = load()
weight = model.model.layers[0].mlp.gate_proj.weight
print(type(model).__name__, "with", sum("mlp" in name for name in model.state_dict()), "feed-forward weights")
print(f"spread of the file's 0.1, of what was loaded {weight.std().item():.2f}")
print("two loads give the same logits:", torch.equal(first, second))
PY
venv/bin/python ask.py 2> said | tee seen
grep -E 'MISSING *\|' said | sed 's/\x1b\[[0-9;]*m//g; s/ *$//; s/  */ /g' | sort -u | tee -a seen
echo "lines that name experts: $(grep -c -i -E 'exps|expert' said || true)" | tee -a seen

diff seen - <<'SEEN'
LlamaForCausalLM with 3 feed-forward weights
spread of the file's 0.1, of what was loaded 0.02
two loads give the same logits: False
model.layers.0.mlp.down_proj.weight | MISSING |
model.layers.0.mlp.gate_proj.weight | MISSING |
model.layers.0.mlp.up_proj.weight | MISSING |
lines that name experts: 0
SEEN
