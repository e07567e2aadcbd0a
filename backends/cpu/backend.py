"""The CPU backend."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable

from commrt.backend import Kernel, Memory, MemoryKind, Probe, Stream
from commrt.backends.cpu.kernel import CpuKernel
from commrt.backends.cpu.memory import HOST, SharedMemory
from commrt.backends.cpu.stream import CpuStream
from commrt.errors import InvalidArgument, TransportError


class CpuBackend:
    """Implements `commrt.backend.Backend` for this machine's own processors."""

    name = "cpu"
    memory_kinds: tuple[MemoryKind, ...] = (HOST,)

    def probe(self) -> Probe:
        """One device: the machine."""
        return Probe(devices=(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cpus",), level="CPU")

    def allocate(self, nbytes: int, kind: str | None = None, reserve: bool = False) -> Memory:
        """Zeroed memory in an anonymous file. `reserve`: all pages now, so that touching it later can't fail."""
        if kind not in (None, HOST.name):
            raise InvalidArgument(f"the cpu backend has no memory kind {kind!r}, only {HOST.name!r}")
        return SharedMemory.create(nbytes, reserve)

    def export(self, memory: Memory) -> bytes:
        """Process, descriptor, inode and size of the file behind `memory`."""
        if not isinstance(memory, SharedMemory):
            raise InvalidArgument("only memory of the cpu backend can be exported by it")
        return memory.exported()

    def open(self, exported: bytes) -> Memory:
        """Map the memory of another process of the same user on this host."""
        try:
            return SharedMemory.open(exported)
        except (OSError, ValueError) as error:
            raise TransportError(f"can't map a peer's memory: {error}") from error

    def copy(self, to: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        """memmove; on a stream, when its turn comes."""
        move: Callable[[], object] = lambda: ctypes.memmove(to, source, nbytes)  # noqa: E731
        if stream is None:
            move()
        else:
            stream.submit(move)

    def stream(self) -> Stream:
        """A queue with a thread of its own."""
        return CpuStream()

    def build(self, source: str, symbol: str) -> Kernel:
        """Compile C++17 source. Raises Unavailable without a compiler on this host, InvalidArgument with its errors."""
        return CpuKernel.build(source, symbol)
