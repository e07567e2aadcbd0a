"""Communicators made out of others: who is in, in which order, and that they don't disturb each other."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest

from commrt.communicator import Communicator
from commrt.errors import CommunicatorClosed, Mismatch
from commrt.group import Options
from commrt.testing import matrix
from commrt.testing.world import World

KINDS = pytest.mark.parametrize(
    ("transport", "options"),
    [("loopback", Options()), ("shm", Options()), ("loopback", Options({"family": "port"}))],
    ids=["loopback", "shm", "port"],
)


def ranks_of(comm: Communicator, parent: Communicator) -> list[int]:
    """The parent's ranks of the members, by rank, found out by the communicator itself."""
    gathered = comm.all_gather(np.array([parent.rank]))
    return [int(rank) for rank in gathered.ravel()]


def check_sums(comm: Communicator, count: int = 1000) -> None:
    x = np.full(count, comm.rank + 1, np.int64)
    assert (comm.all_reduce(x) == comm.size * (comm.size + 1) // 2).all()


@KINDS
def test_colors_and_keys(transport: str, options: Options) -> None:
    colors = [7, -1, 7, None, -1, 7]
    keys = [3, 0, 1, 0, 0, 2]

    def rank(comm: Communicator) -> Any:
        part = comm.split(colors[comm.rank], keys[comm.rank])
        if part is None:
            assert colors[comm.rank] is None
            return None
        with part:
            check_sums(part)
            found = ranks_of(part, comm)
            assert (part.rank, part.size) == (found.index(comm.rank), len(found))
            return found

    with World(6, transport, options=options, timeout_s=20.0) as world:
        found = world.run(rank)
        assert found == [[2, 5, 0], [1, 4], [2, 5, 0], None, [1, 4], [2, 5, 0]]
        world.run(check_sums)


def test_nobody_joins() -> None:
    with World(3) as world:
        assert world.run(lambda comm: comm.split(None)) == [None] * 3
        world.run(check_sums)


def test_reversed() -> None:
    def rank(comm: Communicator) -> list[int]:
        with comm.split(0, -comm.rank) as part:  # type: ignore[union-attr]
            assert part.rank == comm.size - 1 - comm.rank
            x = np.array([part.rank * 10.0])
            part.broadcast(x, root=0)
            assert x[0] == 0
            return ranks_of(part, comm)

    with World(4) as world:
        assert world.run(rank) == [[3, 2, 1, 0]] * 4


@KINDS
def test_nested(transport: str, options: Options) -> None:
    """Halves of halves, all open at the same time, in use in turn; then closed in another order on each rank."""

    def rank(comm: Communicator) -> None:
        half = comm.split(comm.rank // 4)
        assert half is not None
        quarter = half.split(half.rank // 2, -half.rank)
        assert quarter is not None
        alone = quarter.split(quarter.rank)
        assert alone is not None
        everyone = alone.split(0)
        assert (half.size, quarter.size, alone.size) == (4, 2, 1)
        assert everyone is not None
        for turn in range(20):
            for one in (comm, half, quarter, alone, everyone):
                check_sums(one, 1 + 501 * (turn % 5))
        assert ranks_of(quarter, comm) == [comm.rank // 2 * 2 + 1, comm.rank // 2 * 2]
        ends = [half, quarter, alone, everyone]
        for turn in range(4):
            ends[(turn + comm.rank) % 4].close()

    with World(8, transport, options=options, timeout_s=30.0) as world:
        world.run(rank)


def test_every_collective_on_a_part() -> None:
    def rank(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2, -comm.rank)
        assert part is not None
        with part:
            chosen = matrix.sample(matrix.variants(part.size, part.capabilities), 200, seed=comm.rank % 2)
            matrix.run(part, chosen)

    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    with World(5, timeout_s=30.0) as world:
        world.run(rank)


def test_settings_are_those_of_the_parent() -> None:
    def rank(comm: Communicator) -> None:
        with comm.split(0) as part:  # type: ignore[union-attr]
            assert part.settings == comm.settings
            assert part.links == comm.links
            assert part.explain("all_reduce", 8).choice.name == "ring"

    with World(2, algorithm="ring") as world:
        world.run(rank)


def test_a_part_outlives_its_parent() -> None:
    with World(2) as world:
        parts = world.run(lambda comm: comm.split(0))
        world.run(lambda comm: comm.close())
        threads = [threading.Thread(target=check_sums, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for part in parts:
            part.close()


def test_a_broken_part_leaves_its_parent_whole() -> None:
    def rank(comm: Communicator) -> None:
        part = comm.split(0)
        assert part is not None
        with pytest.raises(Mismatch):
            part.all_reduce(np.ones(10 + part.rank))
        check_sums(comm)
        with comm.split(0) as again:  # type: ignore[union-attr]
            check_sums(again)

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


def test_closed_parent() -> None:
    with World(2) as world:
        world.run(lambda comm: comm.close())
        for comm in world.communicators:
            with pytest.raises(CommunicatorClosed):
                comm.split(0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("commrt" in line for line in maps)


@pytest.mark.parametrize("transport", ["loopback", "shm"])
def test_closing_gives_everything_back(transport: str) -> None:
    def rank(comm: Communicator) -> None:
        for _ in range(10):
            with comm.split(0) as part:  # type: ignore[union-attr]
                check_sums(part)

    with World(2, transport) as world:
        world.run(rank)
        gc.collect()
        before = descriptors(), mappings()
        world.run(rank)
        gc.collect()
        assert (descriptors(), mappings()) == before
