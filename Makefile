# `make test` does everything on a fresh machine: environment, install, lint, types, tests.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.dovetail-installed
# The tracked folders with code, by name: a virtual environment may lie beside them under any name.
CODE := dovetail tests benchmarks examples
# Three workers: each holds jax and torch. On two cores one more than cores fills the time that tests wait for processes.
PYTEST_ARGS ?= -n 3 --dist loadscope
# uv, where it is installed, resolves and unpacks in a fraction of pip's time.
UV := $(shell command -v uv 2>/dev/null)
# pip would compile the modules of 3 GB of packages on one core, which takes longer than all the rest.
INSTALL := $(if $(UV),$(UV) pip install --python $(PY),$(PY) -m pip install --no-compile)

# Tests start hundreds of processes that import the package: each would compile its sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-fast test-thorough test-tpu test-tpu-all lint style fmt install demo
.DEFAULT_GOAL := test

install: $(STAMP)

# The stamp is newer than pyproject.toml when the environment is up to date, so nothing is reinstalled for a code change.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dovetail needs Python 3.11 or newer: make PYTHON=python3.12 test")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --upgrade pip  # resolves in half the time that Python 3.11's own takes
	$(INSTALL) --quiet --editable '.[dev]'
	@$(PY) -m compileall -qq -j 0 $(VENV)/lib || true  # some packages have templates that do not compile
	@touch $@

style: $(STAMP)
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)

lint: style
	$(PY) -m pyright --pythonpath $(PY)

fmt: $(STAMP)
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

# The types are checked beside the tests, because pyright uses one core for a minute; its report comes last.
test: style
	@$(PY) -m pyright --pythonpath $(PY) >$(VENV)/pyright.log 2>&1 & types=$$!; \
	$(PY) -m pytest -q -m "not thorough and not tpu" --durations=25 $(PYTEST_ARGS); code=$$?; \
	wait $$types || code=1; cat $(VENV)/pyright.log; exit $$code

# Modules marked slow are not imported either (tests/conftest.py).
test-fast: PYTEST_ARGS := -n 2 --dist loadscope
test-fast: $(STAMP)
	$(PY) -m pytest -q -m "not slow and not thorough and not tpu" $(PYTEST_ARGS)

# The whole of each matrix too, but for what libtpu compiles.
test-thorough: lint
	$(PY) -m pytest -q -m "not tpu" --durations=25 $(PYTEST_ARGS)

# Steps of training and of the engine compiled for TPUs: takes libtpu (x86-64 Linux), and no TPU. Cases go to the workers
# one by one, each on its own. `test-tpu-all`: every recipe, every family and every chip, for hours.
test-tpu: $(STAMP)
	$(PY) -m pytest -q -rs tests/tpu -m "not thorough" --durations=25 -n 2 --dist load

test-tpu-all: $(STAMP)
	$(PY) -m pytest -q -rs tests/tpu --durations=25 -n 2 --dist load

# The assistant of examples/assistant on http://127.0.0.1:8090, with two tiny models that are trained on the first start.
demo: $(STAMP)
	$(PY) -m examples.assistant
