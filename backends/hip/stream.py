"""HIP's streams and events."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from commrt.backend import Event
from commrt.backends.hip.driver import Driver
from commrt.devices import HostFunctions, wait_until
from commrt.errors import InvalidArgument, OperationError

_functions = HostFunctions()


class HipEvent:
    """A point in a stream."""

    def __init__(self, driver: Driver, stream: Any) -> None:
        self._driver = driver
        self.handle = driver.new_event()
        weakref.finalize(self, driver.leave, "hipEventDestroy", self.handle).atexit = False
        driver.call("hipEventRecord", self.handle, stream)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the stream has passed it."""
        if timeout_s is not None:
            return wait_until(self.done, timeout_s)
        self._driver.call("hipEventSynchronize", self.handle)
        return True

    def done(self) -> bool:
        """Whether the stream has passed it. Raises OperationError if the device has failed."""
        error, _ = self._driver.attempt("hipEventQuery", self.handle)
        if int(error) == int(self._driver.hip.hipError_t.hipErrorNotReady):
            return False
        if int(error):
            raise OperationError(f"an event of AMD GPU {self._driver.device} failed: {error.name}")
        return True


class HipStream:
    """Implements `commrt.backend.Stream`.

    Work runs on a thread of the driver's, which may be the same for all streams of the process: it must call nothing of
    HIP, and wait for no other stream's work.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = driver.new_stream()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        weakref.finalize(self, driver.leave, "hipStreamDestroy", self.handle).atexit = False

    @property
    def capturing(self) -> bool:
        """Whether a capture into a graph is on, begun by whoever."""
        status = self._driver.call("hipStreamIsCapturing", self.handle)
        return bool(status != self._driver.hip.hipStreamCaptureStatus.hipStreamCaptureStatusNone)

    def submit(self, work: Callable[[], Any]) -> HipEvent:
        """Queue `work` as a host function. Raises InvalidArgument in a capture: nobody would know when to forget it."""
        if self.capturing:
            raise InvalidArgument("work of Python can't become part of a graph")
        number = _functions.add(functools.partial(self._do, work))
        try:
            self._driver.call("hipLaunchHostFunc", self.handle, _functions.entry, number)
        except OperationError:
            _functions.discard(number)
            raise
        return self.record()

    def wait_event(self, event: Event) -> None:
        """Hold what follows until `event` has passed; another backend's is waited for by a host function."""
        if isinstance(event, HipEvent):
            self._driver.call("hipStreamWaitEvent", self.handle, event.handle, 0)
        else:
            self.submit(event.wait)

    def record(self) -> HipEvent:
        """An event behind everything queued so far."""
        return HipEvent(self._driver, self.handle)

    def synchronize(self) -> None:
        """Block until all is done; raise the first error since the last call, or OperationError if a kernel failed."""
        self._driver.call("hipStreamSynchronize", self.handle)
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # kept for synchronize(): a stream outlives what its work raises
            with self._lock:
                self._error = self._error or error
