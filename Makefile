# Two commands on a fresh machine: `make train`, `make test`. Everything installs into .venv; nothing has to be activated.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Parallel test workers: one per core, at most eight. `make test WORKERS=1` runs in one process.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))')
PYTEST := -m pytest -n $(WORKERS) --dist worksteal

.PHONY: install train test test-fast lint bench docs soak gpu-test clean

install: .venv/.installed

# The stamps make a second run start at once; a changed pyproject or constraints file installs again.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Redline needs Python 3.11 or newer; set PYTHON=/path/to/python3."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Redline into .venv ..."
	@$(PIP) -e '.[web]'
	@touch $@

# The tests of the page drive Chromium; where it is missing, Debian's package is installed if that is allowed, else they are skipped.
# The Mario emulator is built from source before Python 3.13; where that fails, its tests are skipped.
.venv/.test-installed: .venv/.installed
	@echo "Installing the test dependencies into .venv ..."
	@$(PIP) -e '.[test]'
	@$(PIP) -e '.[mario]' >/dev/null 2>&1 || echo "The mario extra does not install here: tests with the real emulator are skipped."
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get -qq install -y chromium >/dev/null 2>&1; } || echo "There is no Chromium here: tests in the browser are skipped."
	@touch $@

train: .venv/.installed
	@$(BIN)/redline train snake --dashboard

test: .venv/.test-installed lint
	@$(BIN)/python $(PYTEST)

# Without the tests listed in tests/slow_tests.txt: those that compile, start processes or train for long.
test-fast: .venv/.test-installed
	@$(BIN)/python $(PYTEST) --fast

lint: .venv/.test-installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/.test-installed
	@$(BIN)/redline bench --out bench.json
	@$(BIN)/python bench/peers.py

.venv/.docs-installed: .venv/.installed
	@echo "Installing mkdocs into .venv ..."
	@$(PIP) -e '.[docs]'
	@touch $@

# Generated pages: docs/benchmarks.md from bench/results/*.json, docs/reliability.md from the marks of the tests,
# docs/reference/cli.md from the options of the commands. Then the site, in site/, with a reference from the docstrings.
docs: .venv/.docs-installed
	@$(BIN)/python bench/make_benchmarks_page.py
	@$(BIN)/python bench/make_reliability_page.py
	@$(BIN)/python bench/make_cli_page.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html; $(BIN)/mkdocs serve shows it with search."

# Half an hour of training with a fault every 20 to 40 seconds; SOAK="--minutes 5" for less.
soak: .venv/.installed
	@$(BIN)/python bench/soak.py $(SOAK)

# On a machine with a GPU and its own torch: uses the interpreter as it is, installs nothing.
# Each worker compiles by itself: with as many workers as cores, the compiler's own processes only get in their way.
gpu-test:
	@PYTHONPATH=src:$$PYTHONPATH TORCHINDUCTOR_COMPILE_THREADS=1 $(PYTHON) -m pytest -m 'gpu and not alone' -n $$(( $$(nproc) > 15 ? 15 : $$(nproc) )) --dist load --maxschedchunk 1
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -m 'gpu and alone'

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache
