"""CUDA's streams and events."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from commrt.backend import Event
from commrt.backends.cuda.driver import Driver
from commrt.devices import HostFunctions, wait_until
from commrt.errors import InvalidArgument, OperationError

_functions = HostFunctions()


class CudaEvent:
    """A point in a stream."""

    def __init__(self, driver: Driver, stream: Any) -> None:
        self._driver = driver
        self.handle = driver.new_event()
        weakref.finalize(self, driver.leave, "cuEventDestroy", self.handle).atexit = False
        driver.call("cuEventRecord", self.handle, stream)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the stream has passed it."""
        if timeout_s is not None:
            return wait_until(self.done, timeout_s)
        self._driver.call("cuEventSynchronize", self.handle)
        return True

    def done(self) -> bool:
        """Whether the stream has passed it. Raises OperationError if the device has failed."""
        error, _ = self._driver.attempt("cuEventQuery", self.handle)
        if error == self._driver.cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(error):
            raise OperationError(f"an event of NVIDIA GPU {self._driver.device} failed: {error.name}")
        return True


class CudaStream:
    """Implements `commrt.backend.Stream`.

    Work runs on a thread of the driver's, which may be the same for all streams of the process: it must call nothing of
    CUDA, and wait for no other stream's work.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = driver.new_stream()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        weakref.finalize(self, driver.leave, "cuStreamDestroy", self.handle).atexit = False

    @property
    def capturing(self) -> bool:
        """Whether a capture into a graph is on, begun by whoever."""
        status = self._driver.call("cuStreamIsCapturing", self.handle)
        return bool(status != self._driver.cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def submit(self, work: Callable[[], Any]) -> CudaEvent:
        """Queue `work` as a host function. Raises InvalidArgument in a capture: who would know when to forget it?"""
        if self.capturing:
            raise InvalidArgument("work of Python can't become part of a graph")
        number = _functions.add(functools.partial(self._do, work))
        try:
            self._driver.call("cuLaunchHostFunc", self.handle, _functions.entry, number)
        except OperationError:
            _functions.discard(number)
            raise
        return self.record()

    def wait_event(self, event: Event) -> None:
        """Hold what follows until `event` has passed; another backend's is waited for by a host function."""
        if isinstance(event, CudaEvent):
            self._driver.call("cuStreamWaitEvent", self.handle, event.handle, 0)
        else:
            self.submit(event.wait)

    def record(self) -> CudaEvent:
        """An event behind everything queued so far."""
        return CudaEvent(self._driver, self.handle)

    def synchronize(self) -> None:
        """Block until all is done; raise the first error since the last call, or OperationError if a kernel failed."""
        self._driver.call("cuStreamSynchronize", self.handle)
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
