"""Operations of ever new sizes cost no memory, and hardly more time than one that is known."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commrt.communicator import Communicator
from commrt.testing.world import World

_MOST_GROWTH_NBYTES = 1 << 20
_WARMUP = 1001
_COPRIME = 7919  # steps through all sizes in an order that is not theirs


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Sizes:
    """Operations whose number is their size: sums, exchanges of varying shape, messages, and background work."""

    def __init__(self, comm: Communicator, most: int) -> None:
        self.comm, self.most = comm, most
        self.x, self.out = np.ones(most, np.uint8), np.ones(most, np.uint8)

    def run(self, turn: int) -> None:
        comm, count = self.comm, turn * _COPRIME % self.most
        x, out = self.x[:count], self.out[:count]
        match turn % 5:
            case 0:
                comm.all_reduce(x, out, "max")
            case 1:
                whole = count // comm.size * comm.size
                comm.all_to_all(self._shaped(x, whole), self._shaped(out, whole))
            case 2:
                comm.all_reduce(x, out, "max", async_op=True).wait()
            case 3:
                comm.broadcast(x, root=turn % comm.size)
            case _:
                sent = comm.isend(x, (comm.rank + 1) % comm.size)
                comm.recv(out, (comm.rank - 1) % comm.size)
                sent.wait()

    def _shaped(self, flat: Any, whole: int) -> Any:
        return flat[:whole].reshape(self.comm.size, -1)


def grown(size: int, transport: str, number: int) -> int:
    """Bytes that the process grew by over `number` operations, each of another size, behind some to warm up."""

    def rank(comm: Communicator) -> None:
        sizes = Sizes(comm, number + _WARMUP)
        for turn in range(number, number + _WARMUP):
            sizes.run(turn)
        gc.collect()
        comm.barrier()
        before = resident_nbytes()
        comm.barrier()
        for turn in range(number):
            sizes.run(turn)
        gc.collect()
        comm.barrier()
        found.append(resident_nbytes() - before)
        comm.barrier()

    found: list[int] = []
    with World(size, transport, shared_engine=transport == "loopback") as world:
        world.run(rank)
    return min(found)


@pytest.mark.parametrize(
    ("transport", "number"),
    [("loopback", 100_000), ("shm", 10_000), pytest.param("shm", 100_000, marks=pytest.mark.slow)],
)
def test_memory_does_not_grow(transport: str, number: int) -> None:
    assert grown(3, transport, number) < _MOST_GROWTH_NBYTES


@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
def test_a_new_size_costs_like_a_known_one(collective: str) -> None:
    """Medians, in turn: the same size again and again, and sizes around it that were never seen."""
    pairs = 1500

    def rank(comm: Communicator) -> float:
        buffers = [np.ones(8 * pairs, np.float32) for _ in range(2)]
        call = getattr(comm, collective)
        known, new = [], []
        for turn in range(pairs):
            for times, count in ((known, pairs), (new, pairs // 2 + turn)):
                x, out = (buffer[: 2 * count] for buffer in buffers)
                start = time.perf_counter_ns()
                call(x, out)
                times.append(time.perf_counter_ns() - start)
        return statistics.median(new) / statistics.median(known)

    with World(2) as world:
        assert min(world.run(rank)) <= 2
