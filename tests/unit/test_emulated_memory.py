"""Memory that is coherent between launches alone, emulated: refused where peers would use it, harmless elsewhere, and
misuse that gets past the checks fails.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from commrt.backend import MemoryKind
from commrt.communicator import Communicator
from commrt.errors import ConfigError, Deadlock, InvalidArgument
from commrt.group import Options
from commrt.plugins import Plugin, Registry, discover
from commrt.testing import World
from commrt.testing.data import Case
from commrt.testing.matrix import Variant, run
from commrt.transports.loopback.memory import EMULATED_LAUNCH, EmulatedMemory, seen_by_peers
from commrt.transports.loopback.transport import LoopbackTransport

KIND = EMULATED_LAUNCH.name


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def test_both_sides_meet_at_a_boundary_only() -> None:
    memory = EmulatedMemory.create(100)
    own, peers = memory.address, seen_by_peers(memory).address
    ctypes.memmove(own, b"own", 3)
    ctypes.memmove(peers + 50, b"peer", 4)
    assert (read(peers, 3), read(own + 50, 4)) == (bytes(3), bytes(4))
    memory.boundary()
    assert (read(peers, 3), read(own + 50, 4)) == (b"own", b"peer")
    ctypes.memmove(peers, b"new", 3)
    assert read(own, 3) == b"own"
    memory.boundary()
    assert read(own, 3) == b"new"


def test_scratch_of_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernel-coherent; 'emulated_launch' memory is not"):
        World(2, options=Options({"segment_kind": KIND}))


def test_an_array_of_it_is_used_like_any_ordinary_one() -> None:
    def main(comm: Communicator) -> None:
        x, out = comm.empty(1000, "int64", kind=KIND), comm.empty((comm.size, 1000), "int64", kind=KIND)
        assert not comm._symmetric.covers(x.ctypes.data)
        for number in range(3):
            x[:] = np.arange(1000) + comm.rank + number
            comm.all_gather(x, out)
            for rank in range(comm.size):
                np.testing.assert_array_equal(out[rank], np.arange(1000) + rank + number)
            comm.all_reduce(x)
            total = comm.size * (np.arange(1000) + number) + sum(range(comm.size))
            np.testing.assert_array_equal(x, total)
        with pytest.raises(InvalidArgument, match="symmetric"):
            comm.all_reduce(x, algorithm="direct")
        with pytest.raises(InvalidArgument, match="not of it"):
            comm.channels(x)

    with World(3) as world:
        world.run(main)


def test_ranks_must_ask_for_one_kind() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="different symmetric memory"):
            comm.empty(10, kind=KIND if comm.rank else None)
        assert comm.empty(10).shape == (10,)
        with pytest.raises(InvalidArgument, match="unknown memory kind"):
            comm.empty(10, kind="emulated_lunch")

    with World(2) as world:
        world.run(main)


# --- past the checks ---


class Lying(LoopbackTransport):
    """Says of its emulated memory that it is coherent while kernels run."""

    memory_kinds = (MemoryKind("lie", "kernel"),)

    def allocate(self, nbytes: int, kind: str) -> EmulatedMemory:
        return EmulatedMemory.create(nbytes)


def lying() -> Registry:
    return Registry([Plugin("transports", "loopback", "a test", __name__, _loaded=Lying()), *discover()])


def test_scratch_of_it_never_shows_a_signal() -> None:
    with World(2, options=Options({"segment_kind": "lie"}), registry=lying(), timeout_s=10) as world:
        outcomes = world.outcomes(lambda comm: comm.all_reduce(np.ones(4), algorithm="ring"))
    assert {type(outcome) for outcome in outcomes} == {Deadlock}


@pytest.mark.parametrize(("kind", "right"), [("lie", False), ("host", True)])
def test_peers_see_nothing_of_an_array_of_it(kind: str, right: bool) -> None:
    def main(comm: Communicator) -> bool:
        x: Any = comm.empty(1000, "int64", kind=kind)
        x[:] = comm.rank + 1
        comm.all_reduce(x, algorithm="direct")
        return bool((x == comm.size * (comm.size + 1) // 2).all())

    with World(2, registry=lying()) as world:
        assert world.run(main) == [right, right]


def test_what_is_lied_about_is_else_right() -> None:
    with World(2, registry=lying()) as world:
        world.run(lambda comm: run(comm, [Variant(Case("all_reduce", 2, 1021), "direct", symmetric=True)]))
