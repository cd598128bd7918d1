# Everything runs in .venv, which these rules create and keep up to date. A rule installs only when
# its stamp file in .venv is older than what it depends on, so a second run installs nothing.
#
#   make test PYTHON=python3.12          another interpreter
#   make test ARGS="-k softmax -x"       arguments for pytest, or for the demo
#   make test PIP_QUIET=                 all that pip has to say

PYTHON ?= python3
PIP_QUIET ?= -qq
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install $(PIP_QUIET) --constraint constraints.txt --no-build-isolation
SAY := @echo "==>"

# Extras of pyproject.toml behind each stamp.
EXTRAS_bench := viz
EXTRAS_demo := ogb,viz
EXTRAS_dev := ogb,viz,examples,docs,dev
EXTRAS_docs := docs

export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint format docs bench check-triton sanitize setup clean always

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed-demo ## Train a graph transformer on a citation graph (about 3 minutes)
	$(SAY) "Training on ogbn-arxiv, or on its synthetic stand-in: about 3 minutes on two cores."
	@$(PY) examples/ogbn_arxiv.py --demo $(ARGS)

test: $(VENV)/installed-scatter ## Run all tests with coverage (about 10 minutes)
	$(SAY) "Running the tests with coverage, on all cores: about 10 minutes on two."
	@$(PY) -m pytest --cov --numprocesses logical $(ARGS)

lint: $(VENV)/installed-dev ## Check style and types: ruff, mypy
	$(SAY) "Checking style and types: under a minute."
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy

format: $(VENV)/installed-dev ## Format the code and apply safe fixes
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format

docs: $(VENV)/installed-docs ## Build the documentation into site/
	$(SAY) "Building the documentation: under a minute."
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(VENV)/installed-bench ## Measure attention and its rivals on small graphs (about 5 minutes)
	$(SAY) "Measuring on small graphs, then writing docs/benchmarks.md: about 5 minutes on two cores."
	@$(PY) examples/benchmarks/attention.py --quick --csv examples/benchmarks/results/quick.csv $(ARGS)
	@$(PY) examples/benchmarks/report.py

# With the version of constraints.txt, and for one GPU with the oldest that is supported, which is
# installed beside it.
OLDEST_TRITON := triton==3.6.0

$(VENV)/oldest-triton: $(VENV)/created
	@rm -rf $@ && $(PY) -m pip install $(PIP_QUIET) --no-deps --target $@ $(OLDEST_TRITON)

check-triton: $(VENV)/installed-dev $(VENV)/oldest-triton ## Compile the GPU kernels, which needs no GPU (about 6 minutes)
	$(SAY) "Compiling the Triton kernels for GPUs that need not be there: about 6 minutes on two cores."
	@PYTHONPATH=$(VENV)/oldest-triton $(PY) -W ignore examples/benchmarks/compile_triton.py --target sm_90 $(ARGS)
	@$(PY) -W ignore examples/benchmarks/compile_triton.py $(ARGS)

# The library is built anew in a copy of the package. The sanitizers have to be loaded before Python,
# and libstdc++ with them, whose exceptions they follow. Python and torch leak by design. Tests that
# measure memory or work are left out.
SANITIZED := build/sanitize
SANITIZERS = $(foreach name,libasan.so libubsan.so libstdc++.so.6,$(shell $${CXX:-g++} -print-file-name=$(name)))

sanitize: $(VENV)/installed-dev ## Test the CPU kernels under AddressSanitizer and UBSan (about 15 minutes)
	$(SAY) "Compiling with sanitizers, about 5 minutes, then testing, about 10."
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r graphattn tests pyproject.toml setup.py $(SANITIZED)
	@rm -f $(SANITIZED)/graphattn/_cpu*
	@$${CXX:-g++} -std=c++17 -O1 -g1 -fno-omit-frame-pointer -fopenmp -fvisibility=hidden -shared -fPIC \
	    -fsanitize=address,undefined -fno-sanitize-recover=all graphattn/backends/cpu.cpp \
	    -o $(SANITIZED)/graphattn/_cpu$$($(PY) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
	@cd $(SANITIZED) && OMP_NUM_THREADS=1 PYTHONPATH=$$PWD LD_PRELOAD="$(SANITIZERS)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	    $(CURDIR)/$(PY) -m pytest -q -p no:cacheprovider --capture=sys \
	    tests/test_cpu.py tests/test_native.py -k "not c66 and not c68 and not keep_pages" $(ARGS)

setup: $(VENV)/installed-scatter $(VENV)/installed-docs ## Install all that development needs, torch-scatter included

clean: ## Remove caches and build outputs (keeps .venv, datasets and runs)
	@rm -rf build dist site *.egg-info htmlcov .coverage .coverage.* coverage.xml \
	    .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find graphattn tests examples datasets -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The environment. Made again when it is missing or broken, or when the interpreter or this folder
# is another one than it was made for. pip comes from the interpreter: Debian's has no ensurepip.
BASE_PYTHON = $$($(PYTHON) -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
IDENTITY = $$($(PYTHON) -c 'import sys; print(*sys.version_info[:2], sys.base_prefix)') in $(CURDIR)

$(VENV)/created: always
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "The pinned versions need Python 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	@identity="$(IDENTITY)"; \
	if [ "$$(cat $@ 2>/dev/null)" = "$$identity" ] && $(PY) -c '' 2>/dev/null; then exit 0; fi; \
	base="$(BASE_PYTHON)"; \
	"$$base" -m pip --version >/dev/null 2>&1 || { \
	    echo "$$base has no pip. On Debian: apt install python3-pip" >&2; exit 1; }; \
	echo "==> Creating $(VENV) with $$("$$base" --version): a few seconds."; \
	rm -rf $(VENV) && "$$base" -m venv --without-pip $(VENV) && \
	"$$base" -m pip --python $(PY) install $(PIP_QUIET) --constraint constraints.txt pip setuptools && \
	echo "$$identity" > $@

$(VENV)/installed-%: $(VENV)/created pyproject.toml constraints.txt setup.py $(wildcard graphattn/backends/cpu*.?pp)
	$(SAY) "Installing graphattn[$(EXTRAS_$*)] at the pinned versions: 2 to 6 minutes the first time (torch is large, the kernels are compiled)."
	@$(PIP_INSTALL) --editable '.[$(EXTRAS_$*)]'
	@touch $@

HAS_HEADER = $(PY) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null

# torch-scatter is compiled against the installed torch, so a new torch means a new build. The wheel
# is kept in a pip cache of its own for each torch version; extensions are compiled two at a time.
$(VENV)/compiler: $(VENV)/created
	@$(HAS_HEADER) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    echo "==> Installing python3-dev: compiling torch-scatter needs Python.h." && \
	    apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-dev >/dev/null; }; \
	$(HAS_HEADER) || { \
	    echo "torch-scatter cannot be compiled: Python.h is missing. On Debian: apt install python3-dev" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { \
	    echo "torch-scatter cannot be compiled: $${CXX:-g++} is missing. On Debian: apt install g++" >&2; exit 1; }
	@touch $@

$(VENV)/installed-scatter: $(VENV)/compiler $(VENV)/installed-dev
	@torch="$$($(PY) -c 'import torch; print(torch.__version__)')"; \
	wanted="$$(grep '^torch-scatter==' constraints.txt) for torch $$torch"; \
	if [ "$$(cat $@ 2>/dev/null)" = "$$wanted" ]; then touch $@; exit 0; fi; \
	echo "==> Installing $$wanted: 3 to 6 minutes to compile, once for each version of torch."; \
	printf '[build_ext]\nparallel = 2\n' > $(VENV)/build.cfg; \
	cache="$$($(PY) -m pip cache dir 2>/dev/null || echo $(VENV)/cache)"; \
	DIST_EXTRA_CONFIG="$(CURDIR)/$(VENV)/build.cfg" $(PIP_INSTALL) --no-deps --force-reinstall \
	    --cache-dir "$$cache/torch-$$torch" torch-scatter && \
	echo "$$wanted" > $@
