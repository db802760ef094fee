# make lab · test · run NB=06 · soak NB=06 · attack MINUTES=10 · bench · check: each sets up what it needs in .venv (Python >= 3.10 and make).
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP_ARGS ?=
NB ?= 06
MINUTES ?= 10

.PHONY: lab test run full soak attack bench check
lab: $(VENV)/ready
	$(BIN)/jupyter lab $(LAB_ARGS) notebooks/00_check_your_machine.ipynb

test: $(VENV)/ready
	$(BIN)/pytest --nbval $(ARGS)

run: $(VENV)/ready
	$(BIN)/python tools/run_notebook.py $(NB)

full: $(VENV)/ready
	DDP_MNIST=full $(BIN)/jupyter nbconvert --to notebook --execute --output-dir $$(mktemp -d) notebooks/06_train_mnist.ipynb

soak: $(VENV)/ready
	$(BIN)/python tools/soak.py $(NB)

attack: $(VENV)/ready
	$(BIN)/python tools/attack.py --minutes $(MINUTES) $(ARGS)

bench: $(VENV)/ready-bench
	$(BIN)/python -m tests.bench $(ARGS)

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ddp_helpers
	$(BIN)/pytest -q tests/test_notebooks.py tests/test_sanitizers.py tests/test_environment.py

$(VENV)/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[test]'
	touch $@

$(VENV)/ready-bench: $(VENV)/ready
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[test,bench]'
	touch $@
