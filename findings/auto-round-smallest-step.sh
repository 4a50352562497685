#!/usr/bin/env bash
# AutoRound gives a group of small weights the same values at 8 bits as at 4.
#
# AutoRound does not let the step of a group fall below 1e-5, whatever the number of bits. A symmetric step is the
# group's largest magnitude over 2^(bits - 1), so the floor is reached from 8e-5 downwards at 4 bits and from 1.28e-3
# downwards at 8. Groups below that lose the bits that were asked for and paid for: with a largest magnitude of 8e-5,
# 4 and 8 bits give an error of 6.4 %, with float16 scales (the default) bitwise the same decoded weights; a group
# sixteen times larger has 0.39 % at 8 bits. The number guards float16 scales, but float16 holds 6e-8, and the floor
# also stands where scales are float32.
#
# Seen on 2026-11-27 with auto-round 0.16.1, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile torch==2.13.0 auto-round==0.16.1 transformers==5.24.0

cat > ask.py <<'PY'
import torch
from auto_round.data_type.int import quant_tensor_sym

small = torch.linspace(-8e-5, 7.5e-5, 128)[None]
for times in (1, 16):
    weights = small * times
    for scale_dtype in (torch.float16, torch.float32):
        decoded = {}
        for bits in (4, 8):
            decoded[bits], step, _ = quant_tensor_sym(weights.clone(), bits=bits, group_size=128, scale_dtype=scale_dtype)
            error = (decoded[bits] - weights).norm() / weights.norm()
            print(
                f"largest {weights.abs().max():.2e}, {str(scale_dtype)[6:]} scales, {bits} bits:"
                f" step {step.item():.2e}, error {error:.2%}"
            )
        print("  4 and 8 bits decode to the same:", torch.equal(decoded[4], decoded[8]))
PY
venv/bin/python ask.py | grep -E 'largest|decode' | tee seen

diff seen - <<'SEEN'
largest 8.00e-05, float16 scales, 4 bits: step 1.00e-05, error 6.41%
largest 8.00e-05, float16 scales, 8 bits: step 1.00e-05, error 6.41%
  4 and 8 bits decode to the same: True
largest 8.00e-05, float32 scales, 4 bits: step 1.00e-05, error 6.40%
largest 8.00e-05, float32 scales, 8 bits: step 1.00e-05, error 6.40%
  4 and 8 bits decode to the same: False
largest 1.28e-03, float16 scales, 4 bits: step 1.60e-04, error 6.40%
largest 1.28e-03, float16 scales, 8 bits: step 1.00e-05, error 0.39%
  4 and 8 bits decode to the same: False
largest 1.28e-03, float32 scales, 4 bits: step 1.60e-04, error 6.40%
largest 1.28e-03, float32 scales, 8 bits: step 1.00e-05, error 0.40%
  4 and 8 bits decode to the same: False
SEEN
