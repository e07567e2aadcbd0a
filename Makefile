# Every target sets up what it needs in a virtual environment, .venv, made with PYTHON.
PYTHON ?= python3
SOURCES := pyproject.toml CMakeLists.txt $(shell find commrt transports backends algorithms -type f ! -name '*.pyc')

.PHONY: help demo setup check test bench soak clean

help:  ## List the targets.
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

demo:  ## Install commrt, and time and check all_reduce on 4 ranks.
	bash ci/demo.sh $(PYTHON)

setup: .venv/.tools  ## Install commrt and the tools of a developer.

check: setup  ## Lint and types.
	.venv/bin/ruff check .
	.venv/bin/mypy

test:  ## All tests but the long lists.
	PYTHON=$(PYTHON) bash ci/test.sh $(ARGS)

bench: setup  ## Time the collectives, small and large, on 2 and 4 ranks.
	bash ci/bench.sh .venv/bin

soak: setup  ## The long lists too: half an hour and more.
	.venv/bin/python -m pytest -q $(ARGS)

clean:  ## Remove the environment and everything built.
	rm -rf .venv build

.venv/.tools: $(SOURCES)
	bash ci/setup.sh .venv $(PYTHON) test
	touch $@
