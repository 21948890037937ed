# Development tasks. Each target sets up .venv first, once.

PYTHON ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
READY   := $(VENV)/.ready
FAIRSEQ := $(VENV)/.fairseq
LOWEST  := .venv-lowest

# Arguments for one call: `make run ARGS="experiment=resnet20_cifar10 seed=1"`, `make test ARGS="-k parity"`.
ARGS ?=
# Test processes, two to four; each one computes in a single thread, so the machine is not oversubscribed.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))

# Tests run on the CPU, even on a machine with GPUs; `make test-gpu` tests these.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

# Setup leaves most packages uncompiled. Without .pyc files each process would compile them again, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-translation run reproduce test test-docs test-slow test-translation test-lowest test-gpu lint format chaos digests bench docs figures notebooks release-check clean clean-all

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { \
		line = sprintf("  make %-18s", $$1); \
		for (i = 1; i <= split($$2, words, " "); i++) { \
			if (length(line " " words[i]) > 79) { print line; line = sprintf("%25s", "") } \
			line = line " " words[i] \
		} \
		print line }' $(MAKEFILE_LIST)

setup: $(READY)  ## install growlab and its pinned dependencies into .venv (the other targets do it too)

# The lock file is complete, so pip resolves nothing. It does not compile either: for modules that are never imported this
# would take longer than the installation. The last line compiles the modules that every command imports.
# Debian packages `ensurepip` separately: without it, the system's pip installs pip into the environment.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "growlab needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(PY) || { echo "Making $(VENV) (once; about 7 GB)"; $(PYTHON) -m venv $(VENV) >/dev/null 2>&1; } \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) \
			&& $(PYTHON) -m pip --python $(PY) install --quiet pip; }
	@echo "Installing requirements.lock (3 GB to download, unless pip has them cached)"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(PY) -c 'import growlab.lab.training.build, growlab.lab.training.launcher'
	@touch $@

run: $(READY)  ## grow a ResNet-20 on handwritten digits and print the results (ARGS="..." changes settings)
	@echo "growlab: starting (importing PyTorch takes some seconds)"
	$(PY) -m growlab $(ARGS)

reproduce: $(READY)  ## train missing runs of the papers' tables and figures (ARGS="--list", ARGS="table2 --minutes 60")
	$(PY) -m growlab reproduce $(ARGS)

test: $(READY)  ## all fast CPU tests, except those of the documentation
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal --ignore=tests/docs $(ARGS)

test-docs: $(READY)  ## test README, notebooks and links, and the numbers and figures of the documentation
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal tests/docs $(ARGS)

test-slow: $(READY)  ## the tests marked slow
	$(ON_CPU) $(PY) -m pytest -m "slow and not gpu" $(ARGS)

# fairseq is built with Cython. If the build fails, the tests of fairseq are skipped with a message.
$(FAIRSEQ): $(READY) tests/recipes/translation/requirements.txt
	@{ $(PY) -m pip install --quiet --disable-pip-version-check --no-deps cython==3.3.1 \
		&& $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
			-r tests/recipes/translation/requirements.txt && touch $@; } \
		|| echo "fairseq could not be built (it needs a C++ compiler); the tests that need it are skipped" >&2

setup-translation: $(FAIRSEQ)  ## build and install fairseq too (some minutes, once)

test-translation: $(FAIRSEQ)  ## the tests that need fairseq; `make test` includes them once it is installed
	$(ON_CPU) $(PY) -m pytest -m "not gpu" tests/recipes/translation $(ARGS)

# Test tools have their locked versions, and deprecation warnings of old libraries do not fail tests.
# `datasets` is pinned to its lowest version: uv would raise it, and pyarrow, to suit the newest fsspec.
$(LOWEST)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	grep -E '^(editables|gromo|hatchling|hypothesis|pytest|pytest-timeout|pytest-xdist|torch-pruning)==' \
		requirements.lock > $(LOWEST)/tools.txt
	grep -oE 'datasets>=[0-9.]+' pyproject.toml | sed 's/>=/==/' >> $(LOWEST)/tools.txt
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -r pyproject.toml \
		--extra lab --extra wandb --extra tensorboard --extra timm --extra transformers -r $(LOWEST)/tools.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

test-lowest: $(LOWEST)/.ready  ## the fast tests with the lowest versions that pyproject.toml allows (7 GB more)
	$(ON_CPU) $(LOWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal -W default::DeprecationWarning $(ARGS)

test-gpu: $(READY)  ## all that needs a CUDA device, in eight minutes (ARGS="--device cpu --small": dry run without)
	PYTHON=$(PY) tests/gpu/run.sh $(ARGS)

lint: $(READY)  ## check formatting, lint rules and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY)  ## format the code and fix lint errors
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

chaos: $(READY)  ## kill a small training 50 times and check that nothing is lost (ARGS="--kills 200 --seed 1")
	OMP_NUM_THREADS=1 $(PY) -m tests.chaos $(ARGS)

digests: $(READY)  ## fingerprints of runs that use every feature (ARGS=FILE, later ARGS="FILE --compare")
	OMP_NUM_THREADS=1 $(PY) -m tests.digests $(ARGS)

bench: $(READY)  ## measure growlab's overhead, as ratios to the same work without it (ARGS="-k event,trace")
	$(PY) -m tests.benchmarks $(ARGS)

# No -q: it would also hide warnings from --strict.
docs: notebooks  ## build guide, notebooks and API reference into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -f notebooks/docs/mkdocs.yml

figures: $(READY)  ## redraw the figures of notebooks/results from its runs (ARGS=llama: only names with "llama")
	$(PY) notebooks/docs/figures.py $(ARGS)

notebooks: $(READY)  ## run all notebooks into build/notebooks/ (ARGS=--keep: and save the outputs in the notebooks)
	$(PY) notebooks/docs/notebooks.py $(ARGS)

release-check:  ## build wheel and sdist, and test both in empty environments
	tests/release_check.sh

clean:  ## remove caches and build outputs (keeps .venv and runs)
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean  ## remove .venv as well
	rm -rf $(VENV) $(LOWEST)
