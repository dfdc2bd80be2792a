# Everything sets itself up from Python 3.11 or later; Java 17 is for Spark.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
RUN    := $(VENV)/bin
READY  := $(VENV)/.ready
PROCESSES ?= 3
# Tests start hundreds of programs: each would compile Penstock again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup tools prepared demo kafka test quick soak check format rows bench clean

help: ## Show what can be made.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or later: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) …"
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

setup: $(READY) ## Make the virtual environment.

prepared: $(READY) # Spark starts sooner; see docs/running.md
	@$(RUN)/python -c 'from penstock.spark import java; assert java.archive().exists()' 2> /dev/null || \
	  $(RUN)/penstock prepare || true

demo: $(READY) ## A shop on Spark under load, killed with -9 in the middle, checked to the cent.
	@$(RUN)/python -m examples.demo

kafka: $(READY) ## Start a Kafka broker on loopback and print its address; Ctrl-C stops it.
	@$(RUN)/python -m penstock.testing.brokers

tools: ## Install what tests use: kcat, Redis and PostgreSQL (Debian, as root).
	@{ command -v kcat && command -v redis-server && ls /usr/lib/postgresql; } > /dev/null 2>&1 || \
	  test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
	  { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
	    --no-install-recommends kcat redis-server postgresql > /dev/null; }

test: $(READY) tools prepared ## Run all tests (what CI runs).
	$(RUN)/python -m pytest -m 'not soak' -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 60 --durations-min 10

quick: $(READY) ## Run the tests that need neither Spark nor servers: a minute.
	$(RUN)/python -m pytest -m 'not soak' -n 2 --dist loadfile --no-loadscope-reorder tests/unit tests/property \
	  tests/contract/test_embedded.py tests/app/test_declaring.py tests/connect/test_wire.py

soak: $(READY) tools prepared ## Run the long random fault tests; the seed is printed.
	$(RUN)/python -m pytest -m soak -s

check: $(READY) ## Lint, types and layers.
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-cache

format: $(READY) ## Format the code.
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

rows: $(READY) ## Which checklist rows the last test run proved.
	@$(RUN)/python -m tests.rows

bench: $(READY) ## Measure, as ratios in one run; writes docs/benchmarks.json and the table.
	$(RUN)/python -m bench

clean: ## Remove everything that was made.
	rm -rf $(VENV) .work .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
