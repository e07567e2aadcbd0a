"""Collectives as kernels, on devices that are threads of this process: every pair of ranks meets where it can."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from commrt.arrays import Buffer, on_device
from commrt.communicator import Communicator
from commrt.errors import Aborted, CommrtError, CommunicatorBroken, InvalidArgument, Mismatch, OperationTimeout
from commrt.testing.device_of_threads import registry
from commrt.testing.world import World

COUNT = 5003


def values(rank: int, count: int = COUNT) -> Any:
    return (np.arange(count) % 97 + 100 * rank).astype(np.float32)


def view(buffer: Buffer) -> Any:
    """The elements, as a test may look at them: this device's memory is the host's."""
    return np.frombuffer((ctypes.c_char * buffer.nbytes).from_address(buffer.address), np.float32)


def array(comm: Communicator, content: Any) -> Any:
    """An array of that content where the communicator's arrays are."""
    if comm.backend.name == "cpu":
        return content.copy()
    made = on_device(comm.backend, comm.backend.allocate(max(content.nbytes, 1)), content.size, "float32")  # type: ignore[arg-type]
    view(made)[:] = content
    return made


def content(x: Any) -> Any:
    return view(x).copy() if isinstance(x, Buffer) else x.copy()


@pytest.fixture(params=[("a", "a", "a"), ("a", "a", "b", "cpu"), ("a", "b"), ("a", "cpu", "cpu")], ids="-".join)
def world(request: Any) -> Any:
    with World(len(request.param), "shm", registry=registry("a", "b"), backends=request.param) as made:
        yield made


def test_collectives_give_every_rank_the_right_values(world: World) -> None:
    size = world.size
    total = sum(values(rank) for rank in range(size))

    def work(comm: Communicator) -> None:
        for _ in range(3):
            x, out = array(comm, values(comm.rank)), array(comm, np.zeros(COUNT, np.float32))
            comm.all_reduce(x, out)
            np.testing.assert_array_equal(content(out), total)
            np.testing.assert_array_equal(content(x), values(comm.rank))
            everyone = array(comm, np.zeros(COUNT * size, np.float32))
            comm.all_gather(x, everyone)
            np.testing.assert_array_equal(content(everyone), np.concatenate([values(rank) for rank in range(size)]))
            comm.broadcast(x, root=size - 1)
            np.testing.assert_array_equal(content(x), values(size - 1))
            comm.barrier()

    world.run(work)


def test_scratch_is_reused_over_many_windows_and_sizes(world: World) -> None:
    def work(comm: Communicator) -> None:
        for count in (1, 7, 70001, 3, 3_000_001):
            x = array(comm, values(comm.rank, count))
            comm.all_reduce(x, op="max")
            np.testing.assert_array_equal(content(x), values(comm.size - 1, count))

    world.run(work)


def test_links_and_places(world: World) -> None:
    """The pair of `a`s meets on the device; slots of a rank that others write in host memory are told apart."""

    def work(comm: Communicator) -> tuple[str, frozenset[int]]:
        side = comm._group.device
        return comm.backend.name, frozenset() if side is None else side.near

    for rank, (name, near) in enumerate(found := world.run(work)):
        alike = {peer for peer, (other, _) in enumerate(found) if other == name and peer != rank and name != "cpu"}
        assert near == alike


def test_streams_and_works(world: World) -> None:
    def work(comm: Communicator) -> None:
        x = array(comm, values(comm.rank))
        works = [comm.all_reduce(x, op="max", async_op=True)]
        if comm.backend.name != "cpu":
            works.append(comm.all_reduce(x, op="min", stream=comm.backend.stream()))
        else:
            works.append(comm.all_reduce(x, op="min", async_op=True))
        assert all(one.wait(30) and one.done() for one in works)
        np.testing.assert_array_equal(content(x), values(comm.size - 1))

    world.run(work)


def test_split_of_devices(world: World) -> None:
    def work(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2)
        assert part is not None
        x = array(part, values(comm.rank))
        part.all_reduce(x)
        expected = sum(values(rank) for rank in range(comm.rank % 2, comm.size, 2))
        np.testing.assert_array_equal(content(x), expected)
        part.close()

    world.run(work)


def test_a_mismatch_is_named_on_every_rank(world: World) -> None:
    def work(comm: Communicator) -> None:
        x = array(comm, values(comm.rank))
        comm.all_reduce(x, op="max" if comm.rank else "min")

    for outcome in world.outcomes(work):
        assert isinstance(outcome, Mismatch), outcome


def test_a_rank_that_does_not_come_is_a_timeout_that_names_it() -> None:
    with World(3, "shm", registry=registry("a"), backends=("a", "a", "cpu"), timeout_s=0.5) as world:
        released = threading.Event()

        def work(comm: Communicator) -> CommrtError | None:
            if comm.rank == 2:
                released.wait(20)
                return None
            with pytest.raises(CommrtError) as caught:
                comm.all_reduce(array(comm, values(comm.rank)))
            released.set()
            with pytest.raises(CommunicatorBroken):
                comm.all_reduce(array(comm, values(comm.rank)))
            return caught.value

        errors = world.run(work)[:2]
        assert {type(error) for error in errors} <= {OperationTimeout}
        assert {error.context.peer for error in errors if error is not None} == {2}


def test_abort_ends_kernels_that_wait() -> None:
    with World(2, "shm", registry=registry("a"), backends=("a", "a")) as world:

        def work(comm: Communicator) -> CommrtError | None:
            if comm.rank == 1:
                return None
            one = comm.all_reduce(array(comm, values(0)), async_op=True)
            comm.abort()
            with pytest.raises(CommrtError) as caught:
                one.wait(20)
            return caught.value

        assert isinstance(world.run(work)[0], Aborted)


def test_arrays_that_are_elsewhere_are_refused(world: World) -> None:
    def work(comm: Communicator) -> None:
        if comm.backend.name == "cpu":
            return
        with pytest.raises(InvalidArgument, match="'cpu'"):
            comm.all_reduce(values(0))
        with pytest.raises(InvalidArgument, match="host"):
            comm.empty(4)
        with pytest.raises(InvalidArgument, match="host"):
            comm.send(array(comm, values(0)), (comm.rank + 1) % comm.size)

    world.run(work)


def test_everything_is_given_back() -> None:
    devices = registry("a")
    backend = devices.require("backends", "a")
    with World(2, "shm", registry=devices, backends=("a", "a")) as world:
        world.run(lambda comm: comm.all_reduce(array(comm, values(comm.rank))))
        assert backend.pinned
    assert not backend.pinned
