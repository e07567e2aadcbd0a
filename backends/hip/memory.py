"""Memory of AMD GPUs, and how processes share it."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import struct
import threading
from weakref import WeakValueDictionary

from commrt.backend import MemoryKind
from commrt.backends.hip.driver import Driver
from commrt.devices import DeviceMemory
from commrt.errors import InvalidArgument, OperationError, TransportError

FINE = MemoryKind("fine", "kernel")  # past the caches: peers' writes are seen while a kernel runs
COARSE = MemoryKind("coarse", "launch")
PINNED = MemoryKind("pinned", "kernel")
KINDS = (FINE, COARSE, PINNED)

PAGE = 4096
_UNCACHED = 3  # hipDeviceMallocUncached, which the bindings leave out
_HANDLE_NBYTES = 64
_EXPORT = struct.Struct(f"<16sQQQB{_HANDLE_NBYTES}s")  # process, address there, offset, bytes, kind, handle


class Memories:
    """The memory of this process on one device: what it allocated, and what it opened of others."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._process = secrets.token_bytes(16)
        self._own: WeakValueDictionary[int, DeviceMemory] = WeakValueDictionary()
        self._bases: dict[int, int] = {}  # of what was allocated, by the address that was handed out
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, kind: MemoryKind) -> DeviceMemory:
        """Zeroed, whole pages. Raises MemoryError."""
        nbytes = max(1, -(-nbytes // PAGE)) * PAGE
        if nbytes >= 1 << 62:
            raise MemoryError(f"no AMD GPU has {nbytes} bytes of memory")
        base = self._take(nbytes + PAGE, kind)  # the driver promises less than a page's alignment
        address = -(-base // PAGE) * PAGE
        memory = DeviceMemory(address, nbytes, kind, lambda: self._give_back(address, kind))
        with self._lock:
            self._own[address], self._bases[address] = memory, base
        with self._driver.finished() as stream:
            self._driver.call("hipMemsetAsync", address, 0, nbytes, stream)
        return memory

    def export(self, memory: DeviceMemory) -> bytes:
        """For `open`, in any process of this host."""
        with self._lock:
            base = self._bases.get(memory.address)
        if base is None or memory.kind == PINNED:
            raise InvalidArgument("pinned memory, and memory that a peer allocated, can't be exported")
        handle = self._driver.call("hipIpcGetMemHandle", base)
        raw = ctypes.string_at(int(handle), _HANDLE_NBYTES)
        kind = KINDS.index(memory.kind)
        return _EXPORT.pack(self._process, memory.address, memory.address - base, memory.nbytes, kind, raw)

    def open(self, exported: bytes) -> DeviceMemory:
        """A peer's, or this process's own, which the driver refuses to open. Raises TransportError."""
        if len(exported) != _EXPORT.size:
            raise TransportError(f"an export of AMD GPU memory has {_EXPORT.size} bytes, not {len(exported)}")
        process, address, offset, nbytes, kind, handle = _EXPORT.unpack(exported)
        if kind >= len(KINDS):
            raise TransportError(f"a peer exported memory of unknown kind {kind}")
        if process == self._process:
            return self._held(address)
        return self._map(handle, offset, nbytes, KINDS[kind])

    def _take(self, nbytes: int, kind: MemoryKind) -> int:
        hip = self._driver.hip
        if kind == PINNED:
            flags = hip.hipHostMallocPortable | hip.hipHostMallocMapped | hip.hipHostMallocCoherent
            return int(self._driver.call("hipHostMalloc", nbytes, flags))
        if kind == FINE:
            return int(self._driver.call("hipExtMallocWithFlags", nbytes, _UNCACHED))
        return int(self._driver.call("hipMalloc", nbytes))

    def _give_back(self, address: int, kind: MemoryKind) -> None:
        with self._lock:
            base = self._bases.pop(address)
        with contextlib.suppress(OperationError):  # of a device that has failed
            self._driver.call("hipHostFree" if kind == PINNED else "hipFree", base)

    def _held(self, address: int) -> DeviceMemory:
        with self._lock:
            memory = self._own.get(address) if address in self._bases else None
        if memory is None:
            raise TransportError("memory of this process that it no longer holds was to be opened")
        return memory.retain()

    def _map(self, handle: bytes, offset: int, nbytes: int, kind: MemoryKind) -> DeviceMemory:
        hip = self._driver.hip
        native = hip.hipIpcMemHandle_t()
        ctypes.memmove(int(native), handle, _HANDLE_NBYTES)
        try:
            base = int(self._driver.call("hipIpcOpenMemHandle", native, hip.hipIpcMemLazyEnablePeerAccess))
        except OperationError as error:
            raise TransportError(f"a peer's memory can't be opened: {error}") from error
        _, there = self._driver.call("hipMemGetAddressRange", base)
        if offset > there or nbytes > there - offset:
            self._unmap(base)
            raise TransportError(f"a peer exported {nbytes} bytes at {offset} of memory that has {there}")
        return DeviceMemory(base + offset, nbytes, kind, lambda: self._unmap(base))

    def _unmap(self, base: int) -> None:
        with contextlib.suppress(OperationError):  # of a device that has failed
            self._driver.call("hipIpcCloseMemHandle", base)
