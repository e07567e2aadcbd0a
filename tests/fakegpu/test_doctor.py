"""`commrt doctor` where there are devices, and where a driver finds none or is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import Unavailable, kernels
from .conftest import LIMIT_S, Fake

SOURCE = '#include "run_plan.h"\nCR_RUN_PLAN(float32, sum)\nCR_RUN_PLAN(uint8, sum)\n'


@pytest.fixture(scope="session")
def trial_kernels() -> Path:
    """What an all_reduce and the moving of bytes need, for the CPU."""
    try:
        return kernels(SOURCE, "run_plan_float32_sum", "run_plan_uint8_sum")
    except Unavailable as error:
        pytest.skip(str(error))


def doctor(env: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Its exit status, and what it found, by name."""
    argv = [sys.executable, "-m", "commrt", "doctor", "--json", "shm", "cuda_ipc", "cuda"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stderr == ""
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_devices_are_tried(fake_cuda: Fake, trial_kernels: Path) -> None:
    status, found = doctor(fake_cuda.env(trial_kernels))
    assert {found[name]["state"] for name in ("cuda", "cuda_ipc")} == {"works"}, found
    assert "no GPU" in found["cuda"]["level"]
    assert status == 0


def test_a_device_that_runs_no_kernel_fails(fake_cuda: Fake, tmp_path: Path) -> None:
    status, found = doctor(fake_cuda.env(tmp_path))
    assert {found[name]["state"] for name in ("cuda", "cuda_ipc")} == {"fails"}, found
    assert found["shm"]["state"] == "works"
    assert status == 1
