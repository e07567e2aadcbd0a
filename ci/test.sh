#!/usr/bin/env bash
# Installs commrt and the tools of a developer into .venv, and runs all tests but the long lists: test.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh .venv "${PYTHON:-python3}" test
.venv/bin/python -m pytest -q -m "not slow" "$@"
