# A fresh machine needs only make and Python 3.11 or later:
#   make train    the main job: trains a small language model at a ZeRO stage (ARGS="--stage 2" and so on)
#   make test     lint, and the tests that take seconds each

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
ARGS ?=

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

.PHONY: train test test-slow lint clean

train: $(VENV)/installed-train
	$(BIN)/python -m zero_jax train $(ARGS)

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed-test
	$(PYTEST) -m slow $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

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
