"""Commands in guests with real verbs devices (soft-RoCE), where `../shared/rdma-vm` can boot such."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT.parent / "shared" / "rdma-vm"
PROGRAMS = Path(__file__).parent / "_programs"
Guests = Callable[..., str]


@pytest.fixture(scope="session")
def machine() -> Path:
    """The folder that boots guests, ready to."""
    if not (MACHINE / "run").exists():
        pytest.skip("no ../shared/rdma-vm to boot guests with verbs devices")
    done = subprocess.run([MACHINE / "prepare"], capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        pytest.skip(f"rdma-vm can't be prepared here: {(done.stdout + done.stderr)[-300:]}")
    return MACHINE


@pytest.fixture
def guests(machine: Path, tmp_path: Path) -> Guests:
    """guests(number, program, *arguments): all must exit with 0, within `timeout_s`; what they printed."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(secrets.token_bytes(32))

    def run(number: int, program: str, *arguments: str, timeout_s: float = 120) -> str:
        command = [MACHINE / "run", "-n", str(number), "-t", str(timeout_s), "--", sys.executable]
        done = subprocess.run(
            [*command, str(PROGRAMS / f"{program}.py"), *arguments], cwd=ROOT, capture_output=True, text=True,
            timeout=timeout_s + 30, check=False, env={**os.environ, "COMMRT_SECRET_FILE": str(secret)},
        )  # fmt: skip
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
