"""One rank over verbs: collectives that must be exact, or an end that must be noticed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import msgspec
import numpy as np

import commrt
from commrt.errors import OperationError
from commrt.transports.ib.link import Key, to_u64

INIT_S, TIMEOUT_S = 20.0, 20.0


def everyones(comm: Any, count: int) -> list[Any]:
    """What each rank contributes: small whole numbers, so that every order of summation is exact."""
    return [np.random.default_rng([rank, count]).integers(-1000, 1000, count) for rank in range(comm.size)]


def collectives(comm: Any) -> None:
    """Against numpy."""
    for dtype in ("float32", "int64"):
        for count in (1, 1000, 200_001):
            given = [x.astype(dtype) for x in everyones(comm, count)]
            mine = given[comm.rank]
            assert np.array_equal(comm.all_reduce(mine, np.empty_like(mine)), sum(given)), ("all_reduce", count)
            assert np.array_equal(comm.all_gather(mine).reshape(comm.size, count), np.stack(given)), count
            root = count % comm.size
            assert np.array_equal(comm.broadcast(mine.copy(), root), given[root]), ("broadcast", count)
    shared = comm.empty(5000, "float32")
    shared[:] = comm.rank + 1
    assert (comm.all_reduce(shared) == sum(range(1, comm.size + 1))).all(), "symmetric memory"
    print(f"rank {comm.rank}: links {sorted(set(comm.links.values()))}: exact", flush=True)


def until_it_fails(comm: Any) -> None:
    """Operations until one raises, which must name the peer in time."""
    started = time.monotonic()
    try:
        while time.monotonic() - started < 2 * TIMEOUT_S:
            comm.all_reduce(np.ones(1000, np.float32))
    except OperationError as error:
        took = time.monotonic() - started
        name = type(error).__name__
        print(f"rank {comm.rank}: {name} naming {error.context.peer} after {took:.1f} s: {error}", flush=True)
        os._exit(int(took >= TIMEOUT_S))
    raise AssertionError("no operation failed")


def killed(comm: Any) -> None:
    """Rank 1 is gone in the middle of things."""
    collectives(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until_it_fails(comm)


def broken(comm: Any) -> None:
    """Rank 0 writes with a key that is none: the adapters put both queue pairs into the error state."""
    collectives(comm)
    if comm.rank == 0:
        port, source = comm._group.ports[1], ctypes.create_string_buffer(1000)
        key = Key(1000, to_u64(1 << 20), to_u64(4096), 0xDEADBEEF)
        base = comm._group.connections[1].locate(msgspec.msgpack.encode(key))
        assert port.put(port.context, base, commrt.native.ffi.from_buffer(source), 1000) == 1
    until_it_fails(comm)


if __name__ == "__main__":
    began = time.monotonic()
    communicator = commrt.init(timeout=TIMEOUT_S)
    assert time.monotonic() - began < INIT_S, f"init took {time.monotonic() - began:.1f} s"
    {"collectives": collectives, "killed": killed, "broken": broken}[sys.argv[1]](communicator)
    communicator.close()
