# Everything here does its own set-up; all it needs is make and Python >= 3.10 (PYTHON=... picks another one).
# For a CUDA build of torch, or an environment of your own, install the package without make: see README.md.
SHELL := /bin/sh
.SHELLFLAGS := -ec
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo lint docs test test-all test-matrix bench bench-gpu bench-compare clean
.PHONY: test-oldest test-newest cross-load wheel

PYTHON ?= python3
VENV ?= .venv
TORCH := torch==2.13.0
OLDEST := transformers==5.10.1
NEWEST := transformers>=5.10,<6
# Tests run in two processes with one thread each: fastest on two cores, and no process starves another.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2
SHARED_PINS = grep -vE '^(transformers|huggingface-hub|tokenizers|typer|peft|accelerate)==' constraints.txt

define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; set PYTHON=")'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(1)/bin/python -m pip install --quiet $(TORCH)
endef

help:
	@echo "make demo         convert a pretrained BERT, fine-tuned on real text, to three attentions and compare them (minutes)"
	@echo "make test         the fast tests                 make test-all     also the slow ones"
	@echo "make lint         ruff and mypy --strict        make test-matrix  oldest and newest transformers"
	@echo "make wheel        build the package, and try the wheel in an environment of its own"
	@echo "make bench        speed and memory against stock attention, kept in benchmarks/history/"
	@echo "make bench-compare REF=<commit>   how much faster or slower this tree is than that commit"
	@echo "make bench-gpu    on a GPU: is every variant right there, and how fast"
	@echo "make docs         the documentation, as a site in site/"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	$(call new_venv,$(VENV))
	$(VENV)/bin/python -m pip install --quiet -e ".[all]" -c constraints.txt
	touch $@

demo: $(VENV)/.installed
	$(VENV)/bin/hf-attn-swap demo $(DEMO_ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: $(VENV)/.installed
	$(PYTEST) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.installed
	$(PYTEST) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" $(PYTEST_ARGS)
	$(PYTEST) $(VENV)/bin/python -m pytest -m slow $(PYTEST_ARGS)

.venv-oldest/.installed: pyproject.toml constraints.txt
	$(call new_venv,.venv-oldest)
	$(SHARED_PINS) > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet -e ".[test]" "$(OLDEST)" -c .venv-oldest/constraints.txt
	touch $@

.venv-newest/.installed: pyproject.toml constraints.txt
	$(call new_venv,.venv-newest)
	$(SHARED_PINS) > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet --upgrade -e ".[test]" "$(NEWEST)" -c .venv-newest/constraints.txt
	touch $@

test-oldest test-newest: test-%: .venv-%/.installed
	.venv-$*/bin/python -c 'import torch, transformers as t; print(f"transformers {t.__version__}, torch {torch.__version__}")'
	$(PYTEST) .venv-$*/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" $(PYTEST_ARGS)

# Each of the two loads the checkpoints that the other one saves.
cross-load: .venv-oldest/.installed .venv-newest/.installed
	work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	.venv-oldest/bin/python tests/matrix/cross_load.py save "$$work/oldest"; \
	.venv-newest/bin/python tests/matrix/cross_load.py load "$$work/oldest"; \
	.venv-newest/bin/python tests/matrix/cross_load.py save "$$work/newest"; \
	.venv-oldest/bin/python tests/matrix/cross_load.py load "$$work/newest"

test-matrix: test-oldest test-newest cross-load

# `build` makes the wheel from the source distribution; a wheel made from this folder has to be the same, byte for byte,
# and to hold every file of the package. The environment that tries it has no extras and no pinned versions.
wheel:
	rm -rf dist .venv-build .venv-wheel
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python -m pip install --quiet build
	.venv-build/bin/python -m build
	work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	.venv-build/bin/python -m build --wheel --outdir "$$work"; \
	cmp dist/*.whl "$$work"/*.whl; \
	.venv-build/bin/python tests/wheel/files.py dist/*.whl
	$(call new_venv,.venv-wheel)
	.venv-wheel/bin/python -m pip install --quiet dist/*.whl
	.venv-wheel/bin/python -I tests/wheel/smoke.py
	.venv-wheel/bin/hf-attn-swap variants
	.venv-wheel/bin/hf-attn-swap train --list

# NO_MKDOCS_2_WARNING silences a notice of the theme on a later MkDocs; --strict stops at a broken link or reference.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(DOCS_ARGS)

bench: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/bench.py --history benchmarks/history $(BENCH_ARGS)

bench-compare: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/bench_compare.py "$(REF)" $(BENCH_ARGS)

# PyTorch from PyPI has CUDA on Linux. With a PyTorch of your own, run benchmarks/bench_gpu.py without make.
bench-gpu: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/bench_gpu.py $(BENCH_ARGS)

clean:
	rm -rf dist site .venv .venv-build .venv-wheel .venv-oldest .venv-newest .mypy_cache .ruff_cache .pytest_cache
