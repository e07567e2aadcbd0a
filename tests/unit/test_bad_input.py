"""What is wrong with a call is said at once, by a typed error, and the communicator goes on working afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from commrt.communicator import Communicator, Send
from commrt.errors import (
    CommrtError,
    CommunicatorClosed,
    ConfigError,
    InvalidArgument,
    UnknownName,
    UnsupportedType,
)
from commrt.testing.world import World

Call = Callable[[Communicator], Any]
F32 = np.float32


def read_only(count: int) -> Any:
    x = np.zeros(count, F32)
    x.flags.writeable = False
    return x


def strided(count: int) -> Any:
    return np.zeros((count, 2), F32)[:, 0]


def overlapping(comm: Communicator) -> Any:
    x = np.zeros(30, F32)
    return comm.all_reduce(x[:20], x[10:])


SAME_TYPE = "x is of float32, out of float64"

# What is called on every rank, the error, and what its message says.
CASES: dict[str, tuple[Call, type[Exception], str]] = {
    "reduction of bool": (lambda c: c.all_reduce(np.zeros(4, bool)), UnsupportedType, "supported: each of sum, prod"),
    "reduction of complex": (lambda c: c.reduce(np.zeros(4, "c8")), UnsupportedType, "complex64.*supported"),
    "dtype unknown": (lambda c: c.all_reduce(np.zeros(4, "U3")), UnsupportedType, "supported"),
    "dtype of objects": (lambda c: c.all_reduce(np.zeros(4, object)), UnsupportedType, "supported"),
    "byte order": (lambda c: c.all_reduce(np.zeros(4, ">f4")), UnsupportedType, "byte order"),
    "op unknown": (lambda c: c.all_reduce(np.zeros(4), op="summ"), UnsupportedType, "did you mean 'sum'"),
    "op None": (lambda c: c.all_reduce(np.zeros(4), op=None), UnsupportedType, "supported: sum"),  # type: ignore[arg-type]
    "strided": (lambda c: c.all_reduce(strided(4)), InvalidArgument, "not contiguous"),
    "strided out": (lambda c: c.all_reduce(np.zeros(4, F32), strided(4)), InvalidArgument, "not contiguous"),
    "read-only in place": (lambda c: c.all_reduce(read_only(4)), InvalidArgument, "read-only"),
    "read-only out": (lambda c: c.all_gather(np.zeros(4, F32), read_only(8)), InvalidArgument, "read-only"),
    "read-only broadcast": (lambda c: c.broadcast(read_only(4)), InvalidArgument, "read-only"),
    "bytes": (lambda c: c.all_reduce(b"1234"), InvalidArgument, "read-only"),
    "no array": (lambda c: c.all_reduce([1, 2]), InvalidArgument, "is not an array"),
    "None": (lambda c: c.all_reduce(None), InvalidArgument, "missing"),
    "size all_reduce": (lambda c: c.all_reduce(np.zeros(4), np.zeros(5)), InvalidArgument, "x has 4 .* out has 5"),
    "size all_gather": (lambda c: c.all_gather(np.zeros(4), np.zeros(9)), InvalidArgument, "9 elements"),
    "size reduce_scatter": (lambda c: c.reduce_scatter(np.zeros(5), np.zeros(2)), InvalidArgument, "5 elements"),
    "size reduce_scatter alone": (lambda c: c.reduce_scatter(np.zeros(5)), InvalidArgument, "does not divide"),
    "size all_to_all": (lambda c: c.all_to_all(np.zeros(4), np.zeros(6)), InvalidArgument, "part"),
    "dtypes differ": (lambda c: c.all_reduce(np.zeros(4, F32), np.zeros(4)), InvalidArgument, SAME_TYPE),
    "overlap": (overlapping, InvalidArgument, "overlap"),
    "all_to_all in place": (lambda c: c.all_to_all(x := np.zeros(4), x), InvalidArgument, "no in-place form"),
    "algorithm unknown": (lambda c: c.all_reduce(np.zeros(4), algorithm="rnig"), UnknownName, "did you mean 'ring'"),
    "algorithm of another": (lambda c: c.all_gather(np.zeros(4), algorithm="tree"), UnknownName, "known: "),
    "algorithm unfit": (lambda c: c.all_reduce(np.zeros(4), algorithm="direct"), InvalidArgument, "symmetric memory"),
    "root too large": (lambda c: c.broadcast(np.zeros(4), root=2), InvalidArgument, "root 2 is not in 0..1"),
    "root negative": (lambda c: c.reduce(np.zeros(4), root=-1), InvalidArgument, "root -1 is not in 0..1"),
    "root huge": (lambda c: c.broadcast(np.zeros(4), root=1 << 70), InvalidArgument, "root .* is not in 0..1"),
    "root no number": (lambda c: c.broadcast(np.zeros(4), root="0"), InvalidArgument, "root"),  # type: ignore[arg-type]
    "root a float": (lambda c: c.gather(np.zeros(4), root=1.0), InvalidArgument, "root"),  # type: ignore[arg-type]
    "peer too large": (lambda c: c.send(np.zeros(4), 2), InvalidArgument, "peer 2 is not in 0..1"),
    "peer negative": (lambda c: c.irecv(np.zeros(4), -1), InvalidArgument, "peer -1 is not in 0..1"),
    "peer no number": (lambda c: c.isend(np.zeros(4), None), InvalidArgument, "peer None"),  # type: ignore[arg-type]
    "receive read-only": (lambda c: c.recv(read_only(4), 0), InvalidArgument, "read-only"),
    "batch of others": (lambda c: c.batch([(np.zeros(4), 0)]), InvalidArgument, "Send and Recv"),  # type: ignore[list-item]
    "batch, second bad": (lambda c: c.batch([Send(np.zeros(4), 9)]), InvalidArgument, "peer 9"),
    "scatter without out": (lambda c: c.scatter(None, None, root=1 - c.rank), InvalidArgument, "needs out="),
    "prepare unknown": (lambda c: c.prepare("all_reduced", np.zeros(4)), UnknownName, "did you mean 'all_reduce'"),
    "prepare bad": (lambda c: c.prepare("all_gather", np.zeros(4)), InvalidArgument, "out is missing"),
    "explain unknown": (lambda c: c.explain("allreduce", 8), UnknownName, "did you mean 'all_reduce'"),
    "color": (lambda c: c.split("red"), InvalidArgument, "color is an integer"),  # type: ignore[arg-type]
    "key": (lambda c: c.split(0, 1.5), InvalidArgument, "key is an integer"),  # type: ignore[arg-type]
    "key None": (lambda c: c.split(0, None), InvalidArgument, "key is an integer"),  # type: ignore[arg-type]
    "color too large": (lambda c: c.split(1 << 70), InvalidArgument, "color"),
    "empty of negative": (lambda c: c.empty((2, -1)), InvalidArgument, "negative"),
    "empty of no shape": (lambda c: c.empty("3"), InvalidArgument, "shape"),  # type: ignore[arg-type]
    "empty of floats": (lambda c: c.empty((2.5,)), InvalidArgument, "shape"),  # type: ignore[arg-type]
    "empty of no dtype": (lambda c: c.empty(3, "float33"), UnsupportedType, "did you mean 'float32'"),
    "empty of huge": (lambda c: c.empty(1 << 62, "uint8"), MemoryError, "memory"),
    "empty of huger": (lambda c: c.empty((1 << 40, 1 << 40)), MemoryError, "memory"),
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=20.0) as made:
        yield made


def works(comm: Communicator) -> None:
    x = np.full(1000, comm.rank + 1, np.int64)
    assert (comm.all_reduce(x) == 3).all()
    out = np.zeros(3, F32)
    sent = comm.isend(np.full(3, comm.rank, F32), 1 - comm.rank)
    assert (comm.recv(out, 1 - comm.rank) == 1 - comm.rank).all()
    sent.wait()


@pytest.mark.parametrize("name", CASES)
def test_refused_at_once(world: World, name: str) -> None:
    call, kind, message = CASES[name]

    def rank(comm: Communicator) -> None:
        start = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            call(comm)
        assert type(caught.value) is kind
        assert time.monotonic() - start < 5
        works(comm)

    world.run(rank)


@pytest.mark.parametrize("name", [name for name in CASES if name != "empty of huge"])
def test_refused_on_one_rank_alone(world: World, name: str) -> None:
    """The bad call of one rank says nothing to its peers, and theirs still match."""

    def rank(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(CASES[name][1]):
                CASES[name][0](comm)
        works(comm)

    world.run(rank)


def test_ranks_of_numpy_are_ranks(world: World) -> None:
    def rank(comm: Communicator) -> None:
        one, peer = np.int64(1), np.int32(1 - comm.rank)
        x = np.full(3, comm.rank, F32)
        assert (comm.broadcast(x, root=one) == 1).all()
        gathered = comm.gather(np.array([comm.rank]), root=one)
        assert gathered is None if comm.rank == 0 else gathered.ravel().tolist() == [0, 1]
        sent = comm.isend(np.array([comm.rank + 5]), peer)
        assert comm.recv(np.zeros(1, np.int64), peer)[0] == 6 - comm.rank
        sent.wait()
        assert comm.empty((np.int64(2), 3)).shape == (2, 3)

    world.run(rank)


def closed() -> Communicator:
    with World(1) as world:
        return world.communicators[0]


EVERYTHING: dict[str, Call] = {
    "all_reduce": lambda c: c.all_reduce(np.zeros(1)),
    "all_gather": lambda c: c.all_gather(np.zeros(1)),
    "reduce_scatter": lambda c: c.reduce_scatter(np.zeros(1)),
    "broadcast": lambda c: c.broadcast(np.zeros(1)),
    "reduce": lambda c: c.reduce(np.zeros(1)),
    "gather": lambda c: c.gather(np.zeros(1)),
    "scatter": lambda c: c.scatter(np.zeros(1)),
    "all_to_all": lambda c: c.all_to_all(np.zeros(1)),
    "barrier": lambda c: c.barrier(),
    "async": lambda c: c.all_reduce(np.zeros(1), async_op=True),
    "send": lambda c: c.send(np.zeros(1), 0),
    "recv": lambda c: c.recv(np.zeros(1), 0),
    "isend": lambda c: c.isend(np.zeros(1), 0),
    "irecv": lambda c: c.irecv(np.zeros(1), 0),
    "batch": lambda c: c.batch([Send(np.zeros(1), 0)]),
    "prepare": lambda c: c.prepare("all_reduce", np.zeros(1)),
    "split": lambda c: c.split(0),
    "empty": lambda c: c.empty(3),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_closed(name: str) -> None:
    comm = closed()
    comm.close()
    comm.abort()
    with pytest.raises(CommunicatorClosed, match="closed"):
        EVERYTHING[name](comm)


def test_closed_while_in_use() -> None:
    with World(1) as world:
        comm = world.communicators[0]
        prepared = comm.prepare("all_reduce", np.ones(3))
        work = comm.all_reduce(np.ones(3), async_op=True)
    assert work.wait()
    for call in (prepared.start, prepared.run):
        with pytest.raises(CommunicatorClosed, match="closed"):
            call()


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"transport": "smh"}, UnknownName, "did you mean 'shm'"),
        ({"algorithm": "rnig"}, UnknownName, "rnig"),
        ({"timeout_s": -3}, ConfigError, "timeout"),
        ({"scratch_bytes": "many"}, ConfigError, "scratch"),
    ],
)
def test_bad_settings(settings: dict[str, Any], kind: type[CommrtError], message: str) -> None:
    with pytest.raises(kind, match=message), World(2, **settings) as world:
        world.run(lambda comm: comm.all_reduce(np.ones(3)))
