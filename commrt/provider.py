"""The provider contract: a carrier of whole collectives, and the order in which launches of a device may start.

`native` (this package's plans) is one provider; other libraries are others. Which provider carries an operation is
decided from facts that all ranks share, and is part of the operation's fingerprint.

A carried operation has a place in the communicator's order like any other: first the ranks settle, in native code, that
all of them call the same; then the library moves the data; only then does what was called later begin. So a library
never waits for a rank that is not coming, and never meets the arrays of another operation. See docs/providers.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from commrt.backend import Probe
from commrt.dtypes import DType, ReduceOp
from commrt.transport import Exchange


@dataclass(frozen=True)
class Task:
    """One operation to carry, checked.

    `count`: elements of a group, from 1 on, but for a barrier. `input` and `output` are addresses in the memory of the
    communicator's backend, 0 where the collective has none on this rank, and may be the same; what is there belongs to
    the carrier until the operation has ended. `root`, `op` mean nothing where the collective has none.
    """

    collective: str
    dtype: DType
    op: ReduceOp
    root: int
    count: int
    input: int
    output: int


class Underway(Protocol):
    """An operation that was started."""

    def wait(self, timeout: float) -> bool:
        """True once it has ended well; False if `timeout` seconds pass first. Raises what it failed with."""


class Carrier(Protocol):
    """A library joined over the ranks of one communicator. One thread calls it, with one operation at a time."""

    def start(self, task: Task) -> Underway:
        """Start an operation, which all ranks have come to. May raise what it failed with."""

    def abort(self) -> None:
        """End what is under way, with an error, on this rank at least, at once. Nothing is started afterwards."""

    def close(self) -> None:
        """Leave: nothing is under way. Idempotent. Afterwards no thread, socket or file of it is left."""


@dataclass(frozen=True)
class Joining:
    """What a provider joins the ranks of a communicator with.

    `exchange(value)` returns every rank's bytes, by rank. Collective: the same number of calls on all ranks; raises if
    another rank has failed to join. `backend`: whose memory will be carried. `local`: all ranks are on this host.
    """

    rank: int
    size: int
    exchange: Exchange
    backend: str
    local: bool
    timeout_s: float


@runtime_checkable
class Provider(Protocol):
    """Something that carries whole collectives."""

    name: str

    def probe(self) -> Probe:
        """Whether it can serve here. Cheap: imports and opens nothing. Never raises."""

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        """Whether it carries this operation. Depends on nothing but the arguments."""


@runtime_checkable
class JoiningProvider(Provider, Protocol):
    """A library beside commrt's own plans."""

    def join(self, joining: Joining) -> Carrier:
        """Join over the ranks of a communicator. Collective. What it raises ends the attempt on all ranks."""


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


_ORDERS: dict[str, LaunchOrder] = {}


def launch_order(device: str) -> LaunchOrder:
    """This process's token of a device (`cuda:0`), which all backends and providers that launch on it share."""
    return _ORDERS.setdefault(device, LaunchOrder())
