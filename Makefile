SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON := .venv/bin/python
STAMP := .venv/.stamp
SHELL_FILES := $(filter-out %.py,$(wildcard scripts/* .ci/run sbatch/*.sbatch))
COUNT := 100
SEED := 0
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.PHONY: help setup demo soak test lint torture bench clean

help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## install what is missing: Debian packages, and .venv with everything in it

$(STAMP): pyproject.toml constraints.txt $(wildcard scripts/*)
	scripts/install-packages
	scripts/make-venv
	touch $@

demo: setup ## a run on spot that is interrupted and survives; report in results/demo
	$(PYTHON) -m slurmspot study demo --out results/demo

soak: setup ## COUNT interruptions of every kind in one run (default 100); summary in results/soak
	$(PYTHON) -m slurmspot.study.soak --count $(COUNT) --seed $(SEED) --out results/soak

test: setup lint ## every check: lint, unit tests, and tests on a real Slurm cluster
	$(PYTHON) -m pytest -q tests/unit tests/cluster

lint: setup ## ruff, mypy and shellcheck
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	shellcheck $(SHELL_FILES)

torture: setup ## kill, freeze, damage and fill at length: no checkpoint is lost, no damage unfound
	$(PYTHON) tests/unit/checkpoint/torture.py

bench: setup ## run every benchmark; what needs a GPU says so and is passed over
	for file in $(BENCHMARKS); do echo "== $$file"; $(PYTHON) "$$file" || test $$? = 3; done

clean: ## remove results and caches, but not .venv
	rm -rf results dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
