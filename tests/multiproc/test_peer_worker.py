"""The side-by-side benchmark's worker, driven over its standard streams as its driver does it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "pingpong", "barrier")
WORKER = [sys.executable, "-m", "commrt.testing.peer_worker"]

# One bit of one rank's result is flipped between the operation and its check.
FLIPPING = """
import os
import numpy
from commrt.testing import peer_worker

def flip(op, output):
    if os.environ["RANK"] == os.environ["FLIP_RANK"]:
        output.view(numpy.uint8)[int(os.environ["FLIP_BYTE"])] ^= 1 << int(os.environ["FLIP_BIT"])

peer_worker.main(flip)
"""


class Ranks:
    """Workers that were started, asked all at once, answering through rank 0."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def ask(self, op: str, nbytes: int, **more: Any) -> dict[str, Any]:
        request = {"cmd": "run", "op": op, "bytes": nbytes, "warmup": 2, "iters": 5, "inplace": 0, "check": 1, **more}
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        assert self.processes[0].stdout is not None
        answer: dict[str, Any] = json.loads(self.processes[0].stdout.readline())
        return answer


@contextmanager
def started(command: list[str], size: int, **environ: str) -> Iterator[Ranks]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {name: value for name, value in os.environ.items() if not name.startswith("COMMRT_")}
    common |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environ}
    cpus = sorted(os.sched_getaffinity(0))
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "BENCH_CPU": str(cpus[rank % len(cpus)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield Ranks(processes)
        others = [process.communicate(timeout=30)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * size
        assert others == [""] * size
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_of_the_protocol(size: int) -> None:
    with started(WORKER, size) as ranks:
        for op in OPERATIONS:
            for nbytes in (4, 1000, 65536):
                answer = ranks.ask(op, nbytes, inplace=int(nbytes == 1000))
                assert answer["ok"] is True, answer
                assert (answer["op"], answer["bytes"]) == (op, nbytes)
                assert len(answer["times_us"]) == 5
                assert all(time > 0 for time in answer["times_us"])
                assert answer["actual_bytes"] == actual(op, nbytes, size)
        assert ranks.ask("all_reduce", 64, check=0)["ok"] is None
        assert "unsupported" in ranks.ask("transpose", 64)
        cpus = sorted(os.sched_getaffinity(0))
        assert [os.sched_getaffinity(one.pid) for one in ranks.processes] == [
            {cpus[rank % len(cpus)]} for rank in range(size)
        ]


def actual(op: str, nbytes: int, size: int) -> int:
    """Rounded down to what divides, at least one element a rank."""
    unit = 4 * (size if op in ("all_gather", "reduce_scatter", "all_to_all") else 1)
    return 0 if op == "barrier" else max(unit, nbytes // unit * unit)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("byte", "bit"), [(0, 0), (513, 3), (-1, 7)])
def test_one_flipped_bit_fails_the_check(rank: int, byte: int, bit: int) -> None:
    """Wherever it is: in the lowest bit of the first element, in the middle, in the last sign, on either rank."""
    where = {"FLIP_RANK": str(rank), "FLIP_BYTE": str(byte), "FLIP_BIT": str(bit)}
    with started([sys.executable, "-c", FLIPPING], 2, **where) as ranks:
        for op in OPERATIONS:
            if op != "barrier":
                assert ranks.ask(op, 4096)["ok"] is False, op
        assert ranks.ask("barrier", 0)["ok"] is True


@pytest.mark.timeout(60)
def test_the_slowest_rank_counts() -> None:
    """Rank 1 holds the others up in each iteration of its own; rank 0, which does not wait for it, says so too."""
    slow = """
import os, time
from commrt.testing import peer_worker
bind = peer_worker.bind
def slow(comm, trial):
    call = bind(comm, trial)
    return call if comm.rank == 0 else lambda: (call(), time.sleep(0.02))
peer_worker.bind = slow
peer_worker.main()
"""
    with started([sys.executable, "-c", slow], 2) as ranks:
        assert min(ranks.ask("broadcast", 8)["times_us"]) >= 20000
