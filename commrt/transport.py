"""The transport contract: a kind of link.

A transport is one module exporting `plugin`, an object that satisfies `Transport`: a folder of `transports/` here, or
what an outside package's entry point in `commrt.transports` names. Joining two ranks: each opens an endpoint and
publishes its address; each asks whether it can reach the other's; each registers its segment and publishes the key;
each connects.

Classes may derive from these protocols, for what they have of defaults, or just look like them.

A connection is *mapped* (the peer's memory can be loaded and stored: `mapped` is its address here) or a *port*
(requests go to a queue that something else drains), or mapped for registered memory and a port for all other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from commrt.backend import Backend, Memory, MemoryKind, Probe
from commrt.settings import Settings

Exchange = Callable[[bytes], Sequence[bytes]]
INLINE_NBYTES = 128  # puts up to this are copied when taken; the source of a longer one stays until a flush


@dataclass(frozen=True)
class Context:
    """Who opens an endpoint, for which communicator. `token` is the same on all its ranks and unlike any other's.

    `settings`: this rank's, among them those of its transports.
    """

    rank: int
    size: int
    token: bytes
    backend: Backend
    options: dict[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Reach:
    """An estimate for a link, to choose among several: microseconds, and 1e9 bytes per second."""

    latency_us: float
    bandwidth_gbps: float


def this_host() -> bytes:
    """Names the running system, its network and process namespaces and this user: the same where processes share them.

    Raises OSError where /proc is not mounted.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return f"{boot} {spaces[0]} {spaces[1]} {os.geteuid()}".encode()


class Port(Protocol):
    """A queue of requests to one peer, written in Python. Called by one thread at a time, any thread.

    Each request answers 1 (taken; or, for flush, done), 0 (full: asked again later), or raises, which ends the link.
    Nothing taken is lost or overtaken; a full queue must not wait for the peer, but be drained by `poll`. Offsets are
    in the peer's registered memory, of which the segment is at 0 and any other where `Connection.locate` says; one
    outside of it raises here, or ends the link there. A signal is an absolute value, seen by the peer after every put
    before it.
    """

    def put(self, offset: int, source: memoryview) -> int:
        """Write `source` there. It may be reused after a flush, or at once if of up to INLINE_NBYTES bytes."""

    def signal(self, offset: int, value: int) -> int:
        """Write the 8-byte little-endian `value` there, behind every put before it."""

    def flush(self) -> int:
        """Whether all that was taken is on its way: its sources may be reused, and it arrives without another poll."""

    def poll(self) -> int:
        """Apply what has come in, send what is queued. 1 if anything moved, else 0.

        Raises EOFError once the peer is gone and all that it had sent is applied.
        """


@runtime_checkable
class Connection(Protocol):
    """Two joined ranks, as one of them sees it. Owned by the endpoint. No rank is joined to itself.

    mapped: address of the peer's segment in this process, or None. port: a Python `Port`, or the `cr_port` struct of
    native code, or None. direct: a `cr_port` whose `get` reads the peer's ordinary memory, or None. life: a descriptor
    whose lock the peer's process holds for as long as it lives, or -1.
    """

    mapped: int | None
    port: Any
    direct: Any
    life: int

    def open(self, key: bytes) -> Memory:
        """Map more of the peer's registered memory. Mapped connections only. Raises TransportError."""

    def locate(self, key: bytes) -> int:
        """Where the peer's registered memory begins in the offsets of `port`. Ports only. Raises TransportError."""

    def close(self) -> None:
        """Idempotent."""


@runtime_checkable
class TellingConnection(Connection, Protocol):
    """A connection that can tell what ended its port."""

    def trouble(self) -> str:
        """In a few words, or "" if nothing went wrong. Callable from any thread, also after close."""


class Endpoint(Protocol):
    """This rank's end of a kind of link."""

    address: bytes

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """Whether the endpoint at `address` can be joined; None if not."""

    def register(self, memory: Memory) -> bytes:
        """Let peers at this rank's memory; the key is what they open it with. It stays registered until close."""

    def connect(self, rank: int, address: bytes, key: bytes) -> Connection:
        """Join. `key` is of the peer's segment. Raises TransportError."""

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """Join all members at once. Collective; answers what the group adds, such as {"switch"}, the same on all.

        A device's link adds to links of pairs between all members. Raises Unavailable, on all members alike, where one
        of them can't: they do without, unless this transport is forced. Nothing is left of what was done until then.
        """
        return frozenset()

    def close(self) -> None:
        """Idempotent; closes its connections."""


@runtime_checkable
class SwitchEndpoint(Endpoint, Protocol):
    """An endpoint on a switch that acts on the memory of all members at once.

    multicast: once `group` has offered "switch", the address that stands for the same place in the memory which each
    member registered first; else 0.
    """

    multicast: int


@runtime_checkable
class Transport(Protocol):
    """A kind of link. `memory_kinds` are those it adds to the backend's; one that adds any is a `MemoryTransport`.

    backends: whose memory it joins, by their names. Host memory is the CPU backend's. groups: whether `group` of its
    endpoints can add anything.
    """

    name: str
    backends: tuple[str, ...] = ("cpu",)
    groups: bool = False
    memory_kinds: tuple[MemoryKind, ...] = ()

    def probe(self) -> Probe:
        """Whether it can serve here. Never raises."""

    def open(self, context: Context) -> Endpoint:
        """An endpoint for one communicator. Raises TransportError."""


@runtime_checkable
class MemoryTransport(Transport, Protocol):
    """A transport with memory of its own."""

    def allocate(self, nbytes: int, kind: str) -> Memory:
        """Zeroed memory of one of `memory_kinds`. Raises MemoryError, InvalidArgument for another kind."""
