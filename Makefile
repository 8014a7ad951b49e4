# Targets:
#   demo            train a small language model from random weights with GRPO; five minutes on two cores
#   install         create the virtual environment, or repair it
#   test            run the default tests
#   test-all        run all tests, the slow ones included
#   lint            run ruff, mypy, the import contract, and the check of locked packages
#   lock            lock the packages of pyproject.toml with hashes; needs network
#   audit           look up known vulnerabilities of the locked packages; needs network
#   docs            build the documentation site into site/; a broken link or reference fails
#   gpu-check       check and time everything that computes on a GPU; 25 minutes on one GPU, 5 on a CPU with SHORT=1
#   screenshots     picture the console for the documentation; needs Chromium
#   console-demo    record the run that `relax console --demo` shows; a minute on two cores
#   bench           compare with TRL
#   bench-recovery  measure the recovery of every part of a run, then a soak test of a quarter of an hour
#   chaos           kill a run a hundred times and compare its weights; then the slow tests of faults
#   fuzz            send a million malformed messages to live runs; about half an hour
#   compose-test    test docker-compose.yml; needs a Docker engine with compose
#   omni            train small models that see and hear on four tasks, about five minutes each
#   agents          train small models that act by turns, call tools (calculator, zoom), and play solver and critic
#   sequence        train a small model in three stages: on examples, on preferences, with a reward; score each; three minutes
#   smollm2         train a 135M-parameter model on arithmetic
#   media           install the packages for models that take images, video and sound
#   megatron        install the packages for trainer.backend = "megatron"
#   sglang          install the packages for rollout.backend = "sglang"
#   clean           remove the virtual environment, runs and build outputs
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Without an NVIDIA GPU, torch is the CPU build. Another one:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130     an index for torch
#   make demo TORCH_INDEX=                                           pip's configured index
#   make demo TORCH=torch==2.12.0                                    a version of torch
INSTALL = $(PYTHON) deploy/install.py --venv $(VENV)

export OMP_NUM_THREADS = 1
# Runs and tests start many processes; without cached byte code each compiles the code anew, for up to a second.
export PYTHONDONTWRITEBYTECODE =

.PHONY: screenshots console-demo gpu-check demo install media megatron sglang test test-all chaos fuzz compose-test lint lock audit docs bench bench-recovery omni agents sequence smollm2 clean
.DELETE_ON_ERROR:

# Written by deploy/install.py, which removes it while it changes the environment.
$(VENV)/.base: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "install: no $(PYTHON); install Python 3.11 or later: make PYTHON=python3.12"; exit 1; }
	@$(INSTALL)

# One for each extra of pyproject.toml. Torch with CUDA gets SGLang with its own kernels, the CPU build a substitute.
$(VENV)/.%: pyproject.toml | $(VENV)/.base
	@$(INSTALL) $*
	@touch $@

# SETTINGS="run.seed=2 run.name=demo2" overrides keys of the configuration.
demo: $(VENV)/.base
	$(BIN)/relax up examples/demo/demo.toml $(SETTINGS)

install: $(VENV)/.base

# Decoders of media; `make test` installs them too.
media: $(VENV)/.media

# Its tests run where it is installed.
megatron: $(VENV)/.megatron

# With CUDA or without; its tests run where it is installed.
sglang: $(VENV)/.sglang
$(VENV)/.sglang: $(wildcard deploy/sglang-cpu/src/*/*.py)

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

# Ends with a list of what was skipped, and why.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest -rs

chaos: $(VENV)/.test
	$(BIN)/python -m tests.chaos.equivalence --kills 100
	$(BIN)/python -m pytest -m slow tests/chaos

# A shorter run: make fuzz COUNT=100000 SEED=7
COUNT ?= 1000000
SEED ?= 0
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.chaos.fuzz --count $(COUNT) --seed $(SEED)

# Trains with one container per role; kills, disconnects and scales them. Some of its tests: make compose-test COMPOSE_TESTS=killed
COMPOSE_TESTS ?=
compose-test: $(VENV)/.test
	docker build -f deploy/docker/Dockerfile -t relax-actors $(BUILD) .
	$(BIN)/python -m pytest -s -rs tests/e2e/compose -k "$(COMPOSE_TESTS)"

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/lock.py --check

# deploy/requirements: what `make` and the image install, with hashes. make lock UPGRADE=--upgrade takes the newest versions.
lock: $(VENV)/.lint
	$(BIN)/pip install --quiet uv
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python deploy/lock.py $(UPGRADE)

# Known vulnerabilities of the locked packages; asks the databases of PyPI, so it needs network.
audit: $(VENV)/.lint
	$(BIN)/pip install --quiet pip-audit
	for file in deploy/requirements/*.txt; do $(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement $$file || exit 1; done

# Regenerates the pages and code blocks that are made from the code first.
docs: $(VENV)/.docs
	$(BIN)/python docs/make_config.py
	$(BIN)/python docs/make_subjects.py
	$(BIN)/python docs/make_refusals.py
	$(BIN)/python docs/make_families.py
	$(BIN)/python docs/make_rules.py
	$(BIN)/python docs/make_algorithms.py
	$(BIN)/python docs/make_samples.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Needs no network. What is not installed (Megatron-Core, SGLang, TRL) is skipped, and said; some checks: CHECKS="attention demo".
CHECKS ?=
gpu-check: $(VENV)/.base
	$(BIN)/python benchmarks/gpu_check.py $(if $(SHORT),--short) $(if $(CHECKS),--only $(CHECKS))

# Trains a short demo; needs Chromium (apt install chromium).
screenshots: $(VENV)/.base $(VENV)/.browser
	$(BIN)/python docs/make_screenshots.py

console-demo: $(VENV)/.base
	$(BIN)/python docs/make_console_demo.py

bench: $(VENV)/.test
	$(BIN)/python benchmarks/grpo_vs_trl.py

# Kills every part of a run ten times, then a random part every 20 of 2,000 steps.
bench-recovery: $(VENV)/.base
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/soak.py --picture docs/soak.png

# One task: make omni TASKS=sound. Sound and omni need espeak-ng (apt install espeak-ng).
omni: TASKS ?= image sound video omni
omni: $(VENV)/.omni
	@$(BIN)/python examples/omni/make_data.py --tasks $(TASKS)
	@for task in $(TASKS); do \
		$(BIN)/relax up examples/omni/$$task.toml $(SETTINGS) || exit 1; \
		$(BIN)/python examples/omni/show.py $$task || exit 1; \
	done

# Models learn to sort by turns, to use a calculator, to look closer at a picture, and to play solver and critic.
# One task: make agents TASKS=zoom.
agents: TASKS ?= pick calculator zoom review
agents: $(VENV)/.omni
	@for task in $(TASKS); do \
		$(BIN)/relax up examples/agents/$$task.toml $(SETTINGS) || exit 1; \
	done

sequence: $(VENV)/.base
	$(BIN)/relax up examples/sequence/sequence.toml $(SETTINGS)
	$(BIN)/relax eval stages examples/sequence/sequence.toml $(SETTINGS) --json

smollm2: $(VENV)/.smollm2
	$(BIN)/python examples/smollm2/prepare.py
	$(BIN)/relax up examples/smollm2/smollm2.toml $(SETTINGS)

clean:
	rm -rf $(VENV) $(VENV).lock runs .bench site
