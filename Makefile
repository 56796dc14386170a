# Two commands on a fresh machine with Python >= 3.11: `make quickstart` and `make test`. README.md says the rest.
PYTHON ?= python3
DATA ?= toyworld
OUT ?= runs/quickstart
FRESH ?=
SHORT ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-deep coverage lint clean

quickstart: $(VENV)/installed-run
	$(BIN)/penjing quickstart --data "$(DATA)" --out "$(OUT)" $(if $(FRESH),--fresh) $(if $(SHORT),--short)

test: $(VENV)/installed-dev
	$(BIN)/python tests/run.py

# The large counts, and the record that docs/reliability.md is rendered from. Cut off, it goes on with the files left.
test-deep: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev,cluster]"
	$(BIN)/python benchmarks/reliability.py $(if $(FRESH),--fresh)

coverage: $(VENV)/installed-dev
	$(BIN)/python tests/run.py --cov --cov-report=term

lint: $(VENV)/installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

# The stamps are made last: an install that broke off is taken up again. `--no-deps` on ourselves keeps a second run
# from asking the index for anything once all packages are there.
$(VENV)/installed-run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[hf,chat,serve,data]"
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/installed-run

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("penjing needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# Not `runs`: what was trained is not made again in a minute.
clean:
	rm -rf $(VENV) build
