"""After warm-up a blocking collective allocates nothing, and asks the kernel for nothing while its peers are prompt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from commrt.testing.world import World

HERE = Path(__file__).parent / "_programs"


def traced(folder: Path) -> dict[str, str]:
    """The environment of a program whose allocations and system calls are to be counted."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler for the tracing library")
    shim = folder / "trace.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(HERE / "trace.c"), "-o", str(shim), "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(shim)}


def test_steady_state_allocates_nothing_and_stays_out_of_the_kernel(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commrt", "run", "-n", "2", "--no-prefix", str(HERE / "steady.py")],
        env=traced(tmp_path), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    batches = json.loads(done.stdout.strip().splitlines()[-1])
    # Python itself allocates now and then, and a neighbour may take a rank's cpu away: most batches see neither.
    assert sorted(allocations for allocations, _ in batches)[len(batches) // 2] == 0
    assert any(calls == 0 for _, calls in batches)


def test_the_interpreter_lock_is_free_while_a_collective_waits() -> None:
    """One thread waits natively for a rank that comes late; another one counts meanwhile."""
    counted = 0
    waiting = threading.Event()

    def ranks(comm: object) -> None:
        nonlocal counted
        if comm.rank == 0:  # type: ignore[attr-defined]
            waiting.set()
            comm.all_reduce(np.ones(4, np.float32))  # type: ignore[attr-defined]
        else:
            waiting.wait(10)
            for counted in range(1, 200_001):  # noqa: B007
                pass
            comm.all_reduce(np.ones(4, np.float32))  # type: ignore[attr-defined]

    with World(2) as world:
        world.run(ranks)
    assert counted == 200_000


def test_the_trace_counts(tmp_path: Path) -> None:
    """The control: a count that stays at zero whatever happens would prove nothing."""
    source = """
import ctypes
t, a, c = ctypes.CDLL(None), ctypes.c_long(), ctypes.c_long()
t.trace_begin()
t.sched_yield()
t.malloc(10_000_000)
t.trace_end(ctypes.byref(a), ctypes.byref(c))
print(a.value, c.value)
"""
    out = subprocess.run(
        [sys.executable, "-c", source], env=traced(tmp_path), capture_output=True, text=True, timeout=60, check=True
    )
    allocations, calls = map(int, out.stdout.split())
    assert allocations >= 1
    assert calls >= 1
