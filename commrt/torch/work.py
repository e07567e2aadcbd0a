"""Operations under way, as torch asks for them: `Work`, and futures of their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commrt.lifetime import PROCESS
from commrt.torch.tensors import Staging
from commrt.work import Work as Part

_NO_LIMIT = timedelta(0)  # torch's own way to say it
_GLANCE_S = 0.002  # how long the oldest operation may keep the end of the others from being noticed

_CLOSE_S = 10.0  # for the callbacks of futures


class Work(dist._Work):
    """An operation that was started: `parts` of the communicator's, and what `staging` does once they have ended.

    Callable from any thread. What it failed with is raised by `wait`, each time, and by its future.
    """

    def __init__(self, parts: Sequence[Part], outputs: Sequence[Any], staging: Staging, watcher: Watcher) -> None:
        super().__init__()
        self._parts, self._outputs, self._staging, self._watcher = parts, list(outputs), staging, watcher
        self._lock = threading.Lock()
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until it has ended; True. Raises TimeoutError after `timeout`, which leaves it running."""
        limit_s = timeout.total_seconds()
        if not self._await(limit_s if limit_s > 0 else float("inf")):
            raise TimeoutError(f"the operation did not end within {limit_s:g} s, and goes on")
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.glance(0.0)

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it failed with, once it has ended."""
        try:
            self._await(0.0)
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        """The tensors with its results, once it has ended."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the tensors with the results."""
        with self._lock:
            if self._future is not None:
                return self._future
            ended: Any = torch.futures.Future()
            # Raising behind `then` is what makes a future fail for C++ too; a set_exception crashes DDP.
            self._future = ended.then(lambda _: self.result())
        if self.is_completed():
            ended.set_result(None)
        else:
            self._watcher.watch(self, ended)
        return self._future

    def glance(self, limit_s: float) -> bool:
        """Whether it has ended, well or not; wait up to `limit_s` seconds for it."""
        try:
            return self._await(limit_s)
        except Exception:
            return True

    def _await(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        for part in self._parts:
            if not part.wait(max(0.0, deadline - time.monotonic())):
                return False
        with self._lock:
            self._staging.finish()
        return True


class Watcher:
    """A thread that completes the futures of a process group's operations. It starts with the first of them.

    It ends before the process does: a thread that the interpreter ends amid native code takes the process along.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[tuple[Work, Any]] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, work: Work, ended: Any) -> None:
        """Set the result of the future `ended` once `work` has ended."""
        with self._changed:
            self._watched.append((work, ended))
            self._changed.notify()
            if self._thread is None:
                PROCESS.add(self)
                self._thread = threading.Thread(target=self._run, name="commrt-futures", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Complete the futures of what has ended, and no others from here on."""
        if PROCESS.remove(self):
            self.leave(_CLOSE_S)

    def leave(self, timeout_s: float) -> None:
        """What `close` does, once; see `commrt.lifetime`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def disown(self) -> None:
        """In a forked child: the thread is the parent's."""

    def _run(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._closed)
                watched, closed = list(self._watched), self._closed
            if watched and not closed:
                watched[0][0].glance(_GLANCE_S)
            for entry in [entry for entry in watched if entry[0].is_completed()]:
                with self._changed:
                    self._watched.remove(entry)
                entry[1].set_result(None)
