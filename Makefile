# `make train` and `make test` set up their own environment in .venv; see the README.

SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
# JAX's CUDA libraries where there is an NVIDIA GPU.
GPU_EXTRA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda13)
SETUP := $(VENV)/.done-dev$(GPU_EXTRA)
# Flags of `make train`, such as ARGS="--preset llama3.2-1b --steps 20".
ARGS ?=

# The versions of JAX that the kernels must compile on, each in an environment of its own.
AOT_JAX := 0.11.2 latest
AOT_SPEC_0.11.2 := jax==0.11.2
AOT_SPEC_latest := jax>=0.12,<0.13

# Sets `found` to the first interpreter of version 3.12 or later that can make environments: .python-version as
# pyenv reads it, the usual names, then pyenv's own folder.
define FIND_PYTHON
for candidate in python3.12 python3.13 python3.14 python3 python \
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
fi
endef

.PHONY: train plan tune test test-all test-gpu test-gpus test-aot test-foreign wheel docs lint setup \
  aot-environments clean

train: setup
	@$(PYTHON) -m train $(ARGS)

# What fits on a GPU that need not be here, such as ARGS="--preset llama3.1-8b --device h100 --num-devices 8".
plan:
	@$(MAKE) --silent --no-print-directory .venv-aot/latest/.done
	@.venv-aot/latest/bin/python -m train plan $(ARGS)

# The fastest launch parameters on this card, for PALLAS_KERNELS_TUNED. It goes on where it ended.
tune: setup
	@$(PYTHON) -m benchmarks.kernels.tune --output tuned.json $(ARGS)

# jaxtyping rewrites the sources in every process that finds no bytecode: 5 s of 20 until the tests
# are collected.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: setup
	@$(PYTHON) -m pytest -n auto --dist worksteal $(ARGS)

# With the whole cross of cases of each kernel, of which `make test` runs every pair of values.
test-all: setup
	@$(PYTHON) -m pytest -n auto --dist worksteal --full $(ARGS)

# Nearly all of the time is compilation, so several processes share the GPU, and each gives memory
# back at once. XLA's search for the fastest GEMM is off: it changes no result, and every process
# would repeat it. tests/conftest.py puts the longest tests first. Tests of many GiB follow alone:
# beside others they ran out of the memory of an 80 GB card.
test-gpu test-gpus: export XLA_PYTHON_CLIENT_ALLOCATOR = platform
test-gpu test-gpus: export XLA_FLAGS += --xla_gpu_autotune_level=0
test-gpu: setup
	@$(PYTHON) -m pytest -m "gpu and not gpus and not large" -n auto --maxprocesses 12 $(ARGS)
	@$(PYTHON) -m pytest -m "gpu and large" tests/gpu $(ARGS)

# The tests that need several GPUs.
test-gpus: setup
	@$(PYTHON) -m pytest -m gpus $(ARGS)

# Compiles the kernels for GPUs that are not here, which needs Linux and a package index. A check that
# cannot run is a failure.
# Both versions at once: where one waits for its last program, cores are free for the other.
test-aot:
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(AOT_JAX:%=test-aot-%)

test-aot-%:
	@$(MAKE) --silent --no-print-directory .venv-aot/$*/.done || { \
	  echo "test-aot: NOTHING WAS CHECKED on JAX $*: its CUDA compilers could not be installed, for the reason above"; \
	  exit 1; \
	}
	@$(AOT_FIRST_$*) \
	  AOT_REQUIRED=1 .venv-aot/$*/bin/python -m pytest tests/aot $(AOT_ARGS_$*) $(ARGS)

# On the newest JAX every kernel, and the README's model; other models, meshes, plans and most whole
# losses on the oldest.
AOT_ARGS_latest = -m "not oldest"

# The kernels' numbers, interpreted on the CPU; `make test` checks them on the newest JAX. On one
# core, and so at first, while the others compile for the other version.
AOT_FIRST_0.11.2 = .venv-aot/0.11.2/bin/python -m pytest tests/pallas_kernels/norm/test_rms_norm.py \
  -k mosaic_gpu &&

aot-environments: $(AOT_JAX:%=.venv-aot/%/.done)

.venv-aot/%/.done: pyproject.toml
	@$(FIND_PYTHON); \
	echo "setting up $(@D) with $$("$$found" --version) and $(AOT_SPEC_$*)"; \
	"$$found" -m venv --clear $(@D) && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[aot]' '$(AOT_SPEC_$*)'
	@touch $@

# Patches models of other projects, each in an environment of its own. A project that cannot be set
# up is a failure, and the others are still tested. Not a part of CI: it takes GiB of packages.
FOREIGN := tunix maxtext bonsai
test-foreign:
	@$(MAKE) --no-print-directory --keep-going $(FOREIGN:%=test-foreign-%)

test-foreign-%:
	@$(MAKE) --silent --no-print-directory .venv-foreign/$*/.done || { \
	  echo "test-foreign: NOTHING WAS CHECKED of $*: it could not be set up, for the reason above"; \
	  exit 1; \
	}
	@FOREIGN_PROJECT=$* .venv-foreign/$*/bin/python -m pytest --override-ini filterwarnings=ignore \
	  tests/foreign/test_$*.py $(ARGS)

# The files name every package, so nothing is left to resolve.
.venv-foreign/%/.done: tests/foreign/%.txt
	@$(FIND_PYTHON); \
	echo "setting up $(@D) with $$("$$found" --version) and $<"; \
	"$$found" -m venv --clear $(@D) && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# Builds the wheel and the sdist into dist/, the wheel from the sdist, then trains a step in an
# environment with nothing but the wheel. The build reads a copy of its sources: the files that other
# builds leave in the checkout cannot get into the wheel.
BUILD_FILES := pyproject.toml README.md LICENSE pallas_kernels
wheel:
	@$(FIND_PYTHON); \
	folder=$$(mktemp --directory) && trap 'rm -rf "$$folder"' EXIT && \
	mkdir "$$folder/source" && cp --recursive $(BUILD_FILES) "$$folder/source" && \
	"$$found" -m venv "$$folder/build" && "$$found" -m venv "$$folder/empty" && \
	"$$folder/build/bin/python" -m pip install --quiet --disable-pip-version-check build && \
	"$$folder/build/bin/python" -m build --outdir "$$folder/dist" "$$folder/source" >"$$folder/log" \
	  || { cat "$$folder/log"; exit 1; } && \
	"$$folder/build/bin/python" tests/support/distribution.py "$$folder/dist" && \
	"$$folder/empty/bin/python" -m pip install --quiet --disable-pip-version-check \
	  "$$(echo "$$folder"/dist/*.whl)[flax]" && \
	cp tests/support/quick_start.py "$$folder" && cd "$$folder" && \
	JAX_PLATFORMS=cpu empty/bin/python -I quick_start.py && \
	cd $(CURDIR) && rm -rf dist && cp --recursive "$$folder/dist" dist && ls dist/*

# The pages of docs/ as HTML in docs/_build. Each run builds all of them, because a page that has
# not changed may have a link that broke.
docs: setup
	@$(PYTHON) -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs docs/_build $(ARGS)
	@echo "docs/_build/index.html"

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

setup: $(SETUP)

$(SETUP): pyproject.toml
	@$(FIND_PYTHON); \
	echo "setting up $(VENV) with $$("$$found" --version)$(if $(GPU_EXTRA), and JAX for CUDA 13,)"; \
	rm -f $(VENV)/.done-*; \
	"$$found" -m venv $(VENV) && \
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[dev$(GPU_EXTRA)]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-aot .venv-foreign build dist docs/_build *.egg-info
