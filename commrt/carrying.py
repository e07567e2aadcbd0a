"""What other libraries carry, on a thread of its own, in the communicator's order.

The launch of a carried operation stands in the communicator's lane like any other. Once all ranks have come to it, it
waits for this thread, which lets the library do its part and says so. Everything that ends a launch ends this one too:
a rank that dies, a deadline, an abort; the library is then told to stop.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from commrt.joining import Joined
from commrt.native import lib
from commrt.provider import Carrier, Task, Underway

_SLICE_S = 0.02  # how late a library is told to stop
_STOP_S = 2.0  # how long it is given to
_VERDICT_S = 1.0  # a library may notice a rank's end before it is certain who that was


class _Job(NamedTuple):
    launch: Any  # held for this thread
    carrier: Carrier
    task: Task
    keep: Any


class Carriage:
    """The joined libraries of one communicator. `failure`: what a library failed with, once one has."""

    def __init__(self, joined: Mapping[str, Joined]) -> None:
        self.failure: Exception | None = None
        self._joined = dict(joined)
        self._order = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stuck = False
        self._thread: threading.Thread | None = None

    def start(self, provider: str, task: Task, keep: Any, launch: Callable[[], Any]) -> Any:
        """Put an operation into the lane by `launch`, which returns its handle, and carry it when its turn comes."""
        with self._order:  # this thread's order is the lane's
            handle = launch()
            lib.cr_retain(handle)
            self._jobs.put(_Job(handle, self._joined[provider].carrier, task, keep))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commrt-carriage", daemon=True)
                self._thread.start()
        return handle

    def close(self, timeout_s: float) -> None:
        """Leave the libraries, once the communicator's launches have ended, well or not."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(max(timeout_s, 2 * _STOP_S))
        if self._stuck or (self._thread is not None and self._thread.is_alive()):
            self.disown()
            return
        for one in self._joined.values():
            one.carrier.close()
        self._joined.clear()

    def disown(self) -> None:
        """Never touch the libraries again, nor let Python free them: their threads are the parent's, or don't stop."""
        _keep_for_ever(self._joined)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._carry(job)
            lib.cr_release(job.launch)
            del job

    def _carry(self, job: _Job) -> None:
        while (code := lib.cr_agreed(job.launch, _SLICE_S)) == lib.CR_PENDING:
            pass
        if code:
            return
        try:
            if job.task.count or job.task.collective == "barrier":
                self._finish(job, job.carrier.start(job.task))
            lib.cr_carried(job.launch, lib.CR_OK)
        except Exception as error:
            if lib.cr_wait(job.launch, _VERDICT_S) == lib.CR_PENDING:
                self.failure = error
                lib.cr_carried(job.launch, lib.CR_CARRIER)
            job.carrier.abort()

    def _finish(self, job: _Job, underway: Underway) -> None:
        limit = 0.0
        while not underway.wait(_SLICE_S):
            if not limit and lib.cr_poll(job.launch) != lib.CR_PENDING:
                job.carrier.abort()
                limit = time.monotonic() + _STOP_S
            if limit and time.monotonic() > limit:
                self._stuck = True
                _keep_for_ever((job, underway))  # the library may still use the arrays
                return


def _keep_for_ever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
