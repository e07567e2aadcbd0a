"""What the cuda backend says where it can't serve: one clear line, and never an exception."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import LIMIT_S, Fake

ASK = """
import json, sys
{before}
from commrt.backends.cuda import plugin
probe = plugin.probe()
try:
    plugin.allocate(1)
    error = ""
except Exception as raised:
    error = f"{{type(raised).__name__}}: {{raised}}"
print(json.dumps([list(probe.devices), probe.reason, error]))
"""


def ask(env: dict[str, str], before: str = "") -> tuple[list[str], str, str]:
    command = [sys.executable, "-c", ASK.format(before=before)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert not done.returncode, done.stderr
    devices, reason, error = json.loads(done.stdout)
    assert "\n" not in reason
    assert bool(devices) != bool(reason)
    return devices, reason, error


@pytest.fixture
def bindings() -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")


def test_bindings_are_not_installed() -> None:
    devices, reason, error = ask(dict(os.environ), "sys.modules['cuda.bindings'] = None")
    assert (devices, reason) == ([], "cuda-python is not installed")
    assert error == f"Unavailable: {reason}"


@pytest.mark.usefixtures("bindings")
def test_bindings_without_a_driver() -> None:
    if ctypes.util.find_library("cuda"):
        pytest.skip("there is a CUDA driver here")
    devices, reason, error = ask(dict(os.environ))
    assert (devices, reason) == ([], "no CUDA driver (libcuda.so.1) is installed")
    assert error == f"Unavailable: {reason}"


@pytest.mark.usefixtures("bindings")
def test_a_broken_driver_library(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    devices, reason, _ = ask({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert not devices
    assert "the CUDA driver can't be used" in reason
    assert "libcuda.so.1" in reason


@pytest.mark.usefixtures("bindings")
def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    subprocess.run(
        ["g++", "-shared", "-x", "c", "/dev/null", "-o", str(tmp_path / "libcuda.so.1")], check=True, timeout=60
    )
    devices, reason, _ = ask({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert not devices
    assert "the CUDA driver can't be used" in reason


def test_no_device(fake_cuda: Fake) -> None:
    assert ask(fake_cuda.env(devices=0))[:2] == ([], "the CUDA driver finds no NVIDIA GPU")


def test_a_driver_that_does_not_start(fake_cuda: Fake) -> None:
    _, reason, error = ask(fake_cuda.env(fail="cuInit:803"))
    assert reason == "the CUDA driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"
    assert error == f"Unavailable: {reason}"


def test_a_device_that_fails_when_looked_at(fake_cuda: Fake) -> None:
    _, reason, _ = ask(fake_cuda.env(fail="cuDeviceGetName:999"))
    assert reason == "the CUDA driver can't be used: cuDeviceGetName: CUDA_ERROR_UNKNOWN"


def test_a_device_that_can_not_be_had(fake_cuda: Fake) -> None:
    devices, _, error = ask(fake_cuda.env(devices=1, fail="cuDevicePrimaryCtxRetain:2"))
    assert devices == ["fake GPU 0 (no GPU, CPU threads), sm_90"]
    assert error.startswith("Unavailable: this rank's NVIDIA GPU can't be used")


def test_every_device_is_named(fake_cuda: Fake) -> None:
    devices, _, error = ask(fake_cuda.env(devices=3, capability=89))
    assert [device.split(" (")[0] for device in devices] == ["fake GPU 0", "fake GPU 1", "fake GPU 2"]
    assert all(device.endswith("sm_89") for device in devices)
    assert error == ""
