"""What transports of the port family need: registered memory in a port's offsets, and a queue in front of it."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from commrt.backend import Memory, MemoryKind
from commrt.errors import TransportError
from commrt.native import ffi, lib
from commrt.transport import Exchange

_SIGNAL_NBYTES = 8
_REGION_SHIFT = 48
_KEY_NBYTES = 8
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Closeable(Protocol):
    """What can be closed, more than once."""

    def close(self) -> Any:
        """Idempotent."""


class Mapped:
    """A peer's memory that someone else holds. Implements `commrt.backend.Memory`."""

    kind = MemoryKind("mapped", "kernel")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def retain(self) -> Mapped:
        """Not counted."""
        return self

    def close(self) -> None:
        """Not counted."""


class Regions:
    """A rank's registered memory, in the offsets of ports: the first from 0, each further one 2^48 behind the last.

    Nothing outside of it is touched, whatever a peer asks for: that raises ValueError.
    """

    def __init__(self) -> None:
        self._memories: list[Memory] = []

    def add(self, memory: Memory) -> int:
        """Register one more, held until `close`; the offset at which it begins."""
        self._memories.append(memory.retain())
        return (len(self._memories) - 1) << _REGION_SHIFT

    def register(self, memory: Memory) -> bytes:
        """The same, as a key for `PortConnection.locate`."""
        return self.add(memory).to_bytes(_KEY_NBYTES, "little")

    def address(self, offset: int, nbytes: int) -> int:
        """Where these bytes lie in this process."""
        number, within = offset >> _REGION_SHIFT, offset & ((1 << _REGION_SHIFT) - 1)
        if not 0 <= number < len(self._memories) or nbytes > self._memories[number].nbytes - within:
            raise ValueError(f"{nbytes} bytes at offset {offset:#x} lie outside of the registered memory")
        return self._memories[number].address + within

    def word(self, offset: int) -> int:
        """Where a signal lies in this process."""
        if offset % _SIGNAL_NBYTES:
            raise ValueError(f"a signal at offset {offset:#x} is not aligned to {_SIGNAL_NBYTES} bytes")
        return self.address(offset, _SIGNAL_NBYTES)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """These bytes, writable."""
        return memoryview(ffi.buffer(ffi.cast("char*", self.address(offset, nbytes)), nbytes))

    def signal(self, offset: int, value: int) -> None:
        """Write an 8-byte value, seen by the kernels of this rank after all that was written before."""
        lib.cr_store_release(ffi.cast("unsigned long long*", self.word(offset)), value)

    def close(self) -> None:
        """Let go of all memory. Idempotent."""
        while self._memories:
            self._memories.pop().close()


class PortEndpoint:
    """What all `commrt.transport.Endpoint`s of ports have alike. `closes`: what `close` closes, the latest first."""

    def __init__(self) -> None:
        self.regions = Regions()
        self.closes: list[Closeable] = [self.regions]

    def register(self, memory: Memory) -> bytes:
        """Let peers at it through `regions`."""
        return self.regions.register(memory)

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """Nothing that joins more than two."""
        return frozenset()

    def close(self) -> None:
        """Idempotent."""
        while self.closes:
            self.closes.pop().close()


class PortConnection:
    """What all `commrt.transport.Connection`s that map nothing have alike. Keys are of `Regions`.

    `link`: what `close` closes. `port`: what takes the requests, this object itself if None.
    """

    mapped: int | None = None
    direct: Any = None
    life: int = -1

    def __init__(self, link: Closeable, port: Any = None) -> None:
        self.link = link
        self.port = self if port is None else port

    def flush(self) -> int:
        """Nothing that was taken waits here: to be overridden where it may."""
        return 1

    def close(self) -> None:
        """Idempotent."""
        self.link.close()

    def open(self, key: bytes) -> Memory:
        """Not mapped."""
        raise TransportError("this link maps nothing")

    def locate(self, key: bytes) -> int:
        """As the peer said."""
        if len(key) != _KEY_NBYTES:
            raise TransportError(f"a peer's key has {len(key)} bytes, not {_KEY_NBYTES}")
        return int.from_bytes(key, "little")


@dataclass(frozen=True)
class Request:
    """A put of `data`, or the signal `value` if that is not None, at `offset` of the peer's segment."""

    offset: int
    data: bytes = b""
    value: int | None = None

    @property
    def is_signal(self) -> bool:
        """Whether this is a signal."""
        return self.value is not None


class QueuePort:
    """Implements `commrt.transport.Port` over a peer's memory, mapped here. `due` decides what leaves the queue when.

    due(queue) takes the requests that may be applied now out of the queue, in the order in which they are to be.
    """

    def __init__(
        self, target: Regions, depth: int = 64, due: Callable[[deque[Request]], Iterator[Request]] | None = None
    ) -> None:
        self._target, self._depth = target, depth
        self._queue: deque[Request] = deque()
        self._due = due or _all

    def put(self, offset: int, source: memoryview) -> int:
        """Queue a copy of `source`."""
        self._target.address(offset, source.nbytes)
        return self._push(lambda: Request(offset, bytes(source)))

    def signal(self, offset: int, value: int) -> int:
        """Queue a signal."""
        self._target.word(offset)
        return self._push(lambda: Request(offset, value=value))

    def flush(self) -> int:
        """Puts were copied: their sources are free. What was accepted still has to leave."""
        self.poll()
        return int(not self._queue)

    def poll(self) -> int:
        """Apply what is due."""
        moved = 0
        for request in self._due(self._queue):
            self._apply(request)
            moved = 1
        return moved

    def _push(self, make: Callable[[], Request]) -> int:
        if len(self._queue) >= self._depth:
            return 0
        self._queue.append(make())
        return 1

    def _apply(self, request: Request) -> None:
        if request.value is None:
            ctypes.memmove(self._target.address(request.offset, len(request.data)), request.data, len(request.data))
        else:
            self._target.signal(request.offset, request.value)


def check_own(link: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end of a Unix socket runs as this user."""
    _, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the process at the other end is user {uid}'s")


def _all(queue: deque[Request]) -> Iterator[Request]:
    while queue:
        yield queue.popleft()
