"""abort and close: from any thread, at any time, more than once; whoever is blocked returns at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from commrt.backends.cpu.stream import CpuStream
from commrt.communicator import Communicator, Recv, Send
from commrt.errors import Aborted, CommunicatorBroken, CommunicatorClosed
from commrt.testing.world import World

RETURNS_S = 1.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # as busy as the machine is
KINDS = [("loopback", True), ("shm", True), ("shm", False)]
BLOCKING: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(3)),
    "large all_reduce": lambda comm: comm.all_reduce(np.ones(1 << 19)),
    "broadcast": lambda comm: comm.broadcast(np.ones(3), root=2),
    "recv": lambda comm: comm.recv(np.ones(3), 2),
    "send": lambda comm: comm.send(np.ones(1 << 19), 2),
    "wait": lambda comm: comm.all_reduce(np.ones(3), async_op=True).wait(),
    "irecv": lambda comm: comm.irecv(np.ones(3), 2).wait(),
    "stream": lambda comm: comm.all_reduce(np.ones(3), stream=CpuStream()).wait(),
    "batch": lambda comm: comm.batch([Send(np.ones(1 << 19), 2), Recv(np.ones(3), 2)]).wait(),
    "split": lambda comm: comm.split(0),
    "empty": lambda comm: comm.empty(10),
}  # fmt: skip


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}, {'one engine' if kind[1] else 'an engine each'}")
def world_of(request: pytest.FixtureRequest) -> Callable[[int], World]:
    transport, shared = request.param

    def make(size: int) -> World:
        world = World(size, transport, shared_engine=shared, timeout_s=30.0, close_timeout_s=1.0)
        world.run(lambda comm: comm.barrier())  # what is imported at first use is
        return world

    return make


def outcome(function: Callable[[], Any]) -> tuple[Exception | None, float]:
    """What it raised, and when it returned."""
    try:
        function()
    except Exception as error:
        return error, time.monotonic()
    return None, time.monotonic()


def settle() -> None:
    """Long enough for threads that were started to block; a test holds if they have not, too."""
    time.sleep(0.1)


@pytest.mark.parametrize("blocking", list(BLOCKING))
def test_a_blocked_call_returns(world_of: Callable[[int], World], blocking: str) -> None:
    """Rank 2 never comes; rank 0 is aborted from another thread."""
    world = world_of(3)
    comms = world.communicators
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(outcome, lambda comm=comm: BLOCKING[blocking](comm)) for comm in comms[:2]]
        settle()
        start = time.monotonic()
        comms[0].abort()
        assert time.monotonic() - start < RETURNS_S
        for rank, call in enumerate(calls):
            error, at = call.result(20)
            assert type(error) is Aborted, error
            assert at - start < RETURNS_S, error
            assert "aborted by rank 0" in str(error) if rank else "was aborted" in str(error)
    if blocking not in ("recv", "send", "irecv", "batch"):  # though all that rank 2 needs has come
        assert type(outcome(lambda: BLOCKING[blocking](comms[2]))[0]) is Aborted
    for comm in comms:
        start = time.monotonic()
        comm.close()
        assert time.monotonic() - start < RETURNS_S
    world.close()


def test_two_in_opposite_order(world_of: Callable[[int], World]) -> None:
    """Both ranks block on both communicators, and abort them in opposite order."""
    world = world_of(2)
    pairs = world.run(lambda comm: [comm, comm.split(0)])

    def run(comm: Communicator) -> list[tuple[Exception | None, float]]:
        mine = pairs[comm.rank]
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(outcome, lambda one=one: one.recv(np.ones(3), 1 - comm.rank)) for one in mine]
            settle()
            start = time.monotonic()
            for one in mine if comm.rank else reversed(mine):
                one.abort()
            found = [call.result(20) for call in calls]
        return [(error, at - start) for error, at in found]

    for found in world.run(run):
        for error, took in found:
            assert isinstance(error, Aborted)
            assert took < 2 * RETURNS_S
    world.run(lambda comm: pairs[comm.rank][1].close())
    world.close()


def test_one_does_not_touch_another(world_of: Callable[[int], World]) -> None:
    """A thread that is blocked on one communicator drives all of the process: it gives way to abort and close."""
    world = world_of(2)
    others = world.run(lambda comm: comm.split(0))
    third = world.run(lambda comm: comm.split(0))
    with ThreadPoolExecutor() as pool:
        x = np.zeros(3)
        blocked = pool.submit(outcome, lambda: others[0].recv(x, 1))
        settle()
        start = time.monotonic()
        world.communicators[0].abort()
        assert time.monotonic() - start < RETURNS_S
        start = time.monotonic()
        third[0].close()
        assert time.monotonic() - start < RETURNS_S
        assert not blocked.done()
        others[1].send(np.full(3, 7.0), 0)
        assert blocked.result(20)[0] is None
        assert (x == 7).all()
    world.run(lambda comm: (others[comm.rank].close(), third[comm.rank].close()))
    world.outcomes(lambda comm: comm.close())
    world.close()


def test_an_idle_one(world_of: Callable[[int], World]) -> None:
    """The next call of every rank raises, whatever it needs of others; later ones repeat the cause."""
    world = world_of(3)
    world.communicators[1].abort()
    world.communicators[1].abort()
    for comm in world.communicators:
        error, _ = outcome(lambda comm=comm: comm.broadcast(np.ones(3)))
        assert type(error) is Aborted, error
        for call in (lambda comm=comm: comm.barrier(), lambda comm=comm: comm.irecv(np.ones(1), (comm.rank + 1) % 3)):
            error, _ = outcome(call)
            assert type(error) is CommunicatorBroken
            assert "the communicator was aborted" in str(error)
    world.close()
    world.communicators[1].abort()


def test_by_many_threads_at_once(world_of: Callable[[int], World]) -> None:
    """Ranks run, and are aborted and closed by all sorts of threads in the middle of it."""
    for turn in range(10):
        world = world_of(2)

        def run(comm: Communicator) -> Exception | None:
            while True:
                error, _ = outcome(lambda: comm.all_reduce(np.ones(2000)))
                if error is not None:
                    return error

        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(run, comm) for comm in world.communicators]
            time.sleep(0.001 * turn)
            ends = [pool.submit(comm.abort) for comm in world.communicators for _ in range(2)]
            ends += [pool.submit(outcome, comm.close) for comm in world.communicators]
            for end in ends:
                end.result(20)
            for each in runs:
                assert isinstance(each.result(20), (Aborted, CommunicatorBroken, CommunicatorClosed))
        world.close()


def test_close_under_a_blocked_call(world_of: Callable[[int], World]) -> None:
    """It is given the close timeout to end, then it raises; close itself is no error."""
    world = world_of(2)
    comm = world.communicators[0]
    with ThreadPoolExecutor() as pool:
        blocking = [lambda: comm.all_reduce(np.ones(3)), lambda: comm.recv(np.ones(3), 1)]
        calls = [pool.submit(outcome, call) for call in blocking]
        settle()
        start = time.monotonic()
        comm.close()
        assert 0.5 < time.monotonic() - start < 1.0 + RETURNS_S
        for call in calls:
            assert isinstance(call.result(20)[0], CommunicatorClosed)
    world.close()


def test_close_is_idempotent_and_final(world_of: Callable[[int], World]) -> None:
    world = world_of(2)
    prepared = world.run(lambda comm: comm.prepare("all_reduce", np.ones(3)))
    world.run(lambda comm: comm.all_reduce(np.ones(3)))
    world.run(lambda comm: comm.close())
    comm = world.communicators[0]
    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(comm.close) for _ in range(4)]:
            start = time.monotonic()
            each.result(5)
            assert time.monotonic() - start < 0.5
    for call in (
        lambda: comm.all_reduce(np.ones(3)), lambda: comm.send(np.ones(3), 1), lambda: comm.irecv(np.ones(3), 1),
        comm.barrier, lambda: comm.split(0), lambda: comm.empty(3), prepared[0].run, prepared[0].start,
        lambda: comm.prepare("barrier"), lambda: comm.batch([Recv(np.ones(3), 1)]),
    ):  # fmt: skip
        start = time.monotonic()
        with pytest.raises(CommunicatorClosed, match="is closed"):
            call()
        assert time.monotonic() - start < 0.1
    comm.abort()
    assert comm.size == 2
    world.close()


def test_close_lets_a_late_peer_finish(world_of: Callable[[int], World]) -> None:
    """A root that closes at once has sent all; its peer comes later."""
    world = world_of(2)

    def run(comm: Communicator) -> Any:
        x = np.full(3, comm.rank + 1)
        if comm.rank:
            time.sleep(0.3)
        comm.broadcast(x)
        comm.close()
        return x

    assert all((x == 1).all() for x in world.run(run))
    world.close()


def test_an_exception_in_a_with_block_reaches_the_peers(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    entered = threading.Barrier(3)

    def run(comm: Communicator) -> float:
        with comm:
            entered.wait()
            if comm.rank == 1:
                raise ZeroDivisionError
            start = time.monotonic()
            with pytest.raises(Aborted, match="aborted by rank 1"):
                comm.barrier()
            return time.monotonic() - start

    results = world.outcomes(run)
    assert isinstance(results[1], ZeroDivisionError)
    assert max(results[0], results[2]) < 2.0
    world.close()
