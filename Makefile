# Every target sets up what it needs in a virtual environment, VENV, made with PYTHON.
VENV ?= .venv
PYTHON ?= python3
SOURCES := pyproject.toml CMakeLists.txt $(shell find commrt transports backends algorithms -type f ! -name '*.pyc')

.PHONY: help demo setup check test bench soak clean

help:  ## List the targets.
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

demo: $(VENV)/.installed  ## Install commrt, and time and check all_reduce on 4 ranks.
	$(VENV)/bin/commrt bench all_reduce -n 4

setup: $(VENV)/.tools  ## Install commrt and the tools of a developer.

check: setup  ## Lint and types.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: setup  ## All tests but the long lists.
	$(VENV)/bin/python -m pytest -q -m "not slow" $(ARGS)

bench: setup  ## Time the collectives, small and large, on 2 and 4 ranks.
	bash ci/bench.sh $(VENV)/bin

soak: setup  ## The long lists too: half an hour and more.
	$(VENV)/bin/python -m pytest -q $(ARGS)

clean:  ## Remove the environment and everything built.
	rm -rf $(VENV) build

$(VENV)/.installed: $(SOURCES)
	bash ci/setup.sh $(VENV) $(PYTHON)
	touch $@

$(VENV)/.tools: $(VENV)/.installed
	bash ci/setup.sh $(VENV) $(PYTHON) test
	touch $@
