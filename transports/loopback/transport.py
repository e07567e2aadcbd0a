"""Loopback: the ranks of a communicator are threads of this process, and see each other's memory as it is.

Options (of `commrt.transport.Context.options`): `family` "mapped" (default) or "port", where every put and signal goes
through a bounded queue. The mapped form's group adds an emulated switch. Results obtained over the emulated switch or
memory kind show that plans are right, not how fast hardware is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgspec

from commrt.backend import Memory, MemoryKind, Probe
from commrt.errors import ConfigError, InvalidArgument, TransportError
from commrt.native import ffi, lib
from commrt.ports import QueuePort, Regions
from commrt.transport import Context, Exchange, Reach
from commrt.transports.loopback.memory import EMULATED_LAUNCH, EmulatedMemory, seen_by_peers

FAMILIES = ("mapped", "port")


class Address(msgspec.Struct, frozen=True):
    """The process, and the communicator."""

    pid: int
    token: bytes


class LoopbackTransport:
    """Implements `commrt.transport.Transport`. Knows the memory that its endpoints registered, by unguessable key."""

    name = "loopback"
    backends = ("cpu",)
    groups = True
    memory_kinds: tuple[MemoryKind, ...] = (EMULATED_LAUNCH,)  # makes it a MemoryTransport

    def __init__(self) -> None:
        self.registered: WeakValueDictionary[bytes, Memory] = WeakValueDictionary()

    def probe(self) -> Probe:
        """Always there."""
        return Probe(devices=("this process",), level="threads of one process", joins="threads")

    def open(self, context: Context) -> LoopbackEndpoint:
        """An endpoint of this process."""
        family = context.options.get("family", "mapped")
        if family not in FAMILIES:
            raise ConfigError(f"loopback has no family {family!r}, only {', '.join(FAMILIES)}")
        return LoopbackEndpoint(self, context, family)

    def allocate(self, nbytes: int, kind: str) -> EmulatedMemory:
        """Memory that a running kernel and its peers see differently."""
        if kind != EMULATED_LAUNCH.name:
            raise InvalidArgument(f"loopback has no memory kind {kind!r}, only {EMULATED_LAUNCH.name!r}")
        return EmulatedMemory.create(nbytes)


class LoopbackEndpoint:
    """Implements `commrt.transport.Endpoint`."""

    def __init__(self, transport: LoopbackTransport, context: Context, family: str) -> None:
        self._transport, self._context, self._family = transport, context, family
        self.address = msgspec.msgpack.encode(Address(os.getpid(), context.token))
        self._connections: list[LoopbackConnection] = []

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """Same process, same communicator."""
        try:
            peer = msgspec.msgpack.decode(address, type=Address)
        except msgspec.DecodeError as error:
            raise TransportError(f"a peer's loopback address is malformed: {error}") from error
        if (peer.pid, peer.token) != (os.getpid(), self._context.token):
            return None
        return Reach(latency_us=0.1, bandwidth_gbps=10.0)

    def register(self, memory: Memory) -> bytes:
        """An unguessable key for it."""
        key = secrets.token_bytes(16)
        self._transport.registered[key] = memory
        return key

    def connect(self, rank: int, address: bytes, key: bytes) -> LoopbackConnection:
        """Look the peer's segment up."""
        connection = LoopbackConnection(self._transport, find(self._transport, key), self._family)
        self._connections.append(connection)
        return connection

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """The emulated switch, if every member is mapped."""
        families = exchange(self._family.encode())
        return frozenset({"switch"}) if set(families) == {b"mapped"} else frozenset()

    def close(self) -> None:
        """Let go of the peers' memory."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()


class LoopbackConnection:
    """Implements `commrt.transport.Connection`."""

    life = -1

    def __init__(self, transport: LoopbackTransport, segment: Memory, family: str) -> None:
        self._transport, self._held = transport, [segment]
        self._regions = Regions()
        self._regions.add(segment)
        mapped = family == "mapped"
        self.mapped: int | None = seen_by_peers(segment).address if mapped else None
        self.port = None if mapped else QueuePort(self._regions)
        self.direct = ffi.new("cr_port*")
        lib.cr_port_same_process(self.direct)

    def open(self, key: bytes) -> Memory:
        """The peer's memory itself."""
        memory = find(self._transport, key)
        self._held.append(memory)
        return seen_by_peers(memory)

    def locate(self, key: bytes) -> int:
        """Behind what was located before."""
        memory = find(self._transport, key)
        self._held.append(memory)
        return self._regions.add(memory)

    def close(self) -> None:
        """Let go."""
        for memory in self._held:
            memory.close()
        self._held.clear()
        self._regions.close()


def find(transport: LoopbackTransport, key: bytes) -> Memory:
    """Registered memory, held once more. Raises TransportError if the key is of none, or its owner has dropped it."""
    memory = transport.registered.get(key)
    if memory is None:
        raise TransportError("a peer's loopback key is of no memory of this process")
    return memory.retain()
