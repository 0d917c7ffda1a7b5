# Each target makes its own environment in .venv on first use and is quick afterwards.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all soak lint bench clean

demo: $(INSTALLED)
	$(PY) -m recipes.demo

test: lint
	$(PY) -m pytest -q -m "not slow and not soak"

test-all: lint
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev,models]"
	$(PY) -m pytest -q -m "not soak"

soak: $(INSTALLED)
	$(PY) -m pytest -q -s -m soak tests/soak

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) -m benchmarks $(ARGS)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache logs
