# Fresh machine with python3 (>= 3.11) and make: `make demo` and `make test` do everything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/fimaq demo

# One thread per worker: two workers with two threads each would fight over two cores.
test: $(VENV)/installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

lint: $(VENV)/installed
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
