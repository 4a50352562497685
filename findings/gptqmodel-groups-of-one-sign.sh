#!/usr/bin/env bash
# GPTQModel's symmetric grid cuts a group of weights that are all positive to less than half.
#
# A symmetric 4-bit grid has the codes 0..15 around 8. For a group with a negative weight the step is twice the
# largest magnitude over 15. For a group without one the lower end of the range stays at zero, so the step is half of
# that, while the zero point stays 8: seven steps remain above zero and everything beyond 7/15 of the largest weight
# is cut off. The same numbers with their signs turned are rounded well, and one weight of -1e-6 among them mends the
# group. The rounding that follows cannot make up for it: the codes end at 15.
#
# The rule is met in the class that finds the steps, as the solver calls it: one row, one group.
# Seen on 2026-11-27 with gptqmodel 7.6.0, torch 2.13.0 (CPU).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0 setuptools==84.2.1 wheel==0.48.0 ninja==1.13.2 numpy==2.2.6
venv/bin/pip install --quiet --no-compile --no-build-isolation torch==2.13.0 gptqmodel==7.6.0 optimum==2.3.0 numpy==2.2.6

cat > ask.py <<'PY'
import torch
from gptqmodel.quantization.config import QuantizeConfig
from gptqmodel.quantization.quantizer import Quantizer

positive = torch.linspace(0.1, 1.5, 32)[None]
mended = positive.clone()
mended[0, 0] = -1e-6
quantizer = Quantizer(QuantizeConfig(bits=4, group_size=32, sym=True))
quantizer.configure(perchannel=True)
for name, weights in {"positive": positive, "negative": -positive, "one of -1e-6": mended}.items():
    quantizer.find_params(weights, weight=True)
    decoded = quantizer.quantize(weights)
    error = (decoded - weights).norm() / weights.norm()
    print(
        f"{name}: zero point {quantizer.zero.item():.0f}, largest {weights.abs().max():.2f}"
        f" decoded as {decoded.abs().max():.2f}, error {error:.3f}"
    )
PY
GPTQMODEL_CPU_WORKERS=2 venv/bin/python ask.py 2> said | grep 'decoded as' | tee seen

diff seen - <<'SEEN'
positive: zero point 8, largest 1.50 decoded as 0.70, error 0.398
negative: zero point 8, largest 1.50 decoded as 1.60, error 0.066
one of -1e-6: zero point 8, largest 1.50 decoded as 1.40, error 0.063
SEEN
