PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PURELIB := import sysconfig; print(sysconfig.get_path('purelib'))

.PHONY: install demo test lint types site unit dist smoke clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): about 7 GB and a few minutes, without further words"
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

dist: install  # wheel and sdist in build/dist, what they hold, and the wheel at work beside the dependencies of .venv
	rm -rf build/dist build/smoke
	$(BIN)/python -m build --no-isolation --outdir build/dist . > /dev/null
	$(BIN)/python tools/dist.py build/dist/*
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/pip install --quiet --disable-pip-version-check --no-deps build/dist/*.whl
	$(BIN)/python -c "$(PURELIB)" > "$$(build/smoke/bin/python -c "$(PURELIB)")/dependencies.pth"
	OMP_NUM_THREADS=1 build/smoke/bin/python tools/smoke.py

smoke: dist  # the same in an empty environment: its dependencies are installed anew (minutes, about 6 GB)
	rm -rf build/smoke
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/pip install --quiet --disable-pip-version-check "$$(echo build/dist/*.whl)[demo,onnx,report]"
	OMP_NUM_THREADS=1 build/smoke/bin/python tools/smoke.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
