"""Memory of NVIDIA GPUs, and how processes share it."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import struct
import threading
from weakref import WeakValueDictionary

from commrt.backend import MemoryKind
from commrt.backends.cuda.driver import Driver
from commrt.devices import DeviceMemory
from commrt.errors import InvalidArgument, OperationError, TransportError

DEVICE = MemoryKind("device", "kernel")
PINNED = MemoryKind("pinned", "kernel")
KINDS = (DEVICE, PINNED)

# Drivers cut smaller allocations from pieces of this size, and a handle opens the piece: with other memory in it.
PIECE, PAGE = 2 << 20, 4096
_MOST_NBYTES = 1 << 62
_HANDLE_NBYTES = 64
_EXPORT = struct.Struct(f"<16sQQ{_HANDLE_NBYTES}s")  # process, address there, bytes, handle


class Memories:
    """The memory of this process on one device: what it allocated, and what it opened of others."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._process = secrets.token_bytes(16)
        self._own: WeakValueDictionary[int, DeviceMemory] = WeakValueDictionary()
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, kind: MemoryKind) -> DeviceMemory:
        """Zeroed, in whole pieces or pages. Raises MemoryError."""
        unit = PAGE if kind == PINNED else PIECE
        nbytes = max(1, -(-nbytes // unit)) * unit
        if nbytes >= _MOST_NBYTES:
            raise MemoryError(f"no NVIDIA GPU has {nbytes} bytes of memory")
        address = self._take_pinned(nbytes) if kind == PINNED else self._take(nbytes)
        memory = DeviceMemory(address, nbytes, kind, lambda: self._give_back(address, kind))
        with self._lock:
            self._own[address] = memory
        return memory

    def export(self, memory: DeviceMemory) -> bytes:
        """For `open`, in any process of this host."""
        with self._lock:
            own = self._own.get(memory.address) is memory
        if not own or memory.kind == PINNED:
            raise InvalidArgument("pinned memory, and memory that a peer allocated, can't be exported")
        handle = self._driver.call("cuIpcGetMemHandle", memory.address)
        raw = ctypes.string_at(handle.getPtr(), _HANDLE_NBYTES)
        return _EXPORT.pack(self._process, memory.address, memory.nbytes, raw)

    def open(self, exported: bytes) -> DeviceMemory:
        """A peer's, or this process's own, which the driver refuses to open. Raises TransportError."""
        if len(exported) != _EXPORT.size:
            raise TransportError(f"an export of NVIDIA GPU memory has {_EXPORT.size} bytes, not {len(exported)}")
        process, address, nbytes, handle = _EXPORT.unpack(exported)
        return self._held(address) if process == self._process else self._map(handle, nbytes)

    def _take(self, nbytes: int) -> int:
        address = int(self._driver.call("cuMemAlloc", nbytes))
        with self._driver.finished() as stream:
            self._driver.call("cuMemsetD8Async", address, 0, nbytes, stream)
        return address

    def _take_pinned(self, nbytes: int) -> int:
        cuda = self._driver.cuda
        flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self._driver.call("cuMemHostAlloc", nbytes, flags))
        ctypes.memset(address, 0, nbytes)
        return address

    def _give_back(self, address: int, kind: MemoryKind) -> None:
        with self._lock:
            self._own.pop(address, None)
        with contextlib.suppress(OperationError):  # of a device that has failed
            self._driver.call("cuMemFreeHost" if kind == PINNED else "cuMemFree", address)

    def _held(self, address: int) -> DeviceMemory:
        with self._lock:
            memory = self._own.get(address)
        if memory is None:
            raise TransportError("memory of this process that it no longer holds was to be opened")
        return memory.retain()

    def _map(self, handle: bytes, nbytes: int) -> DeviceMemory:
        cuda = self._driver.cuda
        native = cuda.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), handle, _HANDLE_NBYTES)
        flags = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        try:
            address = int(self._driver.call("cuIpcOpenMemHandle", native, flags))
        except OperationError as error:
            raise TransportError(f"a peer's memory can't be opened: {error}") from error
        _, there = self._driver.call("cuMemGetAddressRange", address)
        if nbytes > there:
            self._unmap(address)
            raise TransportError(f"a peer exported {nbytes} bytes of memory that has {there}")
        return DeviceMemory(address, nbytes, DEVICE, lambda: self._unmap(address))

    def _unmap(self, address: int) -> None:
        with contextlib.suppress(OperationError):  # of a device that has failed
            self._driver.call("cuIpcCloseMemHandle", address)
