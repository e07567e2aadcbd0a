"""A process that makes and closes communicators again and again, and says what it holds before and after."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import commrt
from commrt.errors import CommrtError, Mismatch
from commrt.group import Options
from commrt.testing.world import World


def holdings() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    values = {line.partition(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "Threads"))}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:"),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": int(values["Threads"]),
        "kib": int(values["VmRSS"]),
    }


def alone() -> None:
    with commrt.init(0, 1) as comm:
        comm.all_reduce(np.ones(3))
        comm.all_reduce(np.ones(3), async_op=True).wait()


def two_by(transport: str) -> None:
    with World(2, transport) as world:
        world.run(lambda comm: comm.all_reduce(np.ones(1000)))
        world.run(lambda comm: comm.isend(np.ones(3), 1) if comm.rank == 0 else comm.recv(np.ones(3), 0))
        kept = world.run(lambda comm: comm.empty(1000))
        parts = world.run(lambda comm: comm.split(0))
        world.run(lambda comm: parts[comm.rank].all_reduce(kept[comm.rank]))
        world.run(lambda comm: parts[comm.rank].close())


def disagreeing() -> None:
    world = World(2, "shm", shared_engine=False)
    errors = world.outcomes(lambda comm: comm.all_reduce(np.ones(3 + comm.rank)))
    assert all(isinstance(error, Mismatch) for error in errors)
    world.close()


def refused() -> None:
    """Set-up fails half way."""
    try:
        World(2, options=Options(transport={"segment_kind": "emulated_launch"}))
    except CommrtError:
        return
    raise AssertionError("scratch in launch-coherent memory was accepted")


WAYS: dict[str, Callable[[], None]] = {
    "alone": alone,
    "loopback": lambda: two_by("loopback"),
    "shm": lambda: two_by("shm"),
    "disagreeing": disagreeing,
    "refused": refused,
}


def main() -> None:
    way, warm_up, turns = WAYS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    for _ in range(warm_up):
        way()
    before = holdings()
    for _ in range(turns):
        way()
    print(json.dumps({"before": before, "after": holdings()}))


main()
