"""What is open in this process: closed at its end, and out of reach in forked children."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Protocol

from commrt.errors import CommrtError

_EXIT_S = 1.0  # for what was accepted to leave, when the process ends


class Open(Protocol):
    """Something that has to be closed."""

    def leave(self, timeout_s: float) -> None:
        """Close it. Called once."""

    def disown(self) -> None:
        """In a forked child: it is the parent's, and nothing of it may be touched."""


class Lifetime:
    """Holds what is open: a program may drop its communicator while work is in flight. Callable from any thread."""

    def __init__(self) -> None:
        self._open: dict[Open, None] = {}
        self._lock = threading.Lock()

    def add(self, thing: Open) -> None:
        """It is open from now on."""
        with self._lock:
            self._open[thing] = None

    def remove(self, thing: Open) -> bool:
        """Whether it was open; it is not any more."""
        with self._lock:
            return thing in self._open and self._open.pop(thing) is None

    def end(self) -> None:
        """Close everything, the latest first."""
        for thing in reversed(list(self._open)):
            try:
                if self.remove(thing):
                    thing.leave(_EXIT_S)
            except CommrtError:
                continue  # the process is ending; peers raise by themselves

    def forked(self) -> None:
        """Give up what is the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        for thing in list(self._open):
            thing.disown()
        self._open.clear()


PROCESS = Lifetime()
atexit.register(PROCESS.end)
os.register_at_fork(after_in_child=PROCESS.forked)
