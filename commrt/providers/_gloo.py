"""A group of torch's Gloo: joined through commrt's own exchange, and ended by its sockets, as it has no other way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from commrt.collectives import REDUCING
from commrt.errors import Unavailable
from commrt.plan import groups
from commrt.provider import Joining, Task
from commrt.transport import Exchange

_NO_LIMIT = timedelta(days=30)  # commrt's own deadlines end an operation
_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
_Address = tuple[str, int]
_finding = threading.Lock()
_TRIES = 10


class GlooWork:
    """Implements `commrt.provider.Underway`. `last`: what is left to do once torch is done."""

    def __init__(self, work: Any, last: Callable[[], Any] | None = None) -> None:
        self._work, self._last = work, last

    def wait(self, timeout: float) -> bool:
        """torch raises one error when time is up and when an operation failed: which, is seen afterwards."""
        with contextlib.suppress(RuntimeError):
            self._work.wait(timedelta(seconds=max(timeout, 1e-3)))
        if not self._work.is_completed():
            return False
        self._work.wait()
        if self._last is not None:
            self._last()
        return True


class GlooCarrier:
    """Implements `commrt.provider.Carrier`."""

    def __init__(self, joining: Joining) -> None:
        if not hasattr(c10d, "ProcessGroupGloo"):
            raise Unavailable("this torch has no Gloo")
        self._rank, self._size = joining.rank, joining.size
        options = c10d.ProcessGroupGloo._Options()
        options._threads, options._timeout = 1, _NO_LIMIT
        device, listener = _device(joining.local)
        options._devices = [device]
        everyone = joining.exchange(msgspec.json.encode(listener))
        self._listeners = {msgspec.json.decode(one, type=_Address) for one in everyone}
        self._group: Any = c10d.ProcessGroupGloo(_Store(joining.exchange), self._rank, self._size, options)

    def start(self, task: Task) -> GlooWork:
        """See `commrt.provider.Carrier`."""
        work: GlooWork = getattr(self, f"_{task.collective}")(task)
        return work

    def abort(self) -> None:
        """Both ends of a connection that is shut down see it."""
        for connection in _sockets():
            with contextlib.suppress(OSError):
                ends = (connection.getsockname()[:2], connection.getpeername()[:2])
                if not self._listeners.isdisjoint(ends):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `commrt.provider.Carrier`."""
        self._group = None

    def _all_reduce(self, task: Task) -> GlooWork:
        _, out = self._copied(task)
        return GlooWork(self._reduced(out, task))

    def _reduce(self, task: Task) -> GlooWork:
        x, out = self._copied(task)
        target = out if self._rank == task.root else x.clone()  # it uses the memory of every rank
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = _op(task), task.root
        return GlooWork(self._group.reduce([target], options))

    def _broadcast(self, task: Task) -> GlooWork:
        x, out = self._tensors(task)
        if self._rank == task.root and task.input != task.output:
            out.copy_(x)
        options = c10d.BroadcastOptions()
        options.rootRank = task.root
        return GlooWork(self._group.broadcast([out], options))

    def _all_gather(self, task: Task) -> GlooWork:
        x, out = self._tensors(task)
        return GlooWork(self._group._allgather_base(out, x))

    def _reduce_scatter(self, task: Task) -> GlooWork:
        x, out = self._tensors(task)
        whole = x.clone()  # torch does the same, but does not say when it has ended
        return GlooWork(self._reduced(whole, task), lambda: out.copy_(whole.chunk(self._size)[self._rank]))

    def _gather(self, task: Task) -> GlooWork:
        x, out = self._tensors(task)
        options = c10d.GatherOptions()
        options.rootRank = task.root
        parts = [list(out.chunk(self._size))] if self._rank == task.root else []
        return GlooWork(self._group.gather(parts, [x], options))

    def _scatter(self, task: Task) -> GlooWork:
        x, out = self._tensors(task)
        options = c10d.ScatterOptions()
        options.rootRank = task.root
        parts = [list(x.chunk(self._size))] if self._rank == task.root else []
        return GlooWork(self._group.scatter([out], parts, options))

    def _all_to_all(self, task: Task) -> GlooWork:
        x, out = self._tensors(task)
        return GlooWork(self._group.alltoall_base(out, x, [], [], c10d.AllToAllOptions()))

    def _barrier(self, task: Task) -> GlooWork:
        return GlooWork(self._group.barrier(c10d.BarrierOptions()))

    def _reduced(self, tensor: Any, task: Task) -> Any:
        options = c10d.AllreduceOptions()
        options.reduceOp = _op(task)
        return self._group.allreduce([tensor], options)

    def _copied(self, task: Task) -> tuple[Any, Any]:
        """As `_tensors`, with the input in the output: it reduces in place."""
        x, out = self._tensors(task)
        if task.output and task.output != task.input:
            out.copy_(x)
        return x, out

    def _tensors(self, task: Task) -> tuple[Any, Any]:
        """Input and output, flat; as bytes where they are only moved."""
        unit, dtype = 1, getattr(torch, task.dtype.name, None)
        if task.collective not in REDUCING:
            unit, dtype = task.dtype.itemsize, torch.uint8
        addresses = (task.input, task.output)
        counts = (unit * task.count * number for number in groups(task.collective, self._size))
        x, out = (_tensor(address, count, dtype) for address, count in zip(addresses, counts, strict=True))
        return x, out


class _Store(c10d.Store):  # type: ignore[misc]
    """What Gloo wants of a store: each rank tells some things, then asks for what the others have told."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._mine: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._mine[key] = bytes(value)

    def get(self, key: str) -> bytes:
        if not self._known:
            for told in self._exchange(msgspec.msgpack.encode(self._mine)):
                self._known |= msgspec.msgpack.decode(told, type=dict[str, bytes])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """`get` waits."""

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> _Store:
        return self


def _op(task: Task) -> Any:
    return getattr(c10d.ReduceOp, _OPS[task.op.name])


def _tensor(address: int, count: int, dtype: Any) -> Any:
    if not address:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


# --- sockets ---


def _device(local: bool) -> tuple[Any, _Address]:
    """A device, and the address that it listens on: what it opens is known by that."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    where = {"hostname": "127.0.0.1"} if local else {"interface": interface} if interface else {}
    for _ in range(_TRIES):
        with _finding:
            before = _listening()
            device = c10d.ProcessGroupGloo.create_device(**where, lazy_init=False)
            found = _listening() - before
        if len(found) == 1:
            return device, found.pop()
    raise Unavailable("others open sockets all the time: it can't be told which one is Gloo's")


def _listening() -> set[_Address]:
    return {one.getsockname()[:2] for one in _sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _sockets() -> Iterator[socket.socket]:
    """This process's internet sockets, each by a descriptor of its own while it is looked at."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one
