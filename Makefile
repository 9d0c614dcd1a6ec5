# Everything a user or CI runs. `make ai-v4` sets up this machine and does the main job; `make test` passes the tests.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
ENVIRONMENTS := base-v3 base-v4 ai-v4

.PHONY: setup test quick lint clean $(ENVIRONMENTS)

# Build an environment's image and prove it: imports and one training step, inside the image.
$(ENVIRONMENTS): setup
	$(BIN)/envbuilder build $@
	$(BIN)/envbuilder launch $@ -- python examples/first_step.py

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml tools/machine
	PYTHON=$(PYTHON) bash tools/machine
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The quick tests: under two minutes, no network but loopback.
quick: lint
	$(BIN)/pytest

# All tests: the quick ones, then those that need a Docker engine or download gigabytes.
test: lint
	bash tools/machine --tests
	$(BIN)/pytest
	$(BIN)/pytest -m "slow or docker"

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
