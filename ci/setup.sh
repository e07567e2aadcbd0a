#!/usr/bin/env bash
# Installs commrt into a virtual environment, which is made if need be: setup.sh VENV PYTHON [EXTRAS]
# EXTRAS are names of pyproject.toml's optional dependencies, joined by commas.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv} python=${2:-python3} extras=${3:-}

if [ ! -x "$venv/bin/pip" ]; then
    "$python" -m venv "$venv"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/pip" install --quiet --editable ".${extras:+[$extras]}"
