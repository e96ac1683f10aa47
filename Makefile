# Each target sets up what it needs first: .venv in this folder, in seconds when it is already there.
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile
	@echo 'Pass options with ARGS, as in: make test ARGS="-k config"'

venv: ## Make .venv ready (PYTHON=... names a Python 3.11)
	@PYTHON="$(PYTHON)" bash scripts/setup-venv.sh

demo: venv ## Restart an engine and see what the restart cost
	.venv/bin/ucmcache demo $(ARGS)

test: venv ## Run the tests, some of them on a real vLLM engine
	@# What needs no engine first, since it fails sooner. ARGS may select none of either.
	.venv/bin/python -m pytest -n 2 -m "not e2e" $(ARGS) || { [ $$? -eq 5 ] && $(if $(ARGS),true,false); }
	.venv/bin/python -m pytest -n 2 -m e2e $(ARGS) || { [ $$? -eq 5 ] && $(if $(ARGS),true,false); }

lint: venv ## Check style and types
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

bench: venv ## Run every benchmark; each prints its table and writes its JSON
	@set -e; for script in benchmarks/[!_]*.py; do \
	  [ -e "$$script" ] || { echo "benchmarks/ holds no benchmark" >&2; exit 1; }; \
	  echo "$$script"; .venv/bin/python "$$script" $(ARGS); \
	done

clean: ## Remove caches and build outputs; .venv stays
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
