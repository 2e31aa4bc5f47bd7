# make demo | test | test-slow | lint | docs | bench | gpu | fuzz | fuzz-csrc | clean
#
#   make test TORCH=2.13.0     the same suite on another torch
#   make test ARGS="-k nested" anything pytest takes
#
# Every target creates what it needs: one environment per torch version under .venv/.

TORCH  ?= 2.9.1
PYTHON ?= python3
ARGS   ?=

ENV := .venv/torch-$(TORCH)
BIN := $(ENV)/bin
PY  := $(BIN)/python
PIP := $(PY) -m pip install -q --disable-pip-version-check

SOURCES := $(wildcard csrc/*.cpp csrc/*.h)

# torch_xla 2.9 is the last release, for torch 2.9 on Linux x86-64 and some Pythons only.
PLATFORM := $(shell $(PYTHON) -c 'import platform as p, sys; print(p.system(), p.machine(), "%d.%d" % sys.version_info[:2])')
XLA_PLATFORMS := Linux-x86_64-3.11 Linux-x86_64-3.12 Linux-x86_64-3.13
empty :=
HAS_XLA := $(and $(filter 2.9 2.9.%,$(TORCH)),$(filter $(XLA_PLATFORMS),$(subst $(empty) $(empty),-,$(PLATFORM))))
PACKAGES := torch==$(TORCH) $(if $(HAS_XLA),torch_xla==2.9.0)

export PJRT_DEVICE := CPU

.PHONY: demo test test-slow lint docs bench gpu fuzz fuzz-csrc clean
.DELETE_ON_ERROR:

demo: $(ENV)/.installed
	$(PY) examples/char_lm.py $(ARGS)

# Tensors in the tests are tiny: two processes of one thread each beat one of two. Kernels are
# compiled where they are asked for: Inductor's own processes would import torch first, once for
# each worker and each script that a test starts.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest -n 2

test: $(ENV)/.installed
	$(PYTEST) $(ARGS)

test-slow: $(ENV)/.installed
	$(PYTEST) -m slow $(ARGS)

lint: $(ENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m mypy

# The site, in build/site: without torch, since the reference is read from the source.
docs: .venv/docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build $(ARGS)

bench: $(ENV)/.installed-bench
	$(PY) -m benchmarks.targets $(ARGS)

# On a machine with a CUDA device: what its tests and benchmarks/results/gpu.md say. On others it
# says so. TORCH is to be a build for CUDA, as the default is on Linux.
gpu: $(ENV)/.installed
	$(PY) -m pytest -m gpu $(ARGS)
	$(PY) -m benchmarks --section gpu

# Random programs against the Python loop: make fuzz ARGS="--programs 2000 --modes eager".
fuzz: $(ENV)/.installed
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --isolate $(ARGS)

# The compiler is not optional here, unlike for an installation.
FUZZ := build/fuzz/fuzz_csrc
FUZZ_SECONDS ?= 20
fuzz-csrc: $(FUZZ)
	$(FUZZ) $(FUZZ_SECONDS)

$(FUZZ): $(SOURCES) tests/fuzz_csrc/fuzz_csrc.cpp
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Icsrc \
	    -o $@ tests/fuzz_csrc/fuzz_csrc.cpp $(filter-out csrc/python.cpp,$(filter %.cpp,$(SOURCES)))

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find torch_scan_hop tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -f torch_scan_hop/_C*.so .venv/*/.installed

# Environments. The stamps tell that an installation ended; pip leaves alone what is there already.
$(ENV)/.torch:
	test -x $(PY) || $(PYTHON) -m venv $(ENV)
	$(PIP) $(PACKAGES)
	touch $@

# Also compiles the extension, which lands in torch_scan_hop/ and serves every environment (abi3).
$(ENV)/.installed: $(ENV)/.torch pyproject.toml setup.py $(SOURCES)
	$(PIP) -e '.[dev]'
	touch $@

.venv/docs/.installed: pyproject.toml
	test -x .venv/docs/bin/python || $(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip install -q --disable-pip-version-check 'mkdocs-material>=9.6,<10' 'mkdocstrings[python]>=0.29,<2'
	touch $@

$(ENV)/.installed-bench: $(ENV)/.installed
	$(PIP) -e '.[bench]'
	touch $@
