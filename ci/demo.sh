#!/usr/bin/env bash
# Installs commrt into .venv, times all_reduce on 4 ranks and checks every element: demo.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh .venv "${1:-python3}"
.venv/bin/commrt bench all_reduce -n 4
