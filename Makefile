# Every target sets up what it needs. Options of the set-up: make demo SETUP="--device cpu --find-links /my/wheels"

PYTHON ?= python3
VENV   ?= .venv
SETUP  ?=
DRAWN  ?=
RUN    := $(VENV)/bin/python -m
BOOT   := $(PYTHON) bootstrap.py --venv $(VENV) $(SETUP)
# One core a worker: torch would otherwise start as many threads in each as there are cores. Bytecode is written even if
# the environment forbids it, because a hundred processes of the tests import the package.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) pytest -n auto --maxprocesses 8

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-gpu test-drawn hub-kernel lint docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make the environment in .venv, with a torch for this machine
	@$(BOOT)

demo: ## A real transformer through our attention and torch's: same answers, times side by side (a minute)
	@$(BOOT) --need workbench
	@$(RUN) warpwave demo

test: ## What every change has to pass; needs no GPU (under 15 minutes on two cores)
	@$(BOOT) --need workbench --need test
	$(PYTEST)

test-full: ## The full matrix of cases and compile targets
	@$(BOOT) --need workbench --need test
	$(PYTEST) -m ""

test-gpu: ## What only a GPU can show, on the GPU of this machine
	@$(BOOT) --need workbench --need test
	$(PYTEST) -m gpu

test-drawn: ## Calls drawn from all that kernels claim, held against float64, for five minutes (DRAWN="--minutes 1")
	@$(BOOT) --need workbench --need test
	$(RUN) tests.conformance.drawn $(DRAWN)

hub-kernel: ## The package as a kernel for Hugging Face's `kernels` library, in dist/hub
	$(PYTHON) hub_kernel.py

lint: ## Format, lint and type checks
	@$(BOOT) --need lint
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

docs: ## The documentation as a site, in site/; every warning is an error
	@$(BOOT) --need docs
	$(RUN) mkdocs build --strict --quiet

clean: ## Remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
