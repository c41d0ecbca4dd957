# `make train` and `make test` set up their own environment in .venv; see the README.

SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
# JAX's CUDA libraries where there is an NVIDIA GPU.
GPU_EXTRA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda13)
SETUP := $(VENV)/.done-dev$(GPU_EXTRA)
# Flags of `make train`, such as ARGS="--preset llama3.2-1b --steps 20".
ARGS ?=

.PHONY: train test test-gpu lint setup clean

train: setup
	@$(PYTHON) -m train $(ARGS)

test: setup
	@$(PYTHON) -m pytest $(ARGS)

test-gpu: setup
	@$(PYTHON) -m pytest -m gpu $(ARGS)

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

setup: $(SETUP)

# The first interpreter of version 3.12 or later that can make environments: .python-version as pyenv reads it,
# the usual names, then pyenv's own folder.
$(SETUP): pyproject.toml
	@for candidate in python3.12 python3.13 python3.14 python3 python \
	    $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin/python; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; \
	    then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No Python 3.12 or later with the venv module was found. Install one and run this again:"; \
	  echo "  Debian or Ubuntu: apt install python3.12 python3.12-venv"; \
	  echo "  pyenv:            pyenv install 3.12"; \
	  echo "  uv:               uv python install 3.12, then put it on PATH"; \
	  exit 1; \
	fi; \
	echo "setting up $(VENV) with $$("$$found" --version)$(if $(GPU_EXTRA), and JAX for CUDA 13,)"; \
	rm -f $(VENV)/.done-*; \
	"$$found" -m venv $(VENV) && \
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[dev$(GPU_EXTRA)]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
