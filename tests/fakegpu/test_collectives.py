"""The same plans by kernels on fake drivers, in host memory, and between both: bit for bit what shared memory gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import LIMIT_S, PROGRAMS, Fake


def launched(env: dict[str, str], ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "commrt", *map(str, command)]
    argv[4:4] = ["-n", str(ranks)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def results(env: dict[str, str], out: Path, backends: str) -> list[Any]:
    """What every rank of 4 got."""
    done = launched(env, 4, "run", PROGRAMS / "collectives.py", out, backends)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(4)]


@pytest.fixture(scope="session")
def on_hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results(dict(os.environ), tmp_path_factory.mktemp("hosts") / "out", "cpu")


def test_devices_alone(fake_cuda: Fake, plan_kernels: Path, on_hosts: list[Any], tmp_path: Path) -> None:
    found = results(fake_cuda.env(plan_kernels), tmp_path / "out", "cuda")
    assert all(one["backend"] == "cuda" and one["links"] == ["cuda_ipc"] for one in found)
    assert [one["results"] for one in found] == [one["results"] for one in on_hosts]


def test_devices_and_hosts(fake_cuda: Fake, plan_kernels: Path, on_hosts: list[Any], tmp_path: Path) -> None:
    found = results(fake_cuda.env(plan_kernels), tmp_path / "out", "cuda,cuda,cpu")
    assert [one["links"] for one in found] == [["cuda_ipc", "shm"], ["cuda_ipc", "shm"], ["shm"], ["cuda_ipc", "shm"]]
    assert [one["results"] for one in found] == [one["results"] for one in on_hosts]


@pytest.fixture(scope="session")
def both(fake_cuda: Fake, fake_hip: Fake, plan_kernels: Path) -> dict[str, str]:
    """The environment of a process that finds both drivers."""
    env = fake_cuda.env(plan_kernels)
    return {**env, "LD_LIBRARY_PATH": os.pathsep.join([str(fake_hip.library), env["LD_LIBRARY_PATH"]])}


def test_devices_of_the_other_vendor(both: dict[str, str], on_hosts: list[Any], tmp_path: Path) -> None:
    found = results(both, tmp_path / "out", "hip")
    assert all(one["backend"] == "hip" and one["links"] == ["xgmi"] for one in found)
    assert [one["results"] for one in found] == [one["results"] for one in on_hosts]


def test_devices_of_two_vendors_and_a_host(both: dict[str, str], on_hosts: list[Any], tmp_path: Path) -> None:
    found = results(both, tmp_path / "out", "cuda,cuda,hip,cpu")
    assert [one["backend"] for one in found] == ["cuda", "cuda", "hip", "cpu"]
    assert [one["links"] for one in found] == [["cuda_ipc", "shm"], ["cuda_ipc", "shm"], ["shm"], ["shm"]]
    assert [one["results"] for one in found] == [one["results"] for one in on_hosts]


def test_bench_says_what_it_ran_on(fake_cuda: Fake, plan_kernels: Path) -> None:
    done = launched(
        fake_cuda.env(plan_kernels), 4, "bench", "all_reduce", "-e", "64K", "--iters", "2", "--backend", "cuda"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU" in next(line for line in done.stdout.splitlines() if line.startswith("# level:"))
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_a_captured_graph_is_launched_a_thousand_times(fake_cuda: Fake, plan_kernels: Path, tmp_path: Path) -> None:
    done = launched(fake_cuda.env(plan_kernels), 2, "run", PROGRAMS / "graph.py", tmp_path / "out", 1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(Path(f"{tmp_path}/out.{rank}").read_text()) for rank in range(2)] == [[], []]


def test_opposite_orders_on_full_devices_end_within_the_timeout(
    fake_cuda: Fake, plan_kernels: Path, tmp_path: Path
) -> None:
    """Each rank's device holds one grid, which waits for the other rank's second one: unless the grids are lucky, the
    watch ends one, and so lets the others in.
    """
    env = fake_cuda.env(plan_kernels, multiprocessors=1, threads=512)
    done = launched(env, 2, "run", PROGRAMS / "opposite.py", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(Path(f"{tmp_path}/out.{rank}").read_text()) for rank in range(2)]
    assert all(one["seconds"] < 15 for one in found)
    ends = {end for one in found for end in one["ends"]}
    assert ends <= {"OperationTimeout", "PeerLost", "Aborted", "CommunicatorBroken", "well"}
