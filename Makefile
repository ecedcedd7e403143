# Every target works as the first command after a clone: it makes .venv and installs what it needs, once.
# `make PYTHON=python3.12 test` takes another Python.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PINNED := $(PIP) --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS)

# The stamps lie in .venv, so that they go when it goes.
TORCH := $(VENV)/.torch
PACKAGE := $(VENV)/.package
DEV := $(VENV)/.dev
ZOO := $(VENV)/.zoo

# One thread to a worker; no model library looks for a network.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help demo test zoo databases interrupts kills lint bench clean dot browser

help:
	@echo "make demo    a first look: runs examples/demo.py"
	@echo "make test    the quick tests"
	@echo "make matrix  the quick tests on every Python found; CUDA=yes fetches CUDA's libraries where torch needs them"
	@echo "make zoo     the tests on real library models (transformers, timm, torchvision)"
	@echo "make databases  every sample of torch's own databases of operators and modules"
	@echo "make interrupts  an interrupt at a thousand places of each task"
	@echo "make kills   watched trainings, ended in five ways, twenty times each"
	@echo "make lint    format, rules, types"
	@echo "make bench   the tables of costs against the plain model"
	@echo "make clean   remove .venv and everything that was built"

demo: $(PACKAGE) dot
	$(BIN)/python examples/demo.py

test: $(DEV) dot
	$(TEST_ENV) $(PYTEST)

# Every Python from 3.10 on, of pyenv's or on the path: each in a venv of its own, .matrix/<version>.
matrix:
	@$(PYTHON) bench/matrix.py

# Clusters in a process of their own: their engines leave threads behind, and captures of scripts ask whether they are alone.
zoo: $(ZOO) dot browser
	$(TEST_ENV) $(BIN)/python -m pytest -q -m zoo tests/test_clusters.py
	$(TEST_ENV) $(PYTEST) -m zoo --ignore=tests/test_clusters.py

databases: $(ZOO)
	$(TEST_ENV) REPLAYLENS_DATABASES=all $(BIN)/python -m pytest -q -m zoo tests/test_databases.py

interrupts: $(DEV)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m interrupts tests/test_interrupts.py

kills: $(DEV)
	$(TEST_ENV) $(BIN)/python -W ignore tests/kills.py 20

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(ZOO)
	$(BIN)/python bench/run.py
	$(BIN)/python bench/sweeps.py
	$(BIN)/python bench/check.py
	$(BIN)/python bench/files.py
	$(BIN)/python bench/watch.py
	$(BIN)/python bench/extract.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/growth.py --most 10000
	$(BIN)/python bench/summary.py

clean:
	rm -rf $(VENV) .matrix build dist *.egg-info .hypothesis
	find . -name .git -prune -o -type d \
	    \( -name __pycache__ -o -name .pytest_cache -o -name .mypy_cache -o -name .ruff_cache \) -prune -exec rm -rf {} +

# torch first and alone: with its neighbours in one call, pip may choose another build of it.
$(TORCH): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PINNED) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# numpy is no dependency, but torch warns at import where it is missing.
$(PACKAGE): $(TORCH) pyproject.toml
	$(PINNED) --editable . numpy
	@touch $@

$(DEV): $(PACKAGE)
	$(PINNED) --editable '.[dev,pandas,plot,progress,safetensors,xarray,watch,video,board,extract,rsa,scale]'
	@touch $@

# torchvision and timm without their dependencies: those name a torch of another build.
$(ZOO): $(DEV)
	$(PINNED) --editable '.[zoo]'
	$(PINNED) --no-deps torchvision timm
	@touch $@

# Pictures need graphviz's `dot`, a program that pip does not bring. Without it all else works.
dot:
	@command -v dot >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    echo "graphviz's dot is missing: installing it with apt-get"; \
	    said=$$( { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	        apt-get install -y -qq --no-install-recommends graphviz; } 2>&1 </dev/null ); \
	    command -v dot >/dev/null 2>&1 && exit 0; \
	    echo "$$said"; \
	fi; \
	echo "SKIPPED: rendering pictures, for graphviz's dot is missing. Everything else works."; \
	echo "         Install the system package 'graphviz' and run this again."

# The tests of the page look at it in headless Chromium. Without it all other tests run.
browser:
	@command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    echo "chromium or its driver is missing: installing them with apt-get"; \
	    said=$$( { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	        apt-get install -y -qq --no-install-recommends chromium chromium-driver; } 2>&1 </dev/null ); \
	    command -v chromedriver >/dev/null 2>&1 && exit 0; \
	    echo "$$said"; \
	fi; \
	echo "SKIPPED: the page in a browser, for chromium or chromedriver is missing. Everything else works."; \
	echo "         Install the system packages 'chromium' and 'chromium-driver' and run this again."
