"""Conformance of a backend: memory, streams, events, and kernels of users.

BackendSuite("cpu").run_all()
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from commrt.backend import Backend, DeviceBackend, Kernel, Memory, Probe
from commrt.errors import InvalidArgument, TransportError, Unavailable
from commrt.plugins import Registry, default_registry
from commrt.testing._conformance import Suite, expect, expect_raises

_PAGE = 4096
_SOON_S, _LONG_S = 0.05, 20.0
KERNEL = """
#include "kernel.h"
CR_KERNEL count(u64* out, u64 step, double scale) {
  u64 block = commrt::block_id();
  if (commrt::tid() == 0) out[block] = (u64)(step * scale) * block + commrt::nblocks();
}
"""


class BackendSuite(Suite):
    """Checks of the backend of that name, on its first device."""

    def __init__(self, name: str, *, registry: Registry | None = None) -> None:
        self.subject = f"backend {name}"
        self._name = name
        self._backend: Backend = (registry or default_registry()).require("backends", name)

    def check_probe(self) -> None:
        for _ in range(2):
            found = self._backend.probe()
            expect(isinstance(found, Probe), f"probe answered {found!r}")
            expect(bool(found.devices) != bool(found.reason), "a probe has devices, or a reason why not")
        expect(self._backend.name == self._name, f"it calls itself {self._backend.name!r}")

    def check_kinds(self) -> None:
        kinds = self._backend.memory_kinds
        expect(kinds, "it has no memory kind")
        expect(len({kind.name for kind in kinds}) == len(kinds), "two memory kinds have one name")
        for kind in kinds:
            expect(kind.coherence in ("kernel", "launch"), f"{kind.name} has coherence {kind.coherence!r}")
            memory = self._backend.allocate(100, kind.name)
            expect(memory.kind == kind, f"memory of kind {kind.name} says it is {memory.kind.name}")
            memory.close()
        memory = self._backend.allocate(100)
        expect(memory.kind == kinds[0], "the kind that nobody asked for is not the first")
        memory.close()
        expect_raises(InvalidArgument, lambda: self._backend.allocate(100, "no such kind"))

    def check_allocate(self) -> None:
        for nbytes in (1, _PAGE - 1, _PAGE, 3 * _PAGE + 7):
            for reserve in (False, True):
                memory = self._backend.allocate(nbytes, reserve=reserve)
                expect(memory.nbytes >= nbytes, f"{memory.nbytes} bytes where {nbytes} were asked for")
                expect(memory.address % _PAGE == 0, "memory is not page-aligned")
                expect(self._read(memory, nbytes) == bytes(nbytes), "memory is not zeroed")
                memory.close()
        expect_raises(MemoryError, lambda: self._backend.allocate(1 << 60))

    def check_export(self) -> None:
        """One memory at two addresses, until the last holder of each has let go."""
        memory = self._backend.allocate(5000)
        there = self._backend.open(self._backend.export(memory))
        expect(there.nbytes == memory.nbytes, f"what was opened has {there.nbytes} bytes, not {memory.nbytes}")
        self._write(memory, b"from here")
        expect(self._read(there, 9) == b"from here", "what the owner writes does not show where it is opened")
        self._write(there, b"from there")
        expect(self._read(memory, 10) == b"from there", "what is written where it is opened does not show")
        memory.close()
        expect(self._read(there, 10) == b"from there", "it is gone where it is open, as its owner has closed it")
        there.close()

    def check_open_malformed(self) -> None:
        memory = self._backend.allocate(5000)
        exported = self._backend.export(memory)
        for other in (b"", b"garbage", exported[:-1], exported + b"\0", bytes(len(exported))):
            expect_raises(TransportError, lambda: self._backend.open(other))  # noqa: B023
        memory.close()

    def check_holders(self) -> None:
        memory = self._backend.allocate(5000)
        expect(memory.retain() is memory, "retain does not return the memory")
        memory.close()
        self._write(memory, b"held")
        expect(self._read(memory, 4) == b"held", "memory is gone that one holder has not let go of")
        memory.close()

    def check_copy(self) -> None:
        source, target = self._backend.allocate(1 << 20), self._backend.allocate(1 << 20)
        content = os.urandom(100_003)
        self._write(source, content)
        self._backend.copy(target.address + 13, source.address, len(content))
        expect(self._read(target, 13 + len(content)) == bytes(13) + content, "a copy is not what was copied")
        stream = self._backend.stream()
        self._backend.copy(target.address, source.address + 1, 1000, stream)
        stream.synchronize()
        expect(self._read(target, 1000) == content[1:1001], "a copy on a stream is not what was copied")
        source.close()
        target.close()

    def check_stream_order(self) -> None:
        stream, order, gate = self._backend.stream(), [], threading.Event()
        first = stream.submit(lambda: gate.wait(_LONG_S))
        events = [stream.submit(lambda number=number: order.append(number)) for number in range(50)]  # type: ignore[misc]
        behind = stream.record()
        expect(not first.done() and not behind.done(), "an event has passed before what it stands behind")
        expect(not behind.wait(_SOON_S), "a wait with a timeout has not timed out")
        gate.set()
        expect(behind.wait(_LONG_S), "an event never passes")
        expect(order == list(range(50)) and all(event.done() for event in events), f"work was done as {order}")
        stream.synchronize()

    def check_stream_waits_for_events(self) -> None:
        one, other, done, gate = self._backend.stream(), self._backend.stream(), [], threading.Event()
        one.submit(lambda: gate.wait(_LONG_S))
        one.submit(lambda: done.append("one"))
        other.wait_event(one.record())
        last = other.submit(lambda: done.append("other"))
        expect(not last.wait(_SOON_S), "a stream did not wait for another's event")
        gate.set()
        expect(last.wait(_LONG_S) and done == ["one", "other"], f"work was done as {done}")

    def check_stream_errors(self) -> None:
        """The first error comes once; what follows is done all the same."""
        stream, done = self._backend.stream(), []

        def fail(message: str) -> None:
            raise OSError(message)

        stream.submit(lambda: fail("first"))
        stream.submit(lambda: fail("second"))
        stream.submit(lambda: done.append(1))
        try:
            stream.synchronize()
        except OSError as error:
            expect(str(error) == "first", f"synchronize raised {error} before the first error")
        else:
            expect(False, "synchronize did not raise the error of the stream's work")
        expect(done == [1], "work behind an error was not done")
        stream.synchronize()

    def check_kernels(self) -> str | None:
        try:
            kernel = self._backend.build(KERNEL, "count")
        except Unavailable as error:
            return str(error)
        memory = self._backend.allocate(64)
        arguments = (ctypes.c_void_p(memory.address), ctypes.c_uint64(10), ctypes.c_double(2.5))
        for blocks, stream in ((1, None), (4, None), (3, self._backend.stream())):
            kernel.launch(blocks, arguments, stream)
            if stream is not None:
                stream.synchronize()
            out = (ctypes.c_uint64 * blocks).from_buffer_copy(self._read(memory, 8 * blocks))
            expect(list(out) == [25 * block + blocks for block in range(blocks)], f"{blocks} blocks wrote {list(out)}")
        memory.close()
        expect_raises(InvalidArgument, lambda: kernel.launch(0, arguments))
        return None

    def check_host_memory_in_kernels(self) -> str | None:
        """Of a device: memory that it pinned, and memory of others that it let its kernels at."""
        if not isinstance(self._backend, DeviceBackend):
            return "its memory is the host's"
        try:
            kernel = self._backend.build(KERNEL, "count")
        except Unavailable as error:
            return str(error)
        expect(self._backend.resident_blocks(kernel) > 0, "no block of a kernel fits the device")
        pinned = self._backend.allocate(_PAGE, "pinned")
        self._count(kernel, pinned.address, pinned.address)
        pinned.close()
        with mmap.mmap(-1, 2 * _PAGE) as region:
            word = ctypes.c_uint64.from_buffer(region)
            at = ctypes.addressof(word)
            self._count(kernel, at, self._backend.pin(at, 2 * _PAGE))
            self._backend.unpin(at)
            del word
        return None

    def _count(self, kernel: Kernel, host: int, device: int) -> None:
        """Three blocks write there, and the host reads what they wrote."""
        kernel.launch(3, (ctypes.c_void_p(device), ctypes.c_uint64(10), ctypes.c_double(2.5)))
        expect(list((ctypes.c_uint64 * 3).from_address(host)) == [3, 28, 53], "a kernel did not write to host memory")

    def check_kernel_errors(self) -> str | None:
        try:
            self._backend.build(KERNEL, "count")
        except Unavailable as error:
            return str(error)
        for source, symbol in ((KERNEL, "missing"), ("not C++", "count"), ("int x;", "x")):
            expect_raises(InvalidArgument, lambda: self._backend.build(source, symbol))  # noqa: B023
        return None

    def _read(self, memory: Memory, nbytes: int) -> bytes:
        """Through host memory, whatever the device."""
        buffer = ctypes.create_string_buffer(nbytes)
        self._backend.copy(ctypes.addressof(buffer), memory.address, nbytes)
        return buffer.raw

    def _write(self, memory: Memory, content: bytes) -> None:
        buffer = ctypes.create_string_buffer(content, len(content))
        self._backend.copy(memory.address, ctypes.addressof(buffer), len(content))
