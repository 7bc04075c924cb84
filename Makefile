# `make demo` and `make test` do all their own set-up in .venv; each installs only what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Progress bars even where the output is a file: an installation in silence looks like a hang.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on

# PyTorch is large, and the demo needs it for GPUs alone.
GPU ?= $(wildcard /dev/nvidiactl)
COMMA := ,

.PHONY: docs demo test test-quick check extras package models fuzz gpu-test gpu-memcheck gpu-export format clean

demo: $(VENV)/.demo
	$(BIN)/tilewise demo

test: $(VENV)/.test
	@echo "The whole test suite: about twenty minutes on two cores (make test-quick: two minutes)."
	$(BIN)/python -m pytest -n auto

# No kernel is timed and no cluster started: what one wants to know after every edit.
test-quick: $(VENV)/.test
	@echo "The quick tests: about two minutes on two cores."
	$(BIN)/python -m pytest -n auto -m "not slow" tests/unit

# What CI runs besides the tests.
check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/site; a broken link or page is an error.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Every extra of pyproject.toml resolves on plain PyPI; nothing is installed.
extras: $(VENV)/.test
	$(BIN)/python .ci/extras.py

# Wheel and sdist, built, installed and tried in a clean environment.
package: $(VENV)/.test
	$(BIN)/python .ci/package.py

# Retrains every shipped model from datasets/; equal data gives equal bytes.
models: $(VENV)/.test
	$(BIN)/python benchmarks/train_models.py

# New cases every time: CASES of each test, or as many as SECONDS give it. What fails is shown smallest
# first. `make test` tries a few. Threads that wait for small work asleep leave the cores to others.
CASES ?= $(if $(SECONDS),500,5000)
fuzz: $(VENV)/.test
	OMP_WAIT_POLICY=passive FUZZ_CASES=$(CASES) FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest -n auto tests/fuzz

# On a machine with an NVIDIA GPU whose Python already has PyTorch and Triton.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -p no:cacheprovider

# A kernel of each family, every tensor in an allocation of its own so that no overrun hides.
gpu-memcheck:
	PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
	  --error-exitcode 1 $(PYTHON) -m pytest tests/gpu/test_gemm_gpu.py -p no:cacheprovider \
	  -k "test_sizes or epilogue or bias_and_activation or scaled_fp8"
	PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
	  --error-exitcode 1 $(PYTHON) -m pytest tests/gpu/test_families_gpu.py -p no:cacheprovider

# Exported C++ libraries: results against float64, once more under memcheck, and what calls cost
# beside cuBLASLt. All three are tried; the last line says whether any failed.
gpu-export:
	@export PYTHONPATH=src; failed=; \
	$(PYTHON) -m pytest tests/gpu/test_export_gpu.py -p no:cacheprovider || failed="$$failed results"; \
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	  $(PYTHON) -m pytest tests/gpu/test_export_gpu.py -p no:cacheprovider || failed="$$failed memcheck"; \
	$(PYTHON) benchmarks/cpp_dispatch.py || failed="$$failed times"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@echo "Making an environment in $(VENV)."
	$(PYTHON) -m venv $(VENV)

# Stamps of their own: the demo never waits for PyTorch, Ray or the linters.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "Installing what the demo needs: $(if $(GPU),PyTorch for the NVIDIA GPU$(COMMA) some GB,about 130 MB$(COMMA) no PyTorch)."
	$(INSTALL) --editable '.[demo$(if $(GPU),$(COMMA)gpu)]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "Installing what the tests need, PyTorch and Ray among it: some minutes the first time."
	$(INSTALL) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
