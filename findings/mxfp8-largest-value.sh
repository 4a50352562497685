#!/usr/bin/env bash
# The exponent of an MXFP8 block whose largest value is exactly E4M3's largest: one of three tools takes it one higher.
#
# 448 is the largest value of E4M3, so a block whose largest magnitude is 448 fits with the exponent 0. MLX and
# torchao's FLOOR, RCEIL and EVEN modes choose 0, compressed-tensors and torchao's CEIL choose 1. compressed-tensors
# adds half a unit of *E2M1's* mantissa before it takes the power of two, for 4 bits and for 8, and 1.75 x 2^8 = 448
# is the smallest number that then rolls over. Nothing is clipped, but the smallest values lose a binary place: 2^-9,
# a code of its own at exponent 0, becomes 0. So compressing what was decoded is not a fixed point: a block that holds
# the code of 448 comes back with another exponent and other codes. One more and MLX and RCEIL go up as well, FLOOR
# and EVEN clip.
#
# Seen on 2026-11-27 with compressed-tensors 0.20.0, torchao 0.18.0, torch 2.13.0 (CPU), mlx 0.32.4 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 torchao==0.18.0 "mlx[cpu]==0.32.4" \
    compressed-tensors==0.20.0 transformers==5.24.0

cat > ask.py <<'PY'
import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

SMALLEST = 2.0**-9
args = QuantizationArgs(
    num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8, zp_dtype=None
)


def by_compressed_tensors(block):
    step, _ = calculate_qparams(block.amin(-1, keepdim=True), block.amax(-1, keepdim=True), args)
    return int(step.log2().item()), fake_quantize(block, step, None, args)


def by_torchao(mode):
    def ask(block):
        scale, codes = to_mx(block, torch.float8_e4m3fn, 32, mode)
        exponent = int(scale.view(torch.uint8).item()) - 127
        return exponent, codes.float() * 2.0**exponent

    return ask


def by_mlx(block):
    codes, scale = mx.quantize(mx.array(block.numpy()), group_size=32, bits=8, mode="mxfp8")
    decoded = mx.dequantize(codes, scale, group_size=32, bits=8, mode="mxfp8").astype(mx.float32)
    return int(np.array(scale).item()) - 127, torch.from_numpy(np.array(decoded))


tools = {"compressed-tensors": by_compressed_tensors, "mlx": by_mlx}
tools |= {f"torchao {mode.name}": by_torchao(mode) for mode in ScaleCalculationMode}
for largest in (447.0, 448.0, 449.0):
    block = torch.zeros(1, 32)
    block[0, 0], block[0, 1] = largest, SMALLEST
    for name, ask in tools.items():
        exponent, decoded = ask(block)
        print(f"{largest:.0f} {name}: exponent {exponent}, largest {decoded[0, 0]:.0f}, 2^-9 kept: {bool(decoded[0, 1])}")
PY
venv/bin/python ask.py | tee seen

diff seen - <<'SEEN'
447 compressed-tensors: exponent 0, largest 448, 2^-9 kept: True
447 mlx: exponent 0, largest 448, 2^-9 kept: True
447 torchao FLOOR: exponent 0, largest 448, 2^-9 kept: True
447 torchao RCEIL: exponent 0, largest 448, 2^-9 kept: True
447 torchao CEIL: exponent 1, largest 448, 2^-9 kept: False
447 torchao EVEN: exponent 0, largest 448, 2^-9 kept: True
448 compressed-tensors: exponent 1, largest 448, 2^-9 kept: False
448 mlx: exponent 0, largest 448, 2^-9 kept: True
448 torchao FLOOR: exponent 0, largest 448, 2^-9 kept: True
448 torchao RCEIL: exponent 0, largest 448, 2^-9 kept: True
448 torchao CEIL: exponent 1, largest 448, 2^-9 kept: False
448 torchao EVEN: exponent 0, largest 448, 2^-9 kept: True
449 compressed-tensors: exponent 1, largest 448, 2^-9 kept: False
449 mlx: exponent 1, largest 448, 2^-9 kept: False
449 torchao FLOOR: exponent 0, largest 448, 2^-9 kept: True
449 torchao RCEIL: exponent 1, largest 448, 2^-9 kept: False
449 torchao CEIL: exponent 1, largest 448, 2^-9 kept: False
449 torchao EVEN: exponent 0, largest 448, 2^-9 kept: True
SEEN
