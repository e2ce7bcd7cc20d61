PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: install demo test lint types site unit clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/epitorch demo --out runs/demo

test: lint types site unit

lint: install
	$(BIN)/ruff check --no-cache .  # the order of imports hangs on which files there are, which the cache does not see
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

site: install  # the documentation, warnings are errors; written to build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

unit: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
