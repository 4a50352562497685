#!/usr/bin/env bash
# torchao's int4 leaves a layer whose width is no multiple of the group as it was, without a word.
#
# quantize_ with Int4WeightOnlyConfig hands a weight back unchanged where its columns are no multiple of group_size,
# and notes that at the level "info", which Python does not show unless logging is set up. The call succeeds, the
# model works, and the layer keeps its 16 bits. 576 columns, the width of well-known models of 135 million parameters,
# are no multiple of the default group of 128: every projection that reads the hidden state stays.
# IntxWeightOnlyConfig, of the same library, for the same four bits, group and weight, raises an error that names both
# numbers. Nothing in the result tells the two cases apart but the type of each weight.
#
# Seen on 2026-11-27 with torchao 0.18.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile torch==2.13.0 torchao==0.18.0 numpy==2.4.6

cat > ask.py <<'PY'
import torch
from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

for config in (Int4WeightOnlyConfig(group_size=128), IntxWeightOnlyConfig(torch.int4, PerGroup(128))):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(576, 576), torch.nn.Linear(576, 1536)).bfloat16()
    before = [layer.weight.detach().clone() for layer in layers]
    try:
        quantize_(layers, config)
        kept = [torch.equal(layer.weight, weight) for layer, weight in zip(layers, before, strict=True)]
        print(f"{type(config).__name__}: no error, weights as before: {kept}, {layers[0].weight.dtype}")
    except AssertionError as error:
        print(f"{type(config).__name__}: {type(error).__name__}: {error}")
PY
venv/bin/python ask.py 2> said | tee seen
echo "messages that speak of skipping: $(grep -c -i skip said || true)" | tee -a seen

diff seen - <<'SEEN'
Int4WeightOnlyConfig: no error, weights as before: [True, True], torch.bfloat16
IntxWeightOnlyConfig: AssertionError: Expecting input size at 1 dimension: 576 to be divisible by block_size at 1 dimension: 128
messages that speak of skipping: 0
SEEN
