# `make demo` and `make test` do all their own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check models gpu-test gpu-memcheck format clean

demo: $(STAMP)
	$(BIN)/tilewise demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto

# What CI runs besides the tests.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Retrains every shipped model from datasets/; equal data gives equal bytes.
models: $(STAMP)
	$(BIN)/python benchmarks/train_models.py

# On a machine with an NVIDIA GPU whose Python already has PyTorch and Triton.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -p no:cacheprovider

# A kernel of each family, every tensor in an allocation of its own so that no overrun hides.
gpu-memcheck:
	PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
	  --error-exitcode 1 $(PYTHON) -m pytest tests/gpu/test_gemm_gpu.py -p no:cacheprovider \
	  -k "test_sizes or epilogue or bias_and_activation or scaled_fp8"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
