# One venv, made from the lock; every target runs in it. `make help` lists the targets. It has the command
# `.venv/bin/raypost`, which runs the code of the folder that it is reached through, as it is: worktrees may share a venv.
#
# RECIPE=smollm2          another recipe of jobs/recipes, or a path ending in .yaml
# ARGS="train.num_steps=5 --name trial"
#                         overrides and options for jobs.run
# TORCH_INDEX=...         package index that has CPU builds of torch, where the default index has none
# PYTHON=...              a Python 3.11, where none is found
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Tests start hundreds of processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help install bwrap run test test-all chaos cover check docs format lock clean

RECIPE ?= quickstart
ARGS ?=
PYTEST_ARGS ?=
TORCH_INDEX ?=
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-cpu.lock
INSTALLED := $(VENV)/installed.lock
COMMAND := $(BIN)/raypost
# State machines run hundreds of short histories: measuring them nearly triples their time.
STATEFUL := tests/unit/test_producer_invariants.py $(wildcard tests/unit/test_*_stateful.py)
# Property tests: `make test-all` has them try ten times as many histories.
HISTORIES = $(shell grep -l max_examples=examples tests/unit/*.py)
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# Those that start processes mostly wait for them. A file stays together: its tests share engines and runs.
PAIRED := -n 2 --dist loadfile --no-loadscope-reorder
CONFIG = $(if $(filter %.yaml,$(RECIPE)),$(RECIPE),jobs/recipes/$(RECIPE).yaml)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

install: $(INSTALLED) $(COMMAND) bwrap  ## make the venv, with the command .venv/bin/raypost

run: install  ## train on this machine: RECIPE=quickstart ARGS="train.num_steps=5"
	@exec $(BIN)/python -m jobs.run --config $(CONFIG) $(ARGS)

test: install  ## unit tests, actor tests, end-to-end tests
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(PARALLEL) tests/unit tests/test_layers.py tests/test_types.py
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/peers
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(PAIRED) tests/actors tests/jobs

test-all: test  ## those, and the slow ones
	RAYPOST_THOROUGH=10 $(BIN)/python -m pytest $(PYTEST_ARGS) $(PARALLEL) $(HISTORIES)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow tests/unit tests/actors tests/jobs
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow tests/chaos

chaos: install  ## kill a scripted run 200 times and audit what it leaves: ten minutes
	$(BIN)/python -m pytest -s $(PYTEST_ARGS) -m slow tests/chaos/test_chaos.py

cover: install  ## the lines and branches that unit tests do not reach
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(PARALLEL) --cov --cov-report=term $(STATEFUL:%=--ignore=%) tests/unit

check: install  ## lint, format, types, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: install  ## build the documentation into site/, and fail on a broken link or reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict
	@echo "Open site/index.html; its search needs a server: $(BIN)/python -m http.server -b 127.0.0.1 -d site"

format: install  ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The lock is compared by content, comments left out: a checkout renews its date. A changed lock makes a new
# venv, so that nothing is left of the old one. Two makes at once take turns.
$(INSTALLED): $(LOCK)
	@if command -v flock >/dev/null; then exec 9<Makefile; flock 9; fi; \
	if grep == $(LOCK) | cmp -s - $@; then touch $@; exit 0; fi; \
	for python in $(PYTHON) python3.11 python3 python "$$HOME"/.pyenv/versions/3.11.*/bin/python; do \
	  if "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "make: no Python 3.11 with ensurepip found; install it (Debian: python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "Installing $$(grep -c == $(LOCK)) packages into $(VENV), once; this takes some minutes."; \
	"$$found" -m venv --clear $(VENV); \
	$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check --no-deps \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $(LOCK) \
	  || { echo "make: installing $(LOCK) failed; the cause is above, and the next make tries again" >&2; exit 1; }; \
	grep == $(LOCK) >$@

# From a checkout's root Python finds that checkout first, from elsewhere the one that the command belongs to.
define COMMAND_TEXT
#!/bin/sh
root=$$(cd "$$(dirname "$$0")/../.." && pwd -L)
PYTHONPATH="$$root$${PYTHONPATH:+:$$PYTHONPATH}" exec "$$root/.venv/bin/python" -m raypost "$$@"
endef
export COMMAND_TEXT

$(COMMAND): $(INSTALLED) Makefile
	@printf '%s\n' "$$COMMAND_TEXT" >$@.new; chmod +x $@.new; mv $@.new $@

# For judge.kind code. Without root: Debian's package, unpacked into the venv, with package lists of its own where the
# machine has none. Tried once.
bwrap: $(INSTALLED)
	@if command -v bwrap >/dev/null || [ -x $(BIN)/bwrap ]; then exit 0; fi; \
	if [ ! -e $(VENV)/no-bwrap ]; then \
	  touch $(VENV)/no-bwrap; bin=$$(cd $(BIN) && pwd); folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  ( cd "$$folder"; mkdir -p lists/partial cache/archives/partial; \
	    own="-o Dir::State=$$folder -o Dir::Cache=$$folder/cache -o Debug::NoLocking=1"; \
	    timeout 30 apt-get -qq download bubblewrap \
	    || { timeout 60 apt-get -qq $$own update && timeout 30 apt-get -qq $$own download bubblewrap; }; \
	    dpkg -x bubblewrap*.deb unpacked && install -m 755 unpacked/usr/bin/bwrap "$$bin/bwrap" \
	  ) >/dev/null 2>&1 || true; \
	fi; \
	[ -x $(BIN)/bwrap ] || echo "make: bubblewrap is not here and could not be fetched: judge.kind code is refused and the tests of the sandbox are skipped until it is installed (apt-get install bubblewrap)" >&2

lock:  ## solve pyproject.toml into the lock, with uv
	@uv=$$(command -v uv || true); \
	if [ -z "$$uv" ]; then \
	  $(or $(PYTHON),python3.11) -m venv .venv-uv; .venv-uv/bin/python -m pip install -qq --disable-pip-version-check uv; \
	  uv=.venv-uv/bin/uv; \
	fi; \
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" "$$uv" pip compile pyproject.toml \
	  --extra cpu --extra dev --extra smollm2 --python-version 3.11 \
	  --no-emit-index-url --no-emit-find-links --no-header -q -o $(LOCK)

clean:  ## remove the venv and all caches; runs/ stays
	rm -rf $(VENV) .venv-uv site .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find raypost actors jobs tests bench -name __pycache__ -prune -exec rm -rf {} +
