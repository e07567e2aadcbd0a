"""A toy library beside native: ranks of one process hand each other their memory, at a meeting point of theirs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any

import numpy as np

from commrt.backend import Probe
from commrt.provider import Carrier, Joining, Task

PLUGIN_API = 1


class Room:
    """Where the ranks of a communicator meet, each with its input."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.arrays: list[Any] = [None] * size


_rooms: dict[bytes, Room] = {}


class RelayWork:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: float) -> bool:
        try:
            self._future.result(timeout)
        except Late:
            if not self._future.done():
                return False
            raise
        return True


class RelayCarrier:
    """`hook` is called with each task, on the library's own thread, before it does its part."""

    def __init__(self, joining: Joining, hook: Callable[[int, Task], None]) -> None:
        name = joining.exchange(str(id(self)).encode())[0]
        self._room = _rooms.setdefault(name, Room(joining.size))
        self._rank, self._hook = joining.rank, hook
        self._pool = ThreadPoolExecutor(1, f"relay-{joining.rank}")
        joining.exchange(b"")

    def start(self, task: Task) -> RelayWork:
        return RelayWork(self._pool.submit(self._carry, task))

    def _carry(self, task: Task) -> None:
        self._hook(self._rank, task)
        self._room.arrays[self._rank] = _array(task, task.input)
        self._room.barrier.wait()
        total = np.sum(self._room.arrays, axis=0, dtype=task.dtype.name)
        self._room.barrier.wait()
        _array(task, task.output)[:] = total

    def abort(self) -> None:
        self._room.barrier.abort()

    def close(self) -> None:
        self._pool.shutdown()


class RelayProvider:
    """All-reduces sums of 8-byte numbers. `fails`: the ranks that can't join; `hook`: see RelayCarrier."""

    name = "relay"

    def __init__(
        self, fails: tuple[int, ...] = (), hook: Callable[[int, Task], None] = lambda rank, task: None
    ) -> None:
        self.fails, self.hook = fails, hook

    def probe(self) -> Probe:
        return Probe(devices=("this process",))

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        return collective == "all_reduce" and op == "sum" and dtype in ("float64", "int64")

    def join(self, joining: Joining) -> Carrier:
        if joining.rank in self.fails:
            raise OSError("no relay here")
        return RelayCarrier(joining, self.hook)


def _array(task: Task, address: int) -> Any:
    memory = (ctypes.c_char * (task.count * task.dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, task.dtype.name)


plugin = RelayProvider()
