# Two commands on a fresh machine: `make train`, `make test`. Everything installs into .venv; nothing is activated by hand.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install train test lint bench gpu-test clean

install: .venv/.installed

# The stamps make a second run start at once; a changed pyproject or constraints file installs again.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Redline needs Python 3.11 or newer; set PYTHON=/path/to/python3."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Redline into .venv ..."
	@$(PIP) -e .
	@touch $@

.venv/.test-installed: .venv/.installed
	@echo "Installing the test needs into .venv ..."
	@$(PIP) -e '.[test]'
	@touch $@

train: .venv/.installed
	@$(BIN)/redline train snake

test: .venv/.test-installed lint
	@$(BIN)/python -m pytest

lint: .venv/.test-installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/.test-installed
	@$(BIN)/redline bench env
	@$(BIN)/redline bench train
	@$(BIN)/python bench/peers.py

# On a machine with a GPU and its own torch: uses the interpreter as it is, installs nothing.
gpu-test:
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -m gpu

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
