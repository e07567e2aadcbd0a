"""Handles of operations under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from commrt.errors import InvalidArgument
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
    if not timeout >= 0:
        raise InvalidArgument(f"a timeout is a number of seconds from 0, or None; not {timeout}")
    return float(timeout)


class NativeWork:
    """A launch of the native engine. `settle(code)` turns its end into a return or an exception."""

    __slots__ = ("__weakref__", "_code", "_handle", "_keep", "_settle")

    def __init__(self, handle: Any, settle: Callable[[int], None], keep: Any) -> None:
        self._handle: Any = handle
        self._settle = settle
        self._keep = keep
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """See `Work`."""
        limit = checked_timeout(timeout)
        deadline = time.monotonic() + limit if limit >= 0 else float("inf")
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            lib.cr_wait(self._handle, min(left, _SLICE_S))
        if self._code:
            self._settle(self._code)
        return True

    def done(self) -> bool:
        """See `Work`."""
        if self._code is None:
            code = lib.cr_poll(self._handle)
            if code == lib.CR_PENDING:
                return False
            self._code = code
            self._keep = None
            lib.cr_release(self._handle)
        return True

    def wait_stream(self, stream: Stream) -> None:
        """See `Work`."""
        stream.submit(self.wait)


class StreamWork:
    """An operation queued on a stream."""

    def __init__(self, event: Event, outcome: list[BaseException]) -> None:
        self._event, self._outcome = event, outcome

    def wait(self, timeout: float | None = None) -> bool:
        """See `Work`."""
        limit = checked_timeout(timeout)
        if not self._event.wait(None if limit < 0 else limit):
            return False
        if self._outcome:
            raise self._outcome[0]
        return True

    def done(self) -> bool:
        """See `Work`."""
        return self._event.done()

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
