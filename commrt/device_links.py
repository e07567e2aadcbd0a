"""Transports that map the memory of other processes' devices on the same host, by what the backend exports.

Such a transport is one `DeviceTransport`, which names the backend that it joins; or a class derived from it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from commrt.backend import LocatedBackend, Memory, MemoryKind, Probe
from commrt.devices import Lifeline
from commrt.errors import TransportError, Unavailable
from commrt.plugins import default_registry
from commrt.transport import Context, Exchange, Reach, this_host


class Address(msgspec.Struct, frozen=True):
    """Where an endpoint is, and on which backend."""

    host: bytes
    pid: int
    backend: str
    lifeline: bytes
    location: bytes = b""


class DeviceTransport:
    """Implements `commrt.transport.Transport` for devices of one backend. `estimate`: of the link of two of them."""

    groups: bool = False
    memory_kinds: tuple[MemoryKind, ...] = ()

    def __init__(self, name: str, backend: str, estimate: Reach) -> None:
        self.name, self.backend, self.estimate = name, backend, estimate
        self.backends = (backend,)

    def probe(self) -> Probe:
        """It serves where its backend finds devices."""
        try:
            found: Probe = default_registry().require("backends", self.backend).probe()
        except Unavailable as error:
            return Probe(reason=str(error))
        return found

    def open(self, context: Context) -> DeviceEndpoint:
        """An endpoint of this process; on another backend, one that reaches nobody."""
        return DeviceEndpoint(self, context)


class DeviceEndpoint:
    """Implements `commrt.transport.Endpoint`."""

    def __init__(self, transport: DeviceTransport, context: Context) -> None:
        self._transport, self._context = transport, context
        self._lifeline = Lifeline.create()
        backend = context.backend
        location = backend.location() if isinstance(backend, LocatedBackend) else b""
        self._own = Address(this_host(), os.getpid(), backend.name, self._lifeline.exported, location)
        self.address = msgspec.msgpack.encode(self._own)
        self._connections: list[DeviceConnection] = []
        self._closed = False

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """Same host, user and process namespace; both on the transport's backend, whose devices meet."""
        peer = _decode(address)
        if peer.host != self._own.host or {peer.backend, self._own.backend} != {self._transport.backend}:
            return None
        backend = self._context.backend
        meets = not isinstance(backend, LocatedBackend) or backend.reaches(peer.location)
        return self._transport.estimate if meets else None

    def register(self, memory: Memory) -> bytes:
        """The backend's export is the key."""
        return self._context.backend.export(memory)

    def connect(self, rank: int, address: bytes, key: bytes) -> DeviceConnection:
        """Map the peer's segment."""
        peer = _decode(address)
        life = None if peer.pid == self._own.pid else Lifeline.open(peer.lifeline)
        try:
            connection = DeviceConnection(self._context, key, life)
        except BaseException:
            if life is not None:
                life.close()
            raise
        self._connections.append(connection)
        return connection

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """Nothing that joins more than two."""
        return frozenset()

    def close(self) -> None:
        """Unmap all."""
        while self._connections:
            self._connections.pop().close()
        if not self._closed:
            self._closed = True
            self._lifeline.close()


class DeviceConnection:
    """Implements `commrt.transport.Connection`: mapped. Kernels can't read what a peer has not registered."""

    def __init__(self, context: Context, key: bytes, lifeline: Lifeline | None) -> None:
        self._context, self._lifeline = context, lifeline
        segment = context.backend.open(key)
        self._opened = [segment]
        self.mapped: int | None = segment.address
        self.port = None
        self.direct = None
        self.life: int = -1 if lifeline is None else lifeline.fd

    def open(self, key: bytes) -> Memory:
        """Map more of the peer's memory."""
        memory = self._context.backend.open(key)
        self._opened.append(memory)
        return memory

    def locate(self, key: bytes) -> int:
        """No port."""
        raise TransportError("memory of devices is mapped: it has no port")

    def close(self) -> None:
        """Unmap."""
        while self._opened:
            self._opened.pop().close()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


def _decode(data: bytes) -> Address:
    try:
        return msgspec.msgpack.decode(data, type=Address)
    except msgspec.DecodeError as error:
        raise TransportError(f"a peer's device address is malformed: {error}") from error
