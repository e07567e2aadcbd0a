"""What a communicator offers beside single collectives: persistent operations, streams, outputs it makes, its end."""

from __future__ import annotations

import array
import threading
import time
from typing import Any

import numpy as np
import pytest

from commrt.backend import Stream
from commrt.communicator import Communicator
from commrt.errors import CommunicatorBroken, InvalidArgument, Mismatch, OperationTimeout
from commrt.group import Options
from commrt.plugins import default_registry
from commrt.testing.calls import bind
from commrt.testing.data import COLLECTIVES, ROOTED, Case, Trial
from commrt.testing.world import World

PREPARED = tuple(name for name in COLLECTIVES if name not in ("sendrecv", "barrier"))


def new_stream() -> Stream:
    stream: Stream = default_registry().require("backends", "cpu").stream()
    return stream


# --- persistent operations ---


@pytest.mark.parametrize("collective", PREPARED)
@pytest.mark.parametrize("transport", ["loopback", "shm"])
def test_prepared_once_started_often(transport: str, collective: str) -> None:
    """With its input rewritten each time, started and run in turn."""

    def rank(comm: Communicator) -> None:
        case = Case(collective, comm.size, 1021, "int64", "max", 1 if collective in ROOTED else 0)
        trial = Trial(case, comm.rank)
        arrays = (trial.x,) if collective == "broadcast" else (trial.x, trial.out)
        prepared = comm.prepare(collective, *arrays, op="max", root=case.root)
        assert prepared.collective == collective
        for turn in range(50):
            trial.fill(seed=turn)
            if turn % 2:
                prepared.run()
            else:
                prepared.start().wait()
            assert trial.wrong() == 0

    with World(3, transport, timeout_s=20.0) as world:
        world.run(rank)


def test_prepared_ones_among_others() -> None:
    """Two of them and ordinary calls in turn, some in flight together; each sees what its arrays hold when started."""

    def rank(comm: Communicator) -> None:
        a, b = np.zeros(100, np.int64), comm.empty(70_000, "int64")
        out = np.zeros_like(b)
        first, second = comm.prepare("all_reduce", a), comm.prepare("all_reduce", b, out, op="max", algorithm="ring")
        barrier = comm.prepare("barrier")
        for turn in range(40):
            a[:], b[:] = turn + comm.rank, turn * comm.rank
            works = [first.start(), second.start(), barrier.start()]
            c = comm.all_gather(np.array([comm.rank * turn]))
            for work in works if turn % 2 else reversed(works):
                work.wait()
            assert (a == 2 * turn + 1).all()
            assert (out == turn).all()
            assert c.ravel().tolist() == [0, turn]

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


def test_prepared_in_place_by_default() -> None:
    def rank(comm: Communicator) -> None:
        x, y = np.array([comm.rank + 1]), np.array([comm.rank + 5])
        comm.prepare("all_reduce", x).run()
        comm.prepare("reduce", y, root=1).run()
        assert x[0] == 3
        assert y[0] == (5 if comm.rank == 0 else 11)

    with World(2) as world:
        world.run(rank)


def test_preparing_is_no_operation() -> None:
    """One rank may prepare more than the others."""

    def rank(comm: Communicator) -> None:
        for _ in range(comm.rank * 5):
            comm.prepare("all_reduce", np.zeros(3))
        assert comm.all_reduce(np.ones(4)).tolist() == [2] * 4

    with World(2) as world:
        world.run(rank)


def test_prepared_keeps_its_arrays() -> None:
    def rank(comm: Communicator) -> None:
        prepared = [comm.prepare("all_reduce", np.full(50_000, 1.0), np.zeros(50_000)) for _ in range(20)]
        junk = [np.full(50_000, -1.0) for _ in range(40)]
        for one in prepared:
            one.run()
        assert all((one == -1).all() for one in junk)

    with World(2) as world:
        world.run(rank)


# --- streams ---


def test_a_stream_keeps_its_order() -> None:
    def rank(comm: Communicator) -> None:
        stream, x = new_stream(), np.ones(1000)
        for _ in range(20):
            comm.all_reduce(x, op="sum", stream=stream)
            stream.submit(lambda: np.multiply(x, 0.5, out=x))
        stream.synchronize()
        assert (x == 1).all()

    with World(2) as world:
        world.run(rank)


def test_operations_keep_their_order_across_streams() -> None:
    """Whatever stream each call is on: the communicator's order is that of the calls, and so is the data's."""

    def rank(comm: Communicator) -> None:
        streams: list[Stream | None] = [new_stream(), new_stream(), None]
        x = np.array([1.0])
        for turn in range(60):
            stream = streams[turn * 7 % 3]
            held_up = streams[turn % 2]
            if turn % 10 == 0 and held_up is not None:
                held_up.submit(lambda: time.sleep(0.005 * comm.rank))
            comm.all_reduce(x, op="sum" if turn % 2 else "avg", stream=stream)
            if turn % 15 == 7:
                comm.all_reduce(np.zeros(3), async_op=True).wait()
        for stream in streams:
            if stream is not None:
                stream.synchronize()
        assert x[0] == 2.0**30

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


def test_a_stream_waits_for_work() -> None:
    gate = threading.Event()

    def rank(comm: Communicator) -> None:
        x, seen = np.zeros(5000, np.int64), []
        if comm.rank == 1:
            assert gate.wait(10)
        x[:] = comm.rank + 1
        work = comm.all_reduce(x, async_op=True)
        stream, other = new_stream(), new_stream()
        work.wait_stream(stream)
        event = stream.submit(lambda: seen.append(x.copy()))
        other.wait_event(event)
        behind = other.record()
        if comm.rank == 0:
            assert not event.done()
            assert not behind.wait(0.05)
            gate.set()
        other.synchronize()
        assert (seen[0] == 3).all()

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


def test_work_of_a_stream() -> None:
    gate, both_looked = threading.Event(), threading.Barrier(2, timeout=10)

    def rank(comm: Communicator) -> None:
        stream, x = new_stream(), np.full(10, comm.rank + 1)
        stream.submit(lambda: gate.wait(10))
        work = comm.all_reduce(x, stream=stream)
        assert work.wait(0.02) is False
        assert not work.done()
        both_looked.wait()
        gate.set()
        assert work.wait() is True
        assert work.done()
        assert (x == 3).all()

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


def test_an_error_of_a_stream_surfaces_at_work_stream_and_next_call() -> None:
    def rank(comm: Communicator) -> None:
        stream = new_stream()
        work = comm.all_reduce(np.zeros(10 + comm.rank), stream=stream)
        with pytest.raises(Mismatch):
            work.wait()
        with pytest.raises(Mismatch):
            stream.synchronize()
        stream.synchronize()
        with pytest.raises(CommunicatorBroken, match="ranks disagree"):
            comm.all_reduce(np.zeros(10))

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


# --- arrays in and out ---


def test_outputs_that_are_made() -> None:
    def rank(comm: Communicator) -> None:
        x = np.arange(12, dtype=np.float32).reshape(4, 3) + comm.rank
        out = comm.all_gather(x)
        assert out.shape == (2, 4, 3)
        assert out.dtype == np.float32
        assert (out[1] == x - comm.rank + 1).all()
        part = comm.reduce_scatter(x)
        assert part.shape == (2, 3)
        assert (part == 2 * (x - comm.rank)[2 * comm.rank : 2 * comm.rank + 2] + 1).all()
        swapped = comm.all_to_all(x)
        assert swapped.shape == (4, 3)
        gathered = comm.gather(x, root=1)
        assert gathered is None if comm.rank == 0 else gathered.shape == (2, 4, 3)
        scattered = comm.scatter(x) if comm.rank == 0 else comm.scatter(None, np.empty((2, 3), np.float32))
        assert (scattered == (x - comm.rank)[2 * comm.rank : 2 * comm.rank + 2]).all()

    with World(2) as world:
        world.run(rank)


def test_results_are_the_arrays_that_were_passed() -> None:
    def rank(comm: Communicator) -> None:
        x, out, wide = np.ones(4), np.zeros(4), np.zeros(8)
        assert comm.all_reduce(x) is x
        assert comm.all_reduce(x, out) is out
        assert comm.broadcast(x) is x
        assert comm.all_gather(x, wide) is wide
        assert comm.reduce_scatter(x, np.zeros(2)).shape == (2,)
        assert comm.all_to_all(x, out) is out
        assert comm.recv(out, comm.rank) is out if comm.isend(x, comm.rank) else None

    with World(2) as world:
        world.run(rank)


@pytest.mark.parametrize(
    "make", [bytearray, lambda data: array.array("B", data), lambda data: memoryview(bytearray(data))]
)
def test_buffers_of_any_kind(make: Any) -> None:
    def rank(comm: Communicator) -> bytes:
        x = make(bytes([comm.rank + 1] * 1000))
        comm.all_reduce(x)
        return bytes(x)

    with World(3) as world:
        assert world.run(rank) == [bytes([6] * 1000)] * 3


def test_read_only_inputs_are_read() -> None:
    def rank(comm: Communicator) -> None:
        out = np.zeros(4, np.uint8)
        comm.all_reduce(b"\1\2\3\4", out)
        assert out.tolist() == [2, 4, 6, 8]

    with World(2) as world:
        world.run(rank)


def test_any_dtype_moves() -> None:
    def rank(comm: Communicator) -> None:
        for dtype in ("bool", "complex64", "complex128", "uint16", "int8", "uint64"):
            x = np.full(77, comm.rank + 1).astype(dtype)
            assert comm.all_gather(x)[1].tolist() == np.full(77, 2).astype(dtype).tolist()

    with World(2) as world:
        world.run(rank)


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in ("barrier", "sendrecv")])
def test_deadlines_and_ways_to_run(collective: str) -> None:
    """The arguments that every collective takes."""

    def rank(comm: Communicator) -> None:
        trial = Trial(Case(collective, comm.size, 100, "float32"), comm.rank)
        for more in ({"timeout": 10.0}, {"async_op": True}, {"stream": new_stream()}, {"timeout": float("inf")}):
            trial.fill()
            work = bind(comm, trial, **more)()
            if "async_op" in more or "stream" in more:
                work.wait()
            assert trial.wrong() == 0

    with World(2) as world:
        world.run(rank)


def test_precise_rounds_once() -> None:
    """1 + 2^-11 three times, in float16: rounding at each step loses what rounding once keeps."""

    once = np.float16(1 + 4 * 2.0**-11)

    def rank(comm: Communicator) -> None:
        x = np.full(100_000, 1.0 if comm.rank == 0 else 2.0**-11, np.float16)
        assert (comm.all_reduce(x, np.zeros_like(x), precise=True) == once).all()
        assert (comm.all_reduce(x, algorithm="ring") != once).any()

    with World(5) as world:
        world.run(rank)


# --- the end ---


def test_close_is_idempotent_and_a_context() -> None:
    with World(2) as world:
        for comm in world.communicators:
            with comm as same:
                assert same is comm
            comm.close()
            comm.close()
            comm.abort()


def test_an_error_in_the_context_ends_the_peers() -> None:
    def rank(comm: Communicator) -> float:
        start = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError), comm:
                raise ZeroDivisionError
        else:
            with pytest.raises(Exception, match=r"aborted|gone") as caught:
                comm.all_reduce(np.ones(3))
            assert not isinstance(caught.value, OperationTimeout)
        return time.monotonic() - start

    with World(2, timeout_s=20.0) as world:
        assert max(world.run(rank)) < 5


def test_two_blocked_threads_of_a_rank_see_its_close() -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 1:
            return
        errors: list[BaseException] = []

        def receive() -> None:
            try:
                comm.recv(np.zeros(3), 1)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=receive) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        comm._close(0.2)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert len(errors) == 2

    with World(2, timeout_s=20.0) as world:
        world.run(rank)


def test_links_and_capabilities() -> None:
    with World(3, "shm") as world:
        comm = world.communicators[1]
        assert {peer: comm.links[peer] for peer in (0, 2)} == {0: "shm", 2: "shm"}
        assert {"mapped", "direct"} <= comm.capabilities
        assert comm.settings.transport == "shm"
        assert "all_reduce" in str(comm.explain("all_reduce", 1 << 20))
        with pytest.raises(InvalidArgument, match="symmetric"):
            comm.explain("all_reduce", 8, algorithm="direct")


def test_symmetric_memory_over_links_that_map_none() -> None:
    def rank(comm: Communicator) -> None:
        shared = comm.empty(1000, "float32")
        for round_ in range(3):
            shared[:] = comm.rank + round_
            assert (comm.all_reduce(shared) == 1 + 2 * round_).all()
        assert "mapped" not in comm.capabilities

    with World(2, options=Options({"family": "port"}), timeout_s=20.0) as world:
        world.run(rank)
