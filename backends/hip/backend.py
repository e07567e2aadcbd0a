"""The HIP backend."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from commrt.backend import Kernel, Memory, MemoryKind, Probe, Stream
from commrt.backends.hip.driver import Driver, probe
from commrt.backends.hip.kernel import THREADS, HipKernel, Modules
from commrt.backends.hip.memory import KINDS, Memories
from commrt.backends.hip.stream import HipStream
from commrt.devices import DeviceMemory
from commrt.errors import InvalidArgument, OperationError, TransportError


@dataclass(frozen=True)
class _Device:
    """What is made when a device is first asked for."""

    driver: Driver
    memories: Memories
    modules: Modules


class HipBackend:
    """Implements `commrt.backend.DeviceBackend` for the AMD GPU of this rank.

    All but `probe` raise Unavailable without one.

    Freeing memory waits for all kernels of the device: never while one waits for a peer that waits for this rank.
    """

    name = "hip"
    memory_kinds: tuple[MemoryKind, ...] = KINDS
    threads = THREADS

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: _Device | None = None

    def probe(self) -> Probe:
        """The GPUs, or what is missing: bindings, library or device."""
        return probe()

    def allocate(self, nbytes: int, kind: str | None = None, reserve: bool = False) -> Memory:
        """Device memory is always reserved."""
        found = next((known for known in KINDS if kind in (None, known.name)), None)
        if found is None:
            names = ", ".join(known.name for known in KINDS)
            raise InvalidArgument(f"the hip backend has no memory kind {kind!r}, only {names}")
        return self._opened().memories.allocate(nbytes, found)

    def export(self, memory: Memory) -> bytes:
        """An IPC handle, and where in its allocation `memory` lies. Raises InvalidArgument for pinned memory."""
        if not isinstance(memory, DeviceMemory):
            raise InvalidArgument("only memory of the hip backend can be exported by it")
        return self._opened().memories.export(memory)

    def open(self, exported: bytes) -> Memory:
        """Map the memory of another process of this host, on whatever GPU it is."""
        return self._opened().memories.open(exported)

    def copy(self, to: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        """Between device and host in any direction. Without a stream, returns when it is done."""
        if not nbytes:
            return
        if stream is not None and not isinstance(stream, HipStream):
            raise InvalidArgument("a copy of the hip backend runs on a stream of the hip backend")
        driver = self._opened().driver
        kind = driver.hip.hipMemcpyKind.hipMemcpyDefault
        if stream is not None:
            driver.call("hipMemcpyAsync", to, source, nbytes, kind, stream.handle)
            return
        with driver.finished() as queue:
            driver.call("hipMemcpyAsync", to, source, nbytes, kind, queue)

    def stream(self) -> HipStream:
        """A stream that waits for no other."""
        return HipStream(self._opened().driver)

    def build(self, source: str, symbol: str) -> Kernel:
        """Compile for this rank's GPU. Raises Unavailable without a compiler, InvalidArgument with its errors."""
        return self._opened().modules.kernel(source, symbol)

    def pin(self, address: int, nbytes: int) -> int:
        """Lock these pages and map them for the GPU."""
        driver = self._opened().driver
        flags = driver.hip.hipHostRegisterPortable | driver.hip.hipHostRegisterMapped
        try:
            driver.call("hipHostRegister", address, nbytes, flags)
            return int(driver.call("hipHostGetDevicePointer", address, 0))
        except (OperationError, MemoryError) as error:
            raise TransportError(f"{nbytes} bytes of host memory can't be pinned: {error}") from error

    def unpin(self, address: int) -> None:
        """Unlock them."""
        with contextlib.suppress(OperationError):  # of a device that has failed
            self._opened().driver.call("hipHostUnregister", address)

    def resident_blocks(self, kernel: Kernel) -> int:
        """As the driver computes it from the kernel's registers."""
        if not isinstance(kernel, HipKernel):
            raise InvalidArgument("only kernels of the hip backend can be on its device")
        return kernel.resident_blocks()

    def location(self) -> bytes:
        """The GPU's UUID."""
        return self._opened().driver.location()

    def reaches(self, location: bytes) -> bool:
        """Whether the runtime can map that GPU's memory for this one."""
        return self._opened().driver.reaches(location)

    def _opened(self) -> _Device:
        with self._lock:
            if self._device is None:
                driver = Driver.load()
                self._device = _Device(driver, Memories(driver), Modules(driver))
            return self._device
