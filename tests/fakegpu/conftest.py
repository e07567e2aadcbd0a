"""Runs programs on a fake driver, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from . import LABEL, Unavailable, build, cuda, environment, kernels

PAIRS = (("float32", "sum"), ("float32", "max"), ("int32", "sum"), ("uint8", "sum"))
RESIDENT = 64  # multiprocessors of a device that several ranks share, whose blocks must all be on it
PROGRAMS = Path(__file__).parent / "_programs"
LIMIT_S = 120


@dataclass(frozen=True)
class Fake:
    """A fake driver library, and a folder for the caches of what runs on it."""

    library: Path
    cache: Path

    def env(self, kernels: Path | None = None, **settings: object) -> dict[str, str]:
        """Of a process that runs on it."""
        return {**environment(self.library, kernels, **settings), "XDG_CACHE_HOME": str(self.cache)}

    def run(self, *command: object, kernels: Path | None = None, **settings: object) -> Any:
        """The JSON that a Python program prints: one of _programs, or -c and its text."""
        argv = [sys.executable, *map(str, command)]
        env = self.env(kernels, **settings)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert not done.returncode, done.stderr + done.stdout
        return json.loads(done.stdout.splitlines()[-1])

    def ranks(self, count: int, *command: object, kernels: Path | None = None, **settings: object) -> list[Any]:
        """The same of several processes, each on the device of its rank, which stands in the command for "RANK"."""
        env = self.env(kernels, **settings)
        running: list[subprocess.Popen[str]] = []
        try:
            for rank in range(count):
                argv = [sys.executable, *(str(rank) if word == "RANK" else str(word) for word in command)]
                own = {**env, "COMMRT_DEVICE": str(rank)}
                running.append(subprocess.Popen(argv, env=own, stdout=subprocess.PIPE, text=True))
            return [json.loads(one.communicate(timeout=LIMIT_S)[0]) for one in running]
        finally:
            for one in running:
                with one:
                    one.kill()


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """libcuda.so.1 under the real bindings."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")
    try:
        return Fake(cuda.library(), tmp_path_factory.mktemp("cache"))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def fake_hip(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """libamdhip64.so under the real bindings."""
    if importlib.util.find_spec("hip") is None:
        pytest.skip("hip-python is not installed")
    try:
        return Fake(build("libamdhip64.so", ("hip_memory.cpp", "hip_streams.cpp")), tmp_path_factory.mktemp("cache"))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def exchange_kernels() -> Path:
    """Of _programs/exchange.cu, for the CPU."""
    try:
        return kernels((PROGRAMS / "exchange.cu").read_text(), "exchange")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def plan_kernels() -> Path:
    """The executor, for the CPU."""
    source = '#include "run_plan.h"\n' + "".join(f"CR_RUN_PLAN({dtype}, {op})\n" for dtype, op in PAIRS)
    try:
        return kernels(source, *(f"run_plan_{dtype}_{op}" for dtype, op in PAIRS))
    except Unavailable as error:
        pytest.skip(str(error))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nobody may take these for results of a GPU."""
    ours = str(Path(__file__).parent.name)
    ran = [report for report in terminalreporter.getreports("passed") if f"tests/{ours}/" in report.nodeid]
    if ran:
        terminalreporter.write_line(f"{len(ran)} of the tests that passed ran on a {LABEL}")
