# A fresh machine needs only make and Python 3.11 or later:
#   make train      the main job: trains a small language model at a ZeRO stage (ARGS="--stage 2" and so on)
#   make test       lint, and the tests that take seconds each
#   make test-slow  the others
#   make test-gpu   what one GPU is enough for, on the GPU of this host (with jax[cuda13] in .venv)
#   make docs       the site, into build/docs; warnings are errors
#   make dist       sdist and wheel, into build/dist; the wheel is installed elsewhere and trains there

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# A worker for each core, as far as there are 2 GiB of memory for each.
WORKERS ?= $(shell $(PYTHON) -c 'import os; pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"); \
  print(max(1, min(os.cpu_count(), pages >> 31)))')

BIN := $(VENV)/bin
PYTEST = MALLOC_ARENA_MAX=2 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations 10 --durations-min 1

.PHONY: train test test-slow test-gpu lint docs dist clean

train: $(VENV)/installed-train
	$(BIN)/python -m zero_jax train $(ARGS)

# What a run compiles is kept for the next one in this checkout (tests/README.md), up to 3 GB.
test: export ZERO_JAX_TEST_PROGRAMS ?= $(CURDIR)/build/test-programs
test: lint
	@du -sm build/test-programs 2>/dev/null | awk '$$1 > 3000 { system("rm -r build/test-programs") }'
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed-test
	$(PYTEST) -m slow $(ARGS)

test-gpu: $(VENV)/installed-test
	ZERO_JAX_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTEST) tests/gpu $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs

dist: $(VENV)/installed-test
	rm -rf build/dist
	$(BIN)/python -m hatchling build -d build/dist
	$(BIN)/python scripts/reliability/installed_wheel.py build/dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache

# Stamps: an install is repeated only when pyproject.toml changes.
$(VENV)/installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("$(PYTHON) is %d.%d: give one from 3.11 on, as in make PYTHON=python3.12" \
	  % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
