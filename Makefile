# Two commands do everything: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV ?= .venv
# Extra flags for pip, e.g. PIP_FLAGS="--extra-index-url URL" to take torch from a CPU-only index.
PIP_FLAGS ?=
BIN := $(VENV)/bin
# The oldest versions that ttvd allows, in an environment of their own.
OLDEST ?= $(VENV)/oldest
FUZZ_SECONDS ?= 300
OLDEST_TOOLS := pytest pytest-xdist hypothesis scipy shapely
# Threads that wait give their core away, and memory that is freed is kept for the next step: see docs/performance.md.
STEADY := OMP_WAIT_POLICY=passive MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592

.DEFAULT_GOAL := help
.PHONY: help demo test test-browser test-oldest lint format bench results soak fuzz wheel-check clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ttvd needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@$(BIN)/python tools/torchvision_stub.py
	@touch $@

$(OLDEST)/.done: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints-oldest.txt -e '.[demo]' $(OLDEST_TOOLS)
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[browser]'
	@touch $@

demo: $(VENV)/.demo  ## Adapt a digit classifier to corrupted digits; ends with a table and a page
	$(BIN)/ttvd demo --out out/demo

test: lint  ## Run all checks and tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-browser: $(VENV)/.browser  ## Test the pages in a headless Chromium, which is installed if need be
	browser=$$($(BIN)/python tools/find_browser.py) && \
		OMP_NUM_THREADS=1 TTVD_BROWSER="$$browser" $(BIN)/python -m pytest -q tests/browser

test-oldest: $(OLDEST)/.done  ## Test the core with the oldest versions of its dependencies
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n 2 $(addprefix tests/,geometry nn engine methods zoo source)

lint: $(VENV)/.dev  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## Measure what steps, sites and grids cost on this processor; one table
	$(STEADY) $(BIN)/python -m benchmarks.suite --out out/bench.csv

results: $(or $(wildcard $(VENV)/.dev),$(VENV)/.demo)  ## Make the tables and figures of results/ from the rows that are there
	$(BIN)/python tools/make_results.py

soak: $(VENV)/.dev  ## Run every method over 20,000 batches and watch its memory
	$(BIN)/python tools/soak.py

fuzz: $(VENV)/.dev  ## Read odd and damaged files of every kind for FUZZ_SECONDS, 300 unless given
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py --seconds $(FUZZ_SECONDS)
	OMP_NUM_THREADS=1 TTVD_FUZZ=20 $(BIN)/python -m pytest -q tests/data/test_damaged_files.py

wheel-check: $(VENV)/.dev  ## Build the wheel, install it into an empty environment and use it
	$(BIN)/python tools/wheel_check.py --constraints constraints.txt

clean:  ## Remove what the commands made
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
