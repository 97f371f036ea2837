# make demo   sets up and runs the main job on the miniature world (no GPU, no downloads but packages)
# make test   sets up and runs the tests
# make check  static checks: ruff, mypy, import layers
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-debias-diffusion

.PHONY: demo test test-slow check setup clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

setup: $(STAMP)

demo: setup
	$(BIN)/debias-diffusion demo

test: setup
	$(BIN)/python -m pytest -q

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache
