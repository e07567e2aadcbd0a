"""A port made of mapped memory: a bounded queue of requests in front of it. For transports that emulate a link."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from commrt.native import ffi, lib

_SIGNAL_NBYTES = 8


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
    """Implements `commrt.transport.Port` over a segment mapped at `base`. `due` decides what leaves the queue when.

    due(queue) takes the requests that may be applied now out of the queue, in the order in which they are to be.
    """

    def __init__(self, base: int, nbytes: int, depth: int = 64, due: Callable[[deque[Request]], Iterator[Request]] | None = None) -> None:
        self._base, self._nbytes, self._depth = base, nbytes, depth
        self._queue: deque[Request] = deque()
        self._due = due or _all

    def put(self, offset: int, source: memoryview) -> int:
        """Queue a copy of `source`."""
        self._check(offset, source.nbytes)
        return self._push(Request(offset, bytes(source)))

    def signal(self, offset: int, value: int) -> int:
        """Queue a signal."""
        self._check(offset, _SIGNAL_NBYTES)
        return self._push(Request(offset, value=value))

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

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes > self._nbytes - offset:
            raise ValueError(f"request at {offset} of {nbytes} bytes lies outside a segment of {self._nbytes}")

    def _push(self, request: Request) -> int:
        if len(self._queue) >= self._depth:
            return 0
        self._queue.append(request)
        return 1

    def _apply(self, request: Request) -> None:
        if request.value is None:
            ctypes.memmove(self._base + request.offset, request.data, len(request.data))
        else:
            lib.cr_store_release(ffi.cast("unsigned long long*", self._base + request.offset), request.value)


def _all(queue: deque[Request]) -> Iterator[Request]:
    while queue:
        yield queue.popleft()
