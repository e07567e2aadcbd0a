"""A CPU stream: an ordered queue of work, done by a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from commrt.backend import Event


class CpuEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the stream has passed it."""
        return self._passed.wait(timeout_s)

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return self._passed.is_set()

    def set(self) -> None:
        """The stream has come here."""
        self._passed.set()


class CpuStream:
    """Implements `commrt.backend.Stream`. Its thread is a daemon that starts with the first work."""

    capturing = False

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], CpuEvent]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], Any]) -> CpuEvent:
        """Queue `work`."""
        event = CpuEvent()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commrt-stream", daemon=True)
                self._thread.start()
            self._queue.put((work, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold what follows until `event` has passed."""
        self.submit(event.wait)

    def record(self) -> CpuEvent:
        """An event behind everything queued so far."""
        return self.submit(lambda: None)

    def synchronize(self) -> None:
        """Block until all is done; raise the first error since the last call."""
        self.record().wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        while True:
            work, event = self._queue.get()
            try:
                work()
            except BaseException as error:  # kept for synchronize(): a stream outlives what its work raises
                self._error = self._error or error
            finally:
                event.set()
