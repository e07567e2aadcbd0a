"""The backend contract: a kind of device. Capabilities are data.

A backend is one module under `commrt/backends/` (or an entry point in `commrt.backends`) exporting `plugin`, an object
that satisfies `Backend`. It is looked up by name and knows no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

Coherence = Literal["kernel", "launch"]
Joins = Literal["processes", "groups", "threads", "options"]


@dataclass(frozen=True)
class MemoryKind:
    """A kind of memory. `kernel`-coherent: peers' writes are seen while a kernel runs; `launch`: at its boundaries.

    What peers write or read during a launch must be `kernel`-coherent: binding refuses or stages any other.
    """

    name: str
    coherence: Coherence


@dataclass(frozen=True)
class Probe:
    """What was found: devices, or the reason there are none.

    level: in a few words, what a result that comes by way of it was obtained on, such as "CPU", "real verbs" or "fake
    driver"; empty where its name says it all. joins: what a transport joins: pairs of ranks, or "groups" alone, all
    members at once. One that joins only "threads" of a process, or what its "options" say, serves only when named.
    """

    devices: tuple[str, ...] = ()
    reason: str = ""
    level: str = ""
    joins: Joins = "processes"


class Memory(Protocol):
    """Memory that a backend allocated or opened. Whoever asked for it is its first holder."""

    address: int
    nbytes: int
    kind: MemoryKind

    def retain(self) -> Memory:
        """One more holder in this process; returns itself."""

    def close(self) -> None:
        """One holder less. The last one gives the memory back: nothing may use the address afterwards."""


class Event(Protocol):
    """A point in a stream."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the host until the stream has passed it. False when the timeout passes first."""

    def done(self) -> bool:
        """Whether the stream has passed it."""


class Stream(Protocol):
    """An ordered queue of work on a device. Callable from any thread."""

    @property
    def capturing(self) -> bool:
        """Whether what is queued now becomes part of a graph, to run whenever that is launched."""

    def submit(self, work: Callable[[], Any]) -> Event:
        """Queue `work` behind everything queued so far. What it raises is kept for `synchronize`."""

    def wait_event(self, event: Event) -> None:
        """Hold what is queued from now on until `event` has passed."""

    def record(self) -> Event:
        """An event behind everything queued so far."""

    def synchronize(self) -> None:
        """Block until the queue is empty; raises the first error of the work since the last call."""


class Kernel(Protocol):
    """A user's compiled kernel."""

    def launch(self, blocks: int, arguments: Sequence[Any], stream: Stream | None = None) -> None:
        """Run it on `blocks` thread blocks. Without a stream, returns when all have finished."""


@runtime_checkable
class Backend(Protocol):
    """A kind of device. Callable from any thread."""

    name: str
    memory_kinds: tuple[MemoryKind, ...]

    def probe(self) -> Probe:
        """What is here. Never raises."""

    def allocate(self, nbytes: int, kind: str | None = None, reserve: bool = False) -> Memory:
        """Zeroed, page-aligned, exportable memory. `reserve`: touching it later can't fail. Raises MemoryError."""

    def export(self, memory: Memory) -> bytes:
        """What another process of this host opens `memory` with."""

    def open(self, exported: bytes) -> Memory:
        """Map a peer's memory. Raises TransportError if it is not what it claims to be."""

    def copy(self, to: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        """Copy between addresses of this device."""

    def stream(self) -> Stream:
        """A new stream."""

    def build(self, source: str, symbol: str) -> Kernel:
        """Compile a user's kernel, written against `algorithms/device/`, and find `symbol` in it."""


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """A backend whose plans run as kernels on a device with memory of its own, one grid for each launch.

    Its memory kinds hold "pinned": host memory at one address for the host and for kernels. `threads`: of one thread
    block of a plan's kernel. Kernels launched on one stream run in order; kernels on different streams may overlap.
    """

    threads: int

    def pin(self, address: int, nbytes: int) -> int:
        """Let kernels at host memory that something else allocated: its address for them. Raises TransportError."""

    def unpin(self, address: int) -> None:
        """The end of that; `address` as the host knows it."""

    def resident_blocks(self, kernel: Kernel) -> int:
        """How many thread blocks of that kernel, of `threads` threads each, can be on the device at once."""


@runtime_checkable
class LocatedBackend(Backend, Protocol):
    """A backend whose devices can't all reach each other's memory."""

    def location(self) -> bytes:
        """Names this rank's device, to peers on this host."""

    def reaches(self, location: bytes) -> bool:
        """Whether its kernels can load and store the memory of the device there, as far as can be told."""
