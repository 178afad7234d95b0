# make demo               set up .venv with a CPU build of torch, then train, generate, export and check a small model
# make demo DEVICE=cuda   the same on the GPU, with the torch of this machine's python3 and no virtual environment
# make test               set up .venv, then run the tests (ARGS="-k kda" goes to pytest)
# make lint               ruff and mypy (lint.sh)
# make clean              remove what these commands made

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
ARGS ?=
JOBS ?= 2
TORCH ?= 2.13.0
# asked for a CPU build only if pip as it is set up here knows none
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints-cpu.txt

.PHONY: demo test lint clean

ifeq ($(DEVICE),cpu)
demo: $(VENV)/.demo
	$(PY) -m fla_inductor demo --device cpu $(ARGS)
else
demo:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m fla_inductor demo --device $(DEVICE) $(ARGS)
endif

test: $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/.test
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" ./lint.sh

# a bare "torch" on Linux is a CUDA build of several GB: it is the last resort
$(VENV)/.torch: constraints-cpu.txt
	@echo "Setting up $(VENV): a minute or so, once"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "torch==$(TORCH)+cpu" \
	  || $(INSTALL) --retries 0 --timeout 15 --extra-index-url $(TORCH_INDEX) "torch==$(TORCH)+cpu" \
	  || $(INSTALL) "torch==$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable ".[cli,bench]"
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable ".[cli,bench,test,dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) demo_output build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
