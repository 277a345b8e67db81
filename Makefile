# Two commands matter: `make demo` and `make test`. Both install what they need.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
ENGINE := .venv-engine
EPY    := $(ENGINE)/bin/python

.PHONY: demo demo-vllm test test-fast test-engine lint bench soak engine system docs-check clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -U pip
	$(PY) -m pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(STAMP)
	$(PY) -m pip install -q --disable-pip-version-check --group dev
	touch $@

demo: $(STAMP)
	$(VENV)/bin/kvcatch demo

demo-vllm: engine
	$(EPY) tools/demo_vllm.py

engine: $(STAMP)
	$(PY) tools/engine_env.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests tools bench
	$(VENV)/bin/ruff format --check src tests tools bench
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache

test-fast: $(VENV)/.dev system
	$(PY) -m pytest

test-engine: $(VENV)/.dev engine
	$(EPY) -m pytest tests/engine --durations=30

system: $(VENV)/.dev
	$(PY) tools/system_packages.py

test: $(VENV)/.dev system lint test-fast test-engine

bench: $(VENV)/.dev engine
	$(EPY) bench/run.py

soak: $(VENV)/.dev engine
	$(EPY) -m pytest tests/engine -m soak
	$(EPY) -m pytest tests/unit -m soak
	$(EPY) bench/scheduler.py

clean:
	rm -rf $(VENV) $(ENGINE) build dist
