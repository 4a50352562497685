#!/usr/bin/env bash
# compressed-tensors changes 8-bit codes of weights that lie on its own grid, when they are held in bfloat16.
#
# A weight that was decoded from codes and scales, code * scale rounded to the model's dtype, is compressed again with
# the very same scales: what a quantize step, a save and nothing else between them do. In float32 and float16 every code
# comes back. In bfloat16, the dtype of most models, about one code in 31 is off by one: the quotient weight / scale is
# formed in bfloat16, whose eight bits of mantissa do not hold an integer beyond 128 and its half, so it is rounded
# twice. A solver that chose those codes with care loses its choice at saving. 4 bits are not touched. Dividing in
# float32, from the same bfloat16 weights, brings every code back.
#
# Seen on 2026-11-27 with compressed-tensors 0.20.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 compressed-tensors==0.20.0 transformers==5.24.0

cat > ask.py <<'PY'
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize

print("dtype     bits  codes  changed  by at most  changed if divided in float32")
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for bits in (4, 8):
        largest = 2 ** (bits - 1) - 1
        args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=128)
        # every code at 64 scales that cover one power of two, none of them a power of two itself
        codes = torch.arange(-largest, largest + 1).repeat(128)[: 128 * (2 * largest + 1)]
        codes = codes.reshape(-1, 128).repeat(64, 1).to(torch.int8)
        steps = torch.linspace(0.0041, 0.0077, 64).repeat_interleave(2 * largest + 1)[:, None].to(dtype)
        weights = codes.to(dtype) * steps
        again = quantize(weights, steps, torch.zeros_like(steps, dtype=torch.int8), args, dtype=torch.int8)
        wide = (weights.float() / steps.float()).round().to(torch.int8)
        change = (again.int() - codes.int()).abs()
        print(
            f"{str(dtype)[6:]:9} {bits:4} {codes.numel():6} {int((change > 0).sum()):8} {int(change.max()):11}"
            f" {int((wide != codes).sum()):10}"
        )
PY
venv/bin/python ask.py | tee seen

diff seen - <<'SEEN'
dtype     bits  codes  changed  by at most  changed if divided in float32
float32      4 122880        0           0          0
float32      8 2088960        0           0          0
float16      4 122880        0           0          0
float16      8 2088960        0           0          0
bfloat16     4 122880        0           0          0
bfloat16     8 2088960    66688           1          0
SEEN
