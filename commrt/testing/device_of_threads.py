"""A device that is threads of this process over host memory: plans run in it as kernels, with nothing of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.backend import Backend, Kernel, Memory, MemoryKind, Probe, Stream
from commrt.errors import TransportError
from commrt.plugins import Plugin, Registry, default_registry, discover
from commrt.transport import Connection, Context, Endpoint, Exchange, Reach, Transport

DEVICE, PINNED = MemoryKind("device", "kernel"), MemoryKind("pinned", "kernel")


class ThreadsBackend:
    """Implements `commrt.backend.DeviceBackend`. `pinned`: what is pinned now."""

    memory_kinds = (DEVICE, PINNED)
    threads = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.pinned: list[int] = []
        self._host: Backend = default_registry().require("backends", "cpu")

    def probe(self) -> Probe:
        return Probe(("threads",), level="threads as a device")

    def allocate(self, nbytes: int, kind: str | None = None, reserve: bool = False) -> Memory:
        return self._host.allocate(nbytes)

    def export(self, memory: Memory) -> bytes:
        return self._host.export(memory)

    def open(self, exported: bytes) -> Memory:
        return self._host.open(exported)

    def copy(self, to: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        self._host.copy(to, source, nbytes, stream)

    def stream(self) -> Stream:
        return self._host.stream()

    def build(self, source: str, symbol: str) -> Kernel:
        return self._host.build(f'#define CR_SPIN 1\n#include "kernel.h"\n{source}', symbol)

    def pin(self, address: int, nbytes: int) -> int:
        self.pinned.append(address)
        return address

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def resident_blocks(self, kernel: Kernel) -> int:
        return 64


class ThreadsLink(Transport):
    """Joins the memory of devices of one name, within this process or between processes."""

    def __init__(self, backend: str) -> None:
        self.name, self.backends = f"{backend}_link", (backend,)

    def probe(self) -> Probe:
        return Probe(("this host",))

    def open(self, context: Context) -> Endpoint:
        return ThreadsEndpoint(context, self.name)


class ThreadsEndpoint(Endpoint):
    def __init__(self, context: Context, name: str) -> None:
        self._context, self._opened = context, list[Memory]()
        self.address = name.encode()

    def reach(self, rank: int, address: bytes) -> Reach | None:
        return Reach(0.1, 100.0) if address == self.address else None

    def register(self, memory: Memory) -> bytes:
        return self._context.backend.export(memory)

    def connect(self, rank: int, address: bytes, key: bytes) -> Connection:
        memory = self._context.backend.open(key)
        self._opened.append(memory)
        return ThreadsConnection(memory)

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        return frozenset()

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class ThreadsConnection(Connection):
    port = direct = None
    life = -1

    def __init__(self, memory: Memory) -> None:
        self.mapped = memory.address

    def open(self, key: bytes) -> Memory:
        raise TransportError("only the memory that scratch lies in is joined")

    def locate(self, key: bytes) -> int:
        raise TransportError("it is mapped: it has no port")

    def close(self) -> None:
        """Its endpoint holds the memory."""


def registry(*names: str) -> Registry:
    """All that is installed, and devices of these names, each with a link of its own."""
    extra: list[Plugin] = []
    for name in names:
        extra.append(_plugin("backends", name, ThreadsBackend(name)))
        extra.append(_plugin("transports", f"{name}_link", ThreadsLink(name)))
    return Registry([*discover(), *extra])


def _plugin(kind: Any, name: str, loaded: Any) -> Plugin:
    plugin = Plugin(kind, name, "commrt.testing", "commrt.testing")
    plugin._loaded = loaded
    return plugin
