# Everything happens in .venv, which is made when it is missing and mended when what it was made from has changed.
# PYTHON=python3.12 chooses the interpreter, ARGS="-k panel" goes to the tool behind the target.

PYTHON ?= python3
ARGS   ?=
PICTURES ?= $(CURDIR)/docs/images
VENV   := .venv
BIN    := $(VENV)/bin
LIBRARIES := .libraries
ENGINES := .engines
JUPYTER := .jupyter_servers
NVIDIA := .nvidia
TENSORFLOW := .tensorflow
JAX := .jax
VERSIONS := .versions
# For test-versions: the oldest Python that we claim, and the newest that is here.
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= $(notdir $(firstword $(foreach minor,15 14 13 12,$(shell command -v python3.$(minor))) $(PYTHON)))
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt)
ROOT   := $(filter 0,$(shell id -u))
# The packages of an environment of its own. Not by a link: dill takes a module outside of site-packages for the user's.
purelib = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
packages = $$($(1)/venv/bin/python $(purelib))

# Where it is set, every process of the tests compiles the package and its tests for itself.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo lab workshop test test-all test-install test-jax test-jupyter test-libraries test-loops test-engines test-nvidia test-places test-slurm test-tensorflow test-versions bench lint sanitize sanitize-build screenshot docs outputs wheel test-wheel test-deps clean nightly

help:
	@echo 'make demo        train the quickstart on 2 engines, without a browser'
	@echo 'make lab         open the quickstart in JupyterLab'
	@echo 'make workshop    run all notebooks, exercises blank, wrong and solved, and print what each measured'
	@echo 'make test        run one case of each kind, in minutes (what it had to leave out, it says at the end)'
	@echo 'make test-all    run all cases, the mutants and what moves gigabytes: hours'
	@echo 'make test-install  install with pip into a new environment, and train in a notebook there'
	@echo 'make test-loops  try thousands of random training loops on ranks against one process (LOOPS=2000 LOOPS_SEED=1)'
	@echo 'make test-libraries  run other libraries and the tests of PyTorch on it, from an environment of their own'
	@echo 'make test-engines  run on the real Ray, Dask and Spark, from an environment of their own (1.5 GB; Spark needs Java)'
	@echo 'make test-jax    run JAX on ranks, from an environment without PyTorch'
	@echo 'make test-jupyter  offer the tools for agents in a Jupyter server, beside those of other packages, from an environment of their own'
	@echo 'make test-tensorflow  run TensorFlow and Keras on ranks, from an environment of their own (1.6 GB)'
	@echo 'make test-nvidia compare what the core declares of CUDA and NCCL with headers of NVIDIA, and open NCCLs (1.1 GB)'
	@echo 'make test-places start ranks and notebooks where calls are missing: other Pythons, sandboxes, gVisor, bare systems (root, debootstrap, runsc)'
	@echo 'make test-slurm  start a real Slurm of two hosts and a login node here, and run ringrun and notebooks in it (root)'
	@echo 'make test-versions  run ranks, process groups and a notebook on the oldest and newest torch and Python (10 GB)'
	@echo 'make test-deps   as root on Debian or Ubuntu: install what the browser and two-host tests need'
	@echo 'make lint        ruff, mypy and clang-format'
	@echo 'make bench       measure allreduce against MPI and Gloo on this machine'
	@echo 'make sanitize    run the tests of the native core under ASan, UBSan and TSan'
	@echo 'make sanitize-build  only compile for that'
	@echo 'make screenshot  take the pictures in docs/images again'
	@echo 'make docs        build the documentation into build/site, and test its links and its search'
	@echo 'make outputs     run and check the notebooks as make workshop, and keep what they show for the documentation'
	@echo 'make wheel       build a wheel for glibc 2.28 into dist/, on any Linux'
	@echo 'make test-wheel  install it in a bare Debian without a compiler, and train there (root, debootstrap)'
	@echo 'make nightly     run every target, and print a table with times (hours)'
	@echo 'make clean       remove .venv and everything that was built'

demo: $(VENV)/installed
	$(BIN)/python notebooks/demo.py

lab: $(VENV)/installed
	$(BIN)/jupyter lab $(if $(ROOT),--allow-root) --KernelManager.transport=ipc $(ARGS) notebooks/01_quickstart.ipynb

workshop: $(VENV)/installed
	$(BIN)/pytest tests/workshop -m "slow or not slow" $(ARGS)

test: $(VENV)/installed
	$(BIN)/pytest $(ARGS)

test-all: $(VENV)/installed
	$(BIN)/pytest -m "slow or not slow" $(ARGS)

test-install: $(VENV)/installed
	rm -rf .install
	$(BIN)/python -m venv .install
	.install/bin/pip install -q -c constraints.txt '.[all]'
	$(BIN)/pytest tests/install $(ARGS)

test-libraries: $(LIBRARIES)/installed
	PYTHONPATH=$(call packages,$(LIBRARIES)) $(BIN)/pytest tests/libraries $(ARGS)

test-loops: export LOOPS ?= 2000
test-loops: $(VENV)/installed
	$(BIN)/pytest tests/ranks/loops -m "slow or not slow" $(ARGS)

test-engines: $(ENGINES)/installed
	PYTHONPATH=$(call packages,$(ENGINES)) $(BIN)/pytest tests/engines $(ARGS)

test-jupyter: $(JUPYTER)/installed
	PYTHONPATH=$(call packages,$(JUPYTER)) $(BIN)/pytest tests/jupyter_servers $(ARGS)

test-jax: $(JAX)/installed
	$(JAX)/venv/bin/python -m pytest tests/jax -m "slow or not slow" $(ARGS)

test-tensorflow: $(TENSORFLOW)/installed
	PYTHONPATH=$(call packages,$(TENSORFLOW)) $(BIN)/pytest tests/tensorflow -m "slow or not slow" $(ARGS)

test-nvidia: $(NVIDIA)/fetched
	$(BIN)/pytest tests/nvidia $(ARGS)

test-slurm: $(VENV)/installed
	@PYTHONPATH=tests $(BIN)/python -c 'import sys; from harness.slurm import missing; sys.exit(missing() or 0)'
	$(BIN)/pytest tests/slurm -m "slow or not slow" $(ARGS)

test-places: $(VENV)/installed
	TEST_PLACES=1 $(BIN)/pytest tests/places -m "slow or not slow" $(ARGS)

test-versions:
	tests/versions/run.sh $(OLDEST_PYTHON) $(NEWEST_PYTHON) $(ARGS)

bench: $(VENV)/installed
	$(BIN)/ringrun --no-prefix -np 2 python benchmarks/allreduce.py $(ARGS)

lint: $(VENV)/installed
	$(BIN)/pre-commit run --all-files $(ARGS)

sanitize-build: $(VENV)/tools
	tests/native/sanitize.sh --build address,undefined
	tests/native/sanitize.sh --build thread

sanitize: $(VENV)/installed
	tests/native/sanitize.sh address,undefined $(ARGS)
	tests/native/sanitize.sh thread $(ARGS)

screenshot: $(VENV)/installed
	RING_PICTURES=$(PICTURES) $(BIN)/pytest tests/browser -m "slow or not slow" $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m browser.animate $(PICTURES)

docs: $(VENV)/documented
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/site-trees . build/site $(ARGS)
	RING_SITE=$(CURDIR)/build/site $(BIN)/pytest tests/documentation

outputs: $(VENV)/installed
	RING_KEEP_OUTPUTS=1 $(BIN)/pytest tests/workshop -m "slow or not slow" -k "not reader" $(ARGS)

wheel: $(VENV)/installed
	.ci/wheel $(BIN)/python

test-wheel: wheel
	tests/install/bare.sh dist/*.whl

nightly: $(VENV)/installed
	$(BIN)/python .ci/nightly $(ARGS)

test-deps:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core iproute2 openssh-client
	command -v sshd >/dev/null || { DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq \
	    --no-install-recommends openssh-server && { systemctl disable ssh 2>/dev/null || true; }; }

clean:
	rm -rf $(VENV) $(LIBRARIES) $(ENGINES) $(JUPYTER) $(NVIDIA) $(TENSORFLOW) $(JAX) $(VERSIONS) .install .bare .places build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without build isolation the build tools are those that constraints.txt pins, and what was compiled is kept.
$(VENV)/tools: constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt scikit-build-core pybind11 cmake ninja
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE) $(VENV)/tools
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/documented: docs/requirements.txt constraints.txt $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -r docs/requirements.txt
	@touch $@

# Libraries that tests alone need, beside the environment and not in it: what they bring would decide its versions.
$(LIBRARIES)/installed $(ENGINES)/installed $(JUPYTER)/installed $(TENSORFLOW)/installed: .%/installed: tests/%/requirements.txt $(VENV)/installed
	$(BIN)/python -m venv .$*/venv
	echo "import site; site.addsitedir('$$($(BIN)/python $(purelib))')" > $(call packages,.$*)/outer.pth
	.$*/venv/bin/pip install -q -c constraints.txt -r tests/$*/requirements.txt
	@touch $@

# JAX without PyTorch: the package is installed as its users install it.
$(JAX)/installed: pyproject.toml tests/jax/requirements.txt $(NATIVE) $(VENV)/installed
	$(BIN)/python -m venv $(JAX)/venv
	$(JAX)/venv/bin/pip install -q -c constraints.txt scikit-build-core pybind11 cmake ninja -r tests/jax/requirements.txt
	$(JAX)/venv/bin/pip install -q -c constraints.txt --no-build-isolation -e '.[jax]'
	@touch $@

# Packages of which no two fit into one environment: each in a folder of its own.
$(NVIDIA)/fetched: tests/nvidia/requirements.txt $(VENV)/installed
	while read -r package; do \
	  $(BIN)/pip install -q --no-deps --upgrade --target "$(NVIDIA)/$$package" "$$package" || exit 1; \
	done < tests/nvidia/requirements.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'Ring Notebook needs Python 3.10 or newer: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; p = sysconfig.get_paths()["include"]; sys.exit(not os.path.exists(p + "/Python.h"))' \
	  || { echo 'Python.h is missing: apt-get install python3-dev (or python3-devel)'; exit 1; }
	@command -v c++ >/dev/null || command -v clang++ >/dev/null \
	  || { echo 'a C++ compiler is missing: apt-get install g++'; exit 1; }
	$(PYTHON) -m venv $(VENV)
