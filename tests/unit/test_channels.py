"""Channels in users' kernels: every operation on every kind of link, the wrap of flags, and every end of a wait."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commrt.channels import ChannelMaker, as_argument
from commrt.communicator import Communicator
from commrt.errors import (
    Aborted,
    CommrtError,
    CommunicatorBroken,
    CommunicatorClosed,
    InvalidArgument,
    OperationError,
    OperationTimeout,
    PeerLost,
)
from commrt.group import Options
from commrt.launcher import launch
from commrt.plugins import default_registry
from commrt.testing import World
from commrt.transports.fault.transport import Faults

SOURCE = """
#include "kernel.h"
using namespace commrt;

static u32 other(Channels* c, u32 step) { return (u32)((c->rank + step) % c->ranks); }

// Every rank's `n` bytes to every other, `rounds` times, by each block its share.
template <class Send, class Receive> static void gather(Channels* c, u64 n, u64 rounds, Send send, Receive receive) {
  u64 share = n / nblocks(), mine = c->rank * n + block_id() * share;
  for (u64 round = 0; round < rounds; round++) {
    for (u32 s = 1; s < c->ranks; s++) if (!send(other(c, s), mine, share - round % 3)) return;
    for (u32 s = 1; s < c->ranks; s++)
      if (!receive(other(c, s), other(c, s) * n + block_id() * share, share - round % 3)) return;
  }
}
CR_KERNEL put(Channels* c, u64 n, u64 rounds) {
  gather(c, n, rounds,
         [=](u32 to, u64 at, u64 k) { auto& m = c->memory(to, block_id()); return m.put(at, at, k) && m.signal(); },
         [=](u32 from, u64, u64) { return c->memory(from, block_id()).wait(); });
}
CR_KERNEL get(Channels* c, u64 n, u64 rounds) {
  gather(c, n, rounds,
         [=](u32 to, u64, u64) { return c->memory(to, block_id()).signal(); },
         [=](u32 from, u64 at, u64 k) { auto& m = c->memory(from, block_id()); return m.wait() && m.get(at, at, k); });
}
template <class Packet> static void packets(Channels* c, u64 n, u64 rounds) {
  gather(c, n, rounds,
         [=](u32 to, u64 at, u64 k) { return c->memory(to, block_id()).template put_packets<Packet>(at, k); },
         [=](u32 from, u64 at, u64 k) { return c->memory(from, block_id()).template get_packets<Packet>(at, k); });
}
CR_KERNEL ll8(Channels* c, u64 n, u64 rounds) { packets<LL8>(c, n, rounds); }
CR_KERNEL ll16(Channels* c, u64 n, u64 rounds) { packets<LL16>(c, n, rounds); }
CR_KERNEL port(Channels* c, u64 n, u64 rounds) {
  gather(c, n, rounds,
         [=](u32 to, u64 at, u64 k) { return c->port(to, block_id()).put_with_signal_and_flush(at, at, k); },
         [=](u32 from, u64, u64) { return c->port(from, block_id()).wait(); });
}
// Counts what each packet holds, so that one of an older round is seen.
CR_KERNEL counting(Channels* c, u64 n, u64 rounds, u64* wrong) {
  u64* words = (u64*)c->array;
  MemoryChannel& m = c->memory(other(c, 1), 0);
  for (u64 round = 0; round < rounds; round++) {
    u64 k = round % 4 ? 8 : n / 2;
    for (u64 i = 0; i < k / 8; i++) words[i] = round * 1000 + i;
    if (!m.put_packets(0, k) || !m.get_packets(n / 2, k)) return;
    for (u64 i = 0; i < k / 8; i++) *wrong += words[n / 16 + i] != round * 1000 + i;
  }
}
CR_KERNEL ring_sum(Channels* c, u64 count, u64* seen) {
  MemoryChannel& next = c->memory(other(c, 1), 0);
  *seen = next.read<u32>(count - 1);
  next.reduce<u32, Sum>(0, count * 4, count);
  next.write<u32>(3 * count - 1, (u32)c->rank + 1);
  next.signal();
  if (!c->memory(other(c, c->ranks - 1), 0).wait()) return;
  *seen += 1000 * next.poll();
}
CR_KERNEL wait_for(Channels* c, u64 peer, u64 by_port) {
  if (by_port) c->port((u32)peer, 0).wait();
  else c->memory((u32)peer, 0).wait();
}
CR_KERNEL leave_array(Channels* c, u64 to, u64 from, u64 n) { c->memory(other(c, 1), 0).put(to, from, n); }
CR_KERNEL too_many_packets(Channels* c, u64 n) { c->memory(other(c, 1), 0).put_packets(0, n); }
CR_KERNEL nothing(u64* blocks) { blocks[block_id()] = nblocks(); }
"""
WORLDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "loopback": ("loopback", {}, ("put", "get", "ll8", "ll16", "port")),
    "shm": ("shm", {}, ("put", "get", "ll8", "ll16", "port")),
    "port": ("loopback", {"family": "port"}, ("port",)),
    "late": ("fault", {"fault": Faults(delay_s=0.0003, reorder=True)}, ("port",)),
}


def world_of(kind: str, size: int = 3, **settings: Any) -> World:
    transport, options, _ = WORLDS[kind]
    return World(size, transport, options=Options(options), timeout_s=30, **settings)


@functools.cache
def kernel(symbol: str) -> Any:
    return default_registry().require("backends", "cpu").build(SOURCE, symbol)


CASES = [(world, symbol) for world, (_, _, symbols) in WORLDS.items() for symbol in symbols]


@pytest.mark.parametrize(("kind", "symbol"), CASES)
def test_every_rank_gets_all(kind: str, symbol: str) -> None:
    n, rounds = 2400, 40

    def main(comm: Communicator) -> None:
        array = comm.empty(comm.size * n, "uint8")
        array[:] = 0
        array[comm.rank * n : (comm.rank + 1) * n] = content(comm.rank)
        comm.barrier()
        channels = comm.channels(array, blocks=2, packet_nbytes=n)
        comm.launch(kernel(symbol), 2, channels, n, rounds)
        for rank in range(comm.size):
            np.testing.assert_array_equal(array[rank * n : (rank + 1) * n], content(rank))

    def content(rank: int) -> Any:
        return (np.arange(n) * 7 + rank * 31 + 1).astype(np.uint8)

    with world_of(kind) as world:
        world.run(main)


@pytest.mark.parametrize("lap", [4, 6, 0xFFFFFFFE])
def test_packet_flags_wrap(lap: int) -> None:
    n = 512

    def main(comm: Communicator) -> int:
        array = comm.empty(n, "uint8")
        maker = ChannelMaker(comm._group, comm._symmetric, comm.exchange)
        wrong = np.zeros(1, np.uint64)
        channels = maker.make(array, 1, n, 30.0, lap)
        comm.launch(kernel("counting"), 1, channels, n, 400, wrong)
        return int(wrong[0])

    with world_of("loopback", 2) as world:
        assert world.run(main) == [0, 0]


def test_read_write_reduce_poll() -> None:
    count = 100

    def main(comm: Communicator) -> None:
        array = comm.empty(3 * count, "uint32")
        array[:count] = np.arange(count) + comm.rank
        array[count : 2 * count] = (np.arange(count) + 1) * (comm.rank + 1)
        comm.barrier()
        channels = comm.channels(array)
        seen = np.zeros(1, np.uint64)
        comm.launch(kernel("ring_sum"), 1, channels, count, seen)
        following = (comm.rank + 1) % comm.size
        np.testing.assert_array_equal(
            array[:count], np.arange(count) + comm.rank + (np.arange(count) + 1) * (following + 1)
        )
        assert array[-1] == (comm.rank - 1) % comm.size + 1
        assert seen[0] % 1000 == 99 + following or seen[0] % 1000 > 99 + following

    with world_of("shm") as world:
        world.run(main)


def test_launch_on_a_stream_is_in_order() -> None:
    def main(comm: Communicator) -> None:
        n = 600
        array = comm.empty(comm.size * n, "uint8")
        channels = comm.channels(array, packet_nbytes=n)
        stream = comm.backend.stream()
        array[:] = comm.rank
        comm.barrier()
        works = [comm.launch(kernel("put"), 1, channels, n, 3, stream=stream) for _ in range(5)]
        comm.barrier()  # waits for the stream, as the order of calls is the order of operations
        assert all(work is not None and work.done() for work in works)
        assert [int(array[rank * n]) for rank in range(comm.size)] == list(range(comm.size))

    with world_of("loopback") as world:
        world.run(main)


# --- ends of a wait ---


def outcome_of_waiting(
    kind: str, by_port: bool, meanwhile: Callable[[Communicator], None], timeout: float
) -> list[Any]:
    """Rank 0 waits for rank 1, which does something else."""

    def main(comm: Communicator) -> Any:
        channels = comm.channels(comm.empty(100, "uint8"), timeout=timeout)
        comm.barrier()
        started = time.monotonic()
        try:
            if comm.rank == 0:
                comm.launch(kernel("wait_for"), 1, channels, 1, int(by_port))
            else:
                meanwhile(comm)
        except CommrtError as error:
            return error, time.monotonic() - started
        return None, time.monotonic() - started

    with world_of(kind, 2, close_timeout_s=1) as world:
        outcomes = world.run(main)
        after = world.outcomes(lambda comm: comm.barrier())
    return [outcomes[0], after[0]]


@pytest.mark.parametrize(("kind", "by_port"), [("loopback", False), ("shm", True), ("port", True)])
def test_a_wait_has_a_deadline(kind: str, by_port: bool) -> None:
    (error, took), after = outcome_of_waiting(kind, by_port, lambda comm: None, 0.3)
    assert isinstance(error, OperationTimeout)
    assert "waited 0.3 s for rank 1" in str(error)
    assert (error.context.rank, error.context.peer, error.context.operation) == (0, 1, "kernel")
    assert 0.25 < took < 10
    assert isinstance(after, CommunicatorBroken)


@pytest.mark.parametrize(("kind", "by_port"), [("loopback", False), ("shm", True), ("port", True)])
def test_a_wait_sees_that_its_peer_leaves(kind: str, by_port: bool) -> None:
    (error, took), _ = outcome_of_waiting(kind, by_port, lambda comm: comm.close(), 20)
    assert isinstance(error, PeerLost)
    assert error.context.peer == 1
    assert took < 10


@pytest.mark.parametrize("kind", ["loopback", "shm"])
def test_a_wait_sees_that_its_peer_aborts(kind: str) -> None:
    (error, took), _ = outcome_of_waiting(kind, False, lambda comm: comm.abort(), 20)
    assert isinstance(error, Aborted)
    assert took < 10


DYING = """
import os, sys, time
import commrt

SOURCE = '#include "kernel.h"\\nCR_KERNEL wait_for(commrt::Channels* c) { c->memory(1, 0).wait(); }'
comm = commrt.init(timeout=30)
channels = comm.channels(comm.empty(100, "uint8"))
kernel = comm.backend.build(SOURCE, "wait_for")
comm.barrier()
if comm.rank == 1:
    os._exit(0)
started = time.monotonic()
try:
    comm.launch(kernel, 1, channels)
except commrt.errors.PeerLost as error:
    sys.exit(0 if error.context.peer == 1 and time.monotonic() - started < 2 else 3)
sys.exit(4)
"""


def test_a_wait_sees_that_its_peer_dies(tmp_path: Path) -> None:
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    assert launch([sys.executable, str(program)], 2, timeout_s=60, env={"COMMRT_TRANSPORT": "shm"}) == 0


def test_a_wait_sees_an_abort_of_its_own_rank() -> None:
    def main(comm: Communicator) -> Any:
        channels = comm.channels(comm.empty(100, "uint8"), timeout=20)
        timer = threading.Timer(0.1, comm.abort)
        timer.start()
        with pytest.raises(Aborted):
            comm.launch(kernel("wait_for"), 1, channels, (comm.rank + 1) % comm.size, 0)
        timer.join()

    with world_of("shm", 2) as world:
        world.run(main)


def test_close_ends_a_kernel_that_runs_on_a_stream() -> None:
    def main(comm: Communicator) -> None:
        channels = comm.channels(comm.empty(100, "uint8"), timeout=20)
        work = comm.launch(kernel("wait_for"), 1, channels, comm.rank, 0, stream=comm.backend.stream())
        started = time.monotonic()
        comm.close()
        assert time.monotonic() - started < 10
        assert work is not None
        with pytest.raises((Aborted, CommunicatorClosed)):
            work.wait(10)
        with pytest.raises(CommunicatorClosed):
            comm.launch(kernel("nothing"), 1, np.zeros(1, np.uint64))

    with world_of("loopback", 2, close_timeout_s=0.3) as world:
        world.run(main)


@pytest.mark.parametrize(
    ("symbol", "arguments"),
    [
        ("leave_array", (90, 0, 11)),
        ("leave_array", (0, 90, 11)),
        ("leave_array", (1 << 63, 0, 1)),
        ("leave_array", (0, 0, (1 << 64) - 1)),
        ("too_many_packets", (65,)),
    ],
)
def test_what_leaves_the_array_is_an_error(symbol: str, arguments: tuple[int, ...]) -> None:
    def main(comm: Communicator) -> None:
        channels = comm.channels(comm.empty(100, "uint8"), packet_nbytes=48)
        with pytest.raises(OperationError, match=r"left the array|aborted"):
            comm.launch(kernel(symbol), 1, channels, *arguments)

    with world_of("loopback", 2) as world:
        world.run(main)


def test_memory_channels_do_nothing_where_nothing_is_mapped() -> None:
    def main(comm: Communicator) -> None:
        channels = comm.channels(comm.empty(100, "uint8"), packet_nbytes=48, timeout=0.5)
        with pytest.raises(OperationError):
            comm.launch(kernel("leave_array"), 1, channels, 0, 0, 10)

    with world_of("port", 2) as world:
        world.run(main)


# --- arguments ---


def refused(comm: Communicator, make: Callable[[], Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        make()
    x = np.ones(3)
    comm.all_reduce(x)  # nothing was harmed
    assert x[0] == comm.size


def test_channels_are_refused_alike_on_all_ranks() -> None:
    def main(comm: Communicator) -> None:
        array, odd = comm.empty(100, "uint8"), comm.rank == 1
        refused(comm, lambda: comm.channels(np.zeros(100, np.uint8) if odd else array), "rank 1: .*comm.empty")
        refused(comm, lambda: comm.channels(array[:50] if odd else array), "ranks differ")
        refused(comm, lambda: comm.channels(array, blocks=2 if odd else 1), "ranks differ")
        refused(comm, lambda: comm.channels(array, blocks=0 if odd else 1), "rank 1: .*blocks")
        refused(comm, lambda: comm.channels(array, packet_nbytes=-1), "packets")
        refused(comm, lambda: comm.channels(array, timeout=float("inf")), "deadline")
        refused(comm, lambda: comm.channels(comm.empty(100, "uint8", kind="emulated_launch")), "not of it")

    with world_of("loopback") as world:
        world.run(main)


def test_launch_refuses() -> None:
    def main(comm: Communicator) -> None:
        channels = comm.channels(comm.empty(100, "uint8"), blocks=2)
        with pytest.raises(InvalidArgument, match="3 blocks on channels for 2"):
            comm.launch(kernel("nothing"), 3, channels)
        with pytest.raises(InvalidArgument, match="64 bits"):
            comm.launch(kernel("nothing"), 1, 1 << 64)
        with pytest.raises(InvalidArgument):
            comm.launch(kernel("nothing"), 1, "text")
        blocks = np.zeros(3, np.uint64)
        comm.launch(kernel("nothing"), 3, blocks)
        assert list(blocks) == [3, 3, 3]

    with world_of("loopback", 1) as world:
        world.run(main)


def test_arguments() -> None:
    array = np.arange(3)
    assert as_argument(array).value == array.ctypes.data
    assert (type(as_argument(5)), as_argument((1 << 64) - 1).value) == (ctypes.c_uint64, (1 << 64) - 1)
    assert (type(as_argument(-5)), as_argument(-5).value) == (ctypes.c_int64, -5)
    assert (type(as_argument(2.5)), as_argument(2.5).value) == (ctypes.c_double, 2.5)


def test_kernels_need_the_header() -> None:
    with world_of("loopback", 1) as world, pytest.raises(InvalidArgument, match=r"kernel\.h"):
        world.communicators[0].backend.build('extern "C" void f() {}', "f")
