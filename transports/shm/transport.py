"""Shared memory: each rank maps every peer's segment by its export; nothing has a name in the file system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from commrt.backend import Memory, MemoryKind, Probe
from commrt.errors import TransportError
from commrt.native import ffi, lib
from commrt.transport import Context, Exchange, Reach

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHECK_NBYTES = 64  # of the segment, read through process_vm_readv when connecting


class Address(msgspec.Struct, frozen=True):
    """Where an endpoint is: the booted system, its pid namespace, its user and process."""

    boot: str
    namespace: int
    uid: int
    pid: int


class Key(msgspec.Struct, frozen=True):
    """What opens a registered memory: the backend's export, and where it lies in its owner."""

    exported: bytes
    address: int


class ShmTransport:
    """Implements `commrt.transport.Transport`."""

    name = "shm"
    backends = ("cpu",)
    groups = False
    memory_kinds: tuple[MemoryKind, ...] = ()

    def probe(self) -> Probe:
        """Needs /proc and anonymous files."""
        if not _BOOT_ID.exists():
            return Probe(reason="/proc is not mounted")
        return Probe(devices=("this host",)) if hasattr(os, "memfd_create") else Probe(reason="no anonymous files")

    def open(self, context: Context) -> ShmEndpoint:
        """An endpoint of this process."""
        return ShmEndpoint(context)


class ShmEndpoint:
    """Implements `commrt.transport.Endpoint`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        namespace = os.stat("/proc/self/ns/pid").st_ino
        self._own = Address(_BOOT_ID.read_text().strip(), namespace, os.geteuid(), os.getpid())
        self.address = msgspec.msgpack.encode(self._own)
        self._connections: list[ShmConnection] = []

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """Same host, same pid namespace, same user."""
        peer = _decode(address, Address)
        same = (peer.boot, peer.namespace, peer.uid) == (self._own.boot, self._own.namespace, self._own.uid)
        return Reach(latency_us=0.15, bandwidth_gbps=10.0) if same else None

    def register(self, memory: Memory) -> bytes:
        """The backend's export is the key."""
        return msgspec.msgpack.encode(Key(self._context.backend.export(memory), memory.address))

    def connect(self, rank: int, address: bytes, key: bytes) -> ShmConnection:
        """Map the peer's segment."""
        peer = _decode(address, Address)
        connection = ShmConnection(self._context, peer.pid, _decode(key, Key), own_process=peer.pid == self._own.pid)
        self._connections.append(connection)
        return connection

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """Shared memory has no switch."""
        return frozenset()

    def close(self) -> None:
        """Unmap all."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()


class ShmConnection:
    """Implements `commrt.transport.Connection`: mapped, with a direct port if the kernel lets us read the peer."""

    def __init__(self, context: Context, pid: int, key: Key, own_process: bool) -> None:
        self._context = context
        self._segment = context.backend.open(key.exported)
        self._opened = [self._segment]
        self.mapped: int | None = self._segment.address
        self.port = None
        self.direct = ffi.new("cr_port*")
        if own_process:
            lib.cr_port_same_process(self.direct)
        else:
            lib.cr_port_process_vm(self.direct, pid)
            if not self._can_read(key.address):
                self.direct = None
        self.life: int = -1 if own_process else getattr(self._segment, "fd", -1)

    def open(self, key: bytes) -> Memory:
        """Map more of the peer's memory."""
        memory = self._context.backend.open(_decode(key, Key).exported)
        self._opened.append(memory)
        return memory

    def locate(self, key: bytes) -> int:
        """No port."""
        raise TransportError("shared memory is mapped: it has no port")

    def close(self) -> None:
        """Unmap."""
        for memory in self._opened:
            memory.close()
        self._opened.clear()

    def _can_read(self, address: int) -> bool:
        """Whether the kernel lets this process read the peer's memory; a security module may forbid it."""
        seen = ffi.new("char[]", _CHECK_NBYTES)
        return bool(self.direct.get(self.direct.context, seen, address, _CHECK_NBYTES) == 1)


_Record = TypeVar("_Record", Address, Key)


def _decode(data: bytes, kind: type[_Record]) -> _Record:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError(f"a peer's shm {kind.__name__.lower()} is malformed: {error}") from error
