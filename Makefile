# Two commands: `make check` (every route against the oracle) and `make test` (the test-suite).
# Both create .venv on first use and reuse it. KDA_VENV=none uses the running Python as it is;
# KDA_VENV=DIR puts the environment elsewhere. PYTHON picks the interpreter that makes it (3.11 or newer).

PYTHON   ?= python3
KDA_VENV ?= .venv
ARGS     ?=
WORKERS  ?= auto

ifeq ($(KDA_VENV),none)
PY    := $(PYTHON)
READY :=
else
PY    := $(KDA_VENV)/bin/python
READY := $(KDA_VENV)/.ready
endif

.PHONY: check test lint format clean
.DELETE_ON_ERROR:

check: $(READY)
	$(PY) -m harness check $(ARGS)

test: $(READY)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

$(KDA_VENV)/.ready: pyproject.toml constraints.txt
	test -x $(KDA_VENV)/bin/python || $(PYTHON) -m venv $(KDA_VENV)
	$(KDA_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv report .hypothesis .pytest_cache .ruff_cache *.egg-info
