"""Work that is under way while the program does something else. Ranks are threads, with one engine or each its own."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt.communicator import Communicator, Recv, Send
from commrt.errors import InvalidArgument, OperationTimeout
from commrt.testing import scenarios
from commrt.testing.world import World

WORLDS = {
    "loopback": {"transport": "loopback"},
    "engine of its own": {"transport": "loopback", "shared_engine": False},
    "shm": {"transport": "shm", "shared_engine": False},
}


@pytest.fixture(params=WORLDS, ids=lambda name: str(name).replace(" ", "-"))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(WORLDS[request.param])


@pytest.mark.parametrize("scenario", scenarios.ASYNCHRONY, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_scenario(kind: dict[str, Any], scenario: scenarios.Scenario, size: int) -> None:
    with World(size, timeout_s=20.0, **kind) as world:
        world.run(scenario)


@pytest.fixture
def pair(kind: dict[str, Any]) -> Iterator[World]:
    with World(2, timeout_s=20.0, **kind) as world:
        yield world


def test_a_wait_that_times_out_leaves_the_work_running(pair: World) -> None:
    entered = threading.Event()

    def rank(comm: Communicator) -> None:
        x = np.full(1000, comm.rank + 1.0, np.float32)
        if comm.rank == 1:
            assert entered.wait(10)
            comm.all_reduce(x)
        else:
            work = comm.all_reduce(x, async_op=True)
            for timeout in (0, 0.02, 0.0):
                start = time.monotonic()
                assert work.wait(timeout) is False
                assert time.monotonic() - start < 5
            assert not work.done()
            entered.set()
            assert work.wait(10) is True
            assert work.done()
            assert work.wait() is True
        assert (x == 3).all()

    pair.run(rank)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan")])
def test_a_bad_timeout_is_refused_and_harms_nothing(pair: World, timeout: float) -> None:
    def rank(comm: Communicator) -> None:
        x = np.ones(10, np.int32)
        work = comm.all_reduce(x, async_op=True)
        with pytest.raises(InvalidArgument, match="timeout"):
            work.wait(timeout)
        assert work.wait(float("inf"))
        with pytest.raises(InvalidArgument, match="timeout"):
            comm.all_reduce(x, timeout=timeout)
        comm.all_reduce(x)
        assert (x == 4).all()

    pair.run(rank)


def test_an_operation_with_a_deadline_of_its_own_ends_then(pair: World) -> None:
    def rank(comm: Communicator) -> float:
        if comm.rank == 1:
            return 0.0
        start = time.monotonic()
        with pytest.raises(OperationTimeout, match=r"all_reduce\(count 10, .*did not end in time") as caught:
            comm.all_reduce(np.ones(10, np.float32), timeout=0.2)
        assert caught.value.context.operation == "all_reduce"
        return time.monotonic() - start

    took = pair.run(rank)[0]
    assert 0.2 <= took < 5


def test_dropped_handles_keep_their_arrays(pair: World) -> None:
    """Whoever drops the Work and the arrays at once has neither freed the memory nor stopped the operation."""
    dropped = threading.Barrier(2, timeout=20)

    def start(comm: Communicator, turn: int, kept: list[Any]) -> None:
        x = np.full(5000 + turn, turn + comm.rank, np.int64)
        out = np.zeros_like(x)
        kept.append(memoryview(out) if turn % 10 == 0 else None)
        comm.all_reduce(x, out, async_op=True)

    def rank(comm: Communicator) -> None:
        kept: list[Any] = []
        for turn in range(100):
            if comm.rank == 0 or turn < 50:
                start(comm, turn, kept)
        gc.collect()
        junk = [np.full(5000 + turn, -1, np.int64) for turn in range(100)]
        dropped.wait()
        for turn in range(50, 100):
            if comm.rank == 1:
                start(comm, turn, kept)
        comm.barrier()
        assert len(junk) == 100
        for turn in range(0, 100, 10):
            assert (np.frombuffer(kept[turn], np.int64) == 2 * turn + 1).all()

    pair.run(rank)


def test_a_thousand_in_flight_waited_for_backwards(pair: World) -> None:
    def rank(comm: Communicator) -> None:
        arrays = [np.full(1 + 7 * turn, turn * (comm.rank + 1), np.int64) for turn in range(1000)]
        works = [comm.all_reduce(x, async_op=True) for x in arrays]
        for turn in reversed(range(1000)):
            works[turn].wait()
            assert (arrays[turn] == 3 * turn).all()

    pair.run(rank)


def test_a_batch_in_any_order(pair: World) -> None:
    def rank(comm: Communicator) -> None:
        peer = 1 - comm.rank
        out = [np.zeros(count, np.int32) for count in (3, 50_000, 9)]
        transfers: list[Send | Recv] = [Send(np.full(3, comm.rank, np.int32), peer), Recv(out[0], peer)]
        transfers += [Recv(out[1], comm.rank), Send(np.full(50_000, 7 + comm.rank, np.int32), comm.rank)]
        transfers += [Send(np.full(9, 20 + comm.rank, np.int32), peer), Recv(out[2], peer)]
        if comm.rank:
            transfers = [transfers[index] for index in (1, 0, 3, 5, 2, 4)]
        work = comm.batch(transfers)
        assert work.wait(20)
        assert work.done()
        assert [int(one[0]) for one in out] == [peer, 7 + comm.rank, 20 + peer]
        assert all((one == one[0]).all() for one in out)

    pair.run(rank)


@pytest.mark.parametrize("algorithm", [None, "packets", "put", "direct"])
@pytest.mark.parametrize("count", [0, 1, 1000, 70_000])
def test_sends_to_oneself(algorithm: str | None, count: int) -> None:
    def rank(comm: Communicator) -> None:
        x, out = np.arange(count, dtype=np.int64) + comm.rank, np.zeros(count, np.int64)
        sent = comm.isend(x, comm.rank, algorithm=algorithm)
        comm.recv(out, comm.rank, algorithm=algorithm)
        sent.wait()
        assert (out == x).all()

    for size in (1, 2):
        with World(size, timeout_s=20.0) as world:
            world.run(rank)


def test_closing_finishes_what_was_started(kind: dict[str, Any]) -> None:
    with World(2, **kind) as world:
        arrays = [np.ones(200_000, np.int32) for _ in range(2)]

        def rank(comm: Communicator) -> None:
            comm.all_reduce(arrays[comm.rank], async_op=True)
            comm.close()

        world.run(rank)
    assert all((one == 2).all() for one in arrays)
