"""Symmetric memory: all ranks have it or none, it is used again once all let go, and kinds of memory don't mix."""

from __future__ import annotations

import functools
import gc
import random
import threading
from typing import Any

import numpy as np
import pytest

from commrt.backend import Memory
from commrt.communicator import Communicator
from commrt.errors import CommunicatorBroken, InvalidArgument, Mismatch
from commrt.testing.world import World

TRANSPORTS = pytest.mark.parametrize("transport", ["loopback", "shm"])


def check_sums(comm: Communicator, array: Any, value: int) -> None:
    array[:] = value + comm.rank
    comm.all_reduce(array)
    assert (array == comm.size * value + sum(range(comm.size))).all()


@TRANSPORTS
@pytest.mark.parametrize("seed", range(3))
def test_frees_in_another_order_on_each_rank(transport: str, seed: int) -> None:
    """Hundreds of arrays, let go of in each rank's own order; memory is reused, and only by one array at a time."""
    size, turns = 3, 150

    def rank(comm: Communicator) -> int:
        shared, own = random.Random(seed), random.Random(seed * 7 + comm.rank)
        alive: list[tuple[int, Any]] = []
        for turn in range(turns):
            array = comm.empty(shared.choice((1, 100, 5000, 5001, 40_000)), "int64")
            array[:] = turn * 16 + comm.rank
            alive.append((turn, array))
            while len(alive) > own.randrange(1, 12):
                number, dropped = alive.pop(own.randrange(len(alive)))
                assert (dropped == number * 16 + comm.rank).all()
                del dropped
            check_sums(comm, comm.empty(64, "int64"), turn)
        assert all((array == number * 16 + comm.rank).all() for number, array in alive)
        return len(comm._symmetric._segments)

    with World(size, transport, timeout_s=20.0) as world:
        segments = world.run(rank)
    assert len(set(segments)) == 1
    assert segments[0] < 80


@TRANSPORTS
def test_memory_is_used_again(transport: str) -> None:
    def rank(comm: Communicator) -> set[int]:
        return {comm.empty(1000, "float32").ctypes.data for _ in range(200)}

    with World(2, transport) as world:
        assert all(len(addresses) <= 3 for addresses in world.run(rank))


def test_a_view_keeps_the_memory() -> None:
    def rank(comm: Communicator) -> None:
        view = comm.empty((10, 100), "int32")[3:5]
        view[:] = 77
        gc.collect()
        others = [comm.empty((10, 100), "int32") for _ in range(5)]
        for other in others:
            other[:] = -1
        assert (view == 77).all()
        check_sums(comm, view, 5)

    with World(2) as world:
        world.run(rank)


def test_one_rank_holding_on_keeps_it_from_all() -> None:
    def rank(comm: Communicator) -> None:
        first = comm.empty(1000, "uint8")
        address = first.ctypes.data
        kept = first if comm.rank == 1 else None
        del first
        assert comm.empty(1000, "uint8").ctypes.data != address
        del kept
        comm.barrier()
        assert address in {comm.empty(1000, "uint8").ctypes.data for _ in range(3)}

    with World(2) as world:
        world.run(rank)


@TRANSPORTS
def test_one_rank_out_of_memory(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All raise, naming the rank; all go on, and nothing is lost."""
    with World(3, transport, timeout_s=20.0) as world:
        poor = world.communicators[1]._group.allocator
        allocate = type(poor).allocate

        def refuse(self: Any, *arguments: Any, **more: Any) -> Memory:
            if self is poor:
                raise MemoryError("there is none left")
            return allocate(self, *arguments, **more)

        for turn in range(1, 4):
            monkeypatch.setattr(type(poor), "allocate", refuse)
            world.run(functools.partial(refused, turn=turn))
            monkeypatch.undo()
            world.run(functools.partial(allocated, turn=turn))


def allocated(comm: Communicator, turn: int) -> None:
    check_sums(comm, comm.empty(5000 * turn, "int64"), turn)


def refused(comm: Communicator, turn: int) -> None:
    with pytest.raises(MemoryError, match=r"rank 1: MemoryError: there is none left"):
        comm.empty(turn << 20, "uint8")
    check_sums(comm, np.zeros(7, np.int64), 4)


def test_all_out_of_memory() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(MemoryError, match=r"rank 0: .*rank 1: "):
            comm.empty(1 << 60, "uint8")
        check_sums(comm, comm.empty(10, "int64"), 1)

    with World(2) as world:
        world.run(rank)


def test_different_sizes_are_refused_on_every_rank() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match=r"different symmetric memory: .*\(rank 0\).*\(rank 1\)"):
            comm.empty(10 + comm.rank, "uint8")
        check_sums(comm, comm.empty(10, "int64"), 1)

    with World(2) as world:
        world.run(rank)


@TRANSPORTS
@pytest.mark.parametrize("size", [2, 4])
def test_ordinary_and_symmetric_in_turn(transport: str, size: int) -> None:
    counts = (1, 100, 5000, 70_001)

    def rank(comm: Communicator) -> None:
        held = [comm.empty(count, "int64") for count in counts]
        gathered, inbox = comm.empty((size, 5000), "int64"), comm.empty(100, "int64")
        for turn in range(40):
            count = counts[turn % 4]
            for array in (held[turn % 4], np.zeros(count, np.int64)):
                check_sums(comm, array, turn)
            for out in (gathered, np.zeros((size, 5000), np.int64)):
                x = held[2] if out is gathered else np.zeros(5000, np.int64)
                x[:] = comm.rank + turn
                comm.all_gather(x, out)
                assert (out == np.arange(size)[:, None] + turn).all()
            x, box = (held[1], inbox) if turn % 2 else (np.zeros(100, np.int64), np.zeros(100, np.int64))
            x[:] = comm.rank + turn
            work = comm.isend(x, (comm.rank + 1) % size)
            comm.recv(box, (comm.rank - 1) % size)
            work.wait()
            assert (box == (comm.rank - 1) % size + turn).all()

    with World(size, transport, timeout_s=20.0) as world:
        world.run(rank)


@TRANSPORTS
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("count", [3, 300_000])
def test_one_rank_with_ordinary_memory_is_a_mismatch_on_all(transport: str, odd: int, count: int) -> None:
    def rank(comm: Communicator) -> str:
        array = comm.empty(count, "float32")
        x = np.zeros(count, np.float32) if comm.rank == odd else array
        with pytest.raises(Mismatch, match="ordinary memory") as caught:
            comm.all_reduce(x)
        with pytest.raises(CommunicatorBroken, match="ordinary memory"):
            comm.all_reduce(array)
        return str(caught.value)

    with World(3, transport, timeout_s=20.0) as world:
        messages = world.run(rank)
    assert all("symmetric memory" in message and f"rank {odd}" in message for message in messages)


def test_half_symmetric_is_ordinary() -> None:
    """An operation is symmetric if all of its arrays are; equally mixed calls match, and are right."""

    def rank(comm: Communicator) -> None:
        x, out = comm.empty(5000, "int64"), np.zeros(5000, np.int64)
        x[:] = comm.rank
        for source, target in ((x, out), (out.copy() + comm.rank, x)):
            comm.all_reduce(source, target)
            assert (target == 1).all()
            x[:] = comm.rank

    with World(2) as world:
        world.run(rank)


def test_an_array_of_another_communicator_is_ordinary() -> None:
    def rank(comm: Communicator) -> None:
        other = comm.split(0)
        assert other is not None
        with other:
            check_sums(comm, other.empty(5000, "int64"), 1)
            check_sums(other, comm.empty(5000, "int64"), 2)

    with World(2) as world:
        world.run(rank)


@TRANSPORTS
def test_arrays_outlive_their_communicator(transport: str) -> None:
    with World(2, transport) as world:
        arrays = world.run(lambda comm: comm.empty(1000, "int32"))
        for rank, array in enumerate(arrays):
            array[:] = rank
    gc.collect()
    assert (arrays[0] == 0).all()
    assert (arrays[1] == 1).all()


def test_empty_arrays() -> None:
    def rank(comm: Communicator) -> None:
        nothing, scalar = comm.empty((0, 4), "float32"), comm.empty((), "int64")
        assert nothing.shape == (0, 4)
        comm.all_reduce(nothing)
        scalar[()] = comm.rank + 1
        assert int(comm.all_reduce(scalar)) == 3

    with World(2) as world:
        world.run(rank)


def test_allocation_while_operations_are_under_way() -> None:
    gate = threading.Barrier(2, timeout=20)

    def rank(comm: Communicator) -> None:
        held = comm.empty(50_000, "int64")
        held[:] = comm.rank + 1
        works = [comm.all_reduce(held, async_op=True)]
        incoming = np.zeros(50_000, np.int64)
        works.append(comm.irecv(incoming, 1 - comm.rank))
        more = [comm.empty(50_000 + turn, "int64") for turn in range(30)]
        gate.wait()
        works.append(comm.isend(np.full(50_000, comm.rank), 1 - comm.rank))
        for work in works:
            work.wait()
        assert (held == 3).all()
        assert (incoming == 1 - comm.rank).all()
        assert len(more) == 30

    with World(2, timeout_s=20.0) as world:
        world.run(rank)
