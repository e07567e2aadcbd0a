"""The provider contract: a carrier of whole collectives, and the order in which launches of a device may start.

`native` (this package's plans) is one provider; other libraries can be others. Which provider carries an operation is
decided from facts that all ranks share, and is part of the operation's fingerprint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from commrt.backend import Probe


class Carrier(Protocol):
    """A provider joined over the ranks of one communicator. Calls come in the communicator's order."""

    def run(self, collective: str, x: Any, out: Any, op: str, root: int) -> None:
        """Carry one operation to its end. Raises OperationError."""

    def close(self) -> None:
        """Leave. Idempotent."""


@runtime_checkable
class Provider(Protocol):
    """A library that carries whole collectives."""

    name: str

    def probe(self) -> Probe:
        """Whether it can serve here. Never raises."""

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        """Whether it carries this operation. Depends on nothing but the arguments."""

    def join(self, communicator: Any) -> Carrier:
        """Join over the communicator's ranks. Collective."""


class LaunchOrder:
    """One launch order per device, over all communicators and providers.

    Two launches that each hold part of a device and wait for the rest never end. Whoever launches holds the token until
    all its blocks are resident; the order in which ranks take it is the order in which they issue operations.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued = 0

    @contextmanager
    def launch(self) -> Iterator[int]:
        """Hold the token while launching; yields the launch's number on this device."""
        with self._lock:
            self._issued += 1
            yield self._issued
