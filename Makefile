# Everything a checkout needs: each target sets up its own .venv first, once.

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

# Tests are of the CPU, on a machine with GPUs too: `make test-gpu` is for those.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

# What setup leaves uncompiled is compiled once, on its first import: every process would do it anew, ten seconds each.
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

# The lock is complete, so nothing has to be resolved. What is never imported need not be compiled: that would take pip
# longer than all the rest. What every command imports is compiled once here, not by each of the first processes.
# `ensurepip` is a package of its own on Debian: without it, the system's pip fills the environment.
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

run: $(READY)  ## the main job: grow a network on the digits data and print its results (ARGS="..." to change it)
	@echo "growlab: starting (importing PyTorch takes some seconds)"
	$(PY) -m growlab $(ARGS)

reproduce: $(READY)  ## train what is missing of the papers' tables and figures (ARGS="--list", ARGS="table2 --minutes 60")
	$(PY) -m growlab reproduce $(ARGS)

test: $(READY)  ## all fast CPU tests, without those of the documentation
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal --ignore=tests/docs $(ARGS)

test-docs: $(READY)  ## README, notebooks, links, and the numbers and figures of the documentation
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) --dist worksteal tests/docs $(ARGS)

test-slow: $(READY)  ## the tests marked slow
	$(ON_CPU) $(PY) -m pytest -m "slow and not gpu" $(ARGS)

# Cython first: fairseq is built with it. Where that fails, its tests say so and are skipped.
$(FAIRSEQ): $(READY) tests/recipes/translation/requirements.txt
	@{ $(PY) -m pip install --quiet --disable-pip-version-check --no-deps cython==3.3.1 \
		&& $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
			-r tests/recipes/translation/requirements.txt && touch $@; } \
		|| echo "fairseq could not be built (it needs a C++ compiler); the tests that need it are skipped" >&2

setup-translation: $(FAIRSEQ)  ## install fairseq too, which is built from source (some minutes, once)

test-translation: $(FAIRSEQ)  ## the tests that need fairseq; with it installed, `make test` runs them too
	$(ON_CPU) $(PY) -m pytest -m "not gpu" tests/recipes/translation $(ARGS)

# Of the test tools the locked versions; warnings of old libraries about one another are no failures.
# Datasets by name: uv would raise its bound, and pyarrow's, for the newest fsspec.
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

test-lowest: $(LOWEST)/.ready  ## every fast test with the lowest versions that pyproject.toml promises (7 GB more)
	$(ON_CPU) $(LOWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal -W default::DeprecationWarning $(ARGS)

test-gpu: $(READY)  ## everything that needs a CUDA device, in eight minutes (ARGS="--device cpu --small" to try it)
	PYTHON=$(PY) tests/gpu/run.sh $(ARGS)

lint: $(READY)  ## formatting, lint rules and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY)  ## rewrite the code in the house format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

chaos: $(READY)  ## kill a small training 50 times and see that nothing is lost (ARGS="--kills 200 --seed 1")
	OMP_NUM_THREADS=1 $(PY) -m tests.chaos $(ARGS)

digests: $(READY)  ## fingerprints of runs that use every feature (ARGS=FILE, later ARGS="FILE --compare")
	OMP_NUM_THREADS=1 $(PY) -m tests.digests $(ARGS)

bench: $(READY)  ## what growlab costs, as ratios to the same work without it (ARGS="-k event,trace")
	$(PY) -m tests.benchmarks $(ARGS)

# Without -q, which would hide warnings from --strict too.
docs: notebooks  ## the guide, the notebooks and the API reference, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -f notebooks/docs/mkdocs.yml

figures: $(READY)  ## draw the figures of notebooks/results anew, from the rows kept there (ARGS=llama: those of such a name)
	$(PY) notebooks/docs/figures.py $(ARGS)

notebooks: $(READY)  ## run a copy of every notebook, into build/notebooks/ (ARGS=--keep: its outputs into the notebook too)
	$(PY) notebooks/docs/notebooks.py $(ARGS)

release-check:  ## build wheel and sdist, and try both in empty environments
	tests/release_check.sh

clean:  ## remove caches and build outputs (keeps .venv and runs)
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean  ## remove .venv as well
	rm -rf $(VENV) $(LOWEST)
