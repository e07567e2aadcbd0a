"""Handles of operations under way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from commrt.errors import CommunicatorClosed, InvalidArgument
from commrt.native import lib

if TYPE_CHECKING:
    from commrt.backend import Event, Stream

_SLICE_S = 0.1  # how long a signal to this process may wait


@runtime_checkable
class Work(Protocol):
    """An operation that was started. Callable from any thread; the arrays are held until it has ended."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host until it has ended; False if `timeout` seconds pass first, which leaves it running.

        Raises what the operation failed with.
        """

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks, never raises."""

    def wait_stream(self, stream: Stream) -> None:
        """Hold what is queued on `stream` from now on until it has ended; a failure surfaces at the stream."""


def checked_timeout(timeout: float | None) -> float:
    """Seconds for native code: negative for none. 0 is "at once". Raises InvalidArgument for negative or NaN."""
    if timeout is None or timeout == float("inf"):
        return -1.0
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InvalidArgument(f"a timeout is a number of seconds from 0, or None; not {timeout!r}")
    return float(timeout)


class _Process:
    """Which process this is: a forked child has none of its parent's threads and mappings."""

    forks = 0

    @classmethod
    def forked(cls) -> None:
        cls.forks += 1

    @classmethod
    def check(cls, forks: int) -> None:
        if forks != cls.forks:
            raise CommunicatorClosed("this work belongs to the process that this one was forked from")


os.register_at_fork(after_in_child=_Process.forked)


class NativeWork:
    """A launch of the native engine. `settle(code)` turns its end into a return or an exception."""

    __slots__ = ("__weakref__", "_code", "_forks", "_handle", "_keep", "_lock", "_settle", "_waiters")

    def __init__(self, handle: Any, settle: Callable[[int], None], keep: Any) -> None:
        self._handle: Any = handle
        self._settle = settle
        self._keep = keep
        self._code: int | None = None
        self._forks = _Process.forks
        self._lock = threading.Lock()
        self._waiters = 0  # threads that hold the handle in native code: it is released behind the last of them

    def wait(self, timeout: float | None = None) -> bool:
        """See `Work`."""
        _Process.check(self._forks)
        limit = checked_timeout(timeout)
        deadline = time.monotonic() + limit if limit >= 0 else float("inf")
        while not self._visit(+1):
            left = deadline - time.monotonic()
            try:
                if left > 0:
                    lib.cr_wait(self._handle, min(left, _SLICE_S))
            finally:
                ended = self._visit(-1)
            if left <= 0 and not ended:
                return False
        if self._code:
            self._settle(self._code)
        return True

    def done(self) -> bool:
        """See `Work`. Of the parent's work nothing is left in a forked child."""
        return self._forks != _Process.forks or self._visit(0)

    def _visit(self, change: int) -> bool:
        """Whether it has ended; if not, or on leaving, `change` the number of waiters. The last one out releases."""
        with self._lock:
            if self._code is None and (code := lib.cr_poll(self._handle)) != lib.CR_PENDING:
                self._code, self._keep = code, None
            if change < 0 or self._code is None:
                self._waiters += change
            if self._code is not None and self._waiters == 0 and self._handle is not None:
                lib.cr_release(self._handle)
                self._handle = None
            return self._code is not None

    def wait_stream(self, stream: Stream) -> None:
        """See `Work`."""
        stream.submit(self.wait)


class StreamWork:
    """An operation queued on a stream."""

    def __init__(self, event: Event, outcome: list[BaseException]) -> None:
        self._event, self._outcome = event, outcome
        self._forks = _Process.forks

    def wait(self, timeout: float | None = None) -> bool:
        """See `Work`."""
        _Process.check(self._forks)
        limit = checked_timeout(timeout)
        if not self._event.wait(None if limit < 0 else limit):
            return False
        if self._outcome:
            raise self._outcome[0]
        return True

    def done(self) -> bool:
        """See `Work`."""
        return self._forks != _Process.forks or self._event.done()

    def wait_stream(self, stream: Stream) -> None:
        """See `Work`."""
        stream.wait_event(self._event)


class WorkGroup:
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all; the timeout is for each."""
        ended = [work.wait(timeout) for work in self._works]  # every one, even behind one that is late
        return all(ended)

    def done(self) -> bool:
        """Whether all have ended."""
        return all(work.done() for work in self._works)

    def wait_stream(self, stream: Stream) -> None:
        """See `Work`."""
        for work in self._works:
            work.wait_stream(stream)
