"""Memory of NVIDIA GPUs, and how processes share it."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import struct
import threading
from typing import Protocol
from weakref import WeakValueDictionary

from commrt.backend import MemoryKind
from commrt.backends.cuda.driver import Driver
from commrt.backends.cuda.handles import Handles
from commrt.backends.cuda.pieces import Pieces
from commrt.devices import DeviceMemory
from commrt.errors import InvalidArgument, OperationError, TransportError

DEVICE = MemoryKind("device", "kernel")
PINNED = MemoryKind("pinned", "kernel")
KINDS = (DEVICE, PINNED)

PAGE = 4096
_MOST_NBYTES = 1 << 62
_EXPORT = struct.Struct("<16sQQ")  # process, address there, bytes; behind it what the way of sharing exports


class Way(Protocol):
    """A way to make and share device memory, in whole units. What it exports has `export_nbytes` bytes.

    An unexpected error of the driver is an OperationError, one for want of memory a MemoryError.
    """

    export_nbytes: int
    unit: int

    def take(self, nbytes: int) -> int:
        """The address of new memory."""

    def give_back(self, address: int) -> None:
        """What was taken. Never raises."""

    def export(self, address: int) -> bytes:
        """For `open`, in another process of this host."""

    def open(self, exported: bytes, nbytes: int) -> int:
        """The address of a peer's memory. Raises TransportError."""

    def unmap(self, address: int) -> None:
        """What was opened. Never raises."""


class Memories:
    """The memory of this process on one device: what it allocated, and what it opened of others."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        handles, pieces = Handles(driver), Pieces(driver)
        self._way: Way = pieces if pieces.serves() else handles
        self._ways: dict[int, Way] = {way.export_nbytes: way for way in (handles, pieces)}
        self._process = secrets.token_bytes(16)
        self._own: WeakValueDictionary[int, DeviceMemory] = WeakValueDictionary()
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, kind: MemoryKind) -> DeviceMemory:
        """Zeroed, in whole units or pages. Raises MemoryError."""
        unit = PAGE if kind == PINNED else self._way.unit
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
        header = _EXPORT.pack(self._process, memory.address, memory.nbytes)
        return header + self._way.export(memory.address)

    def open(self, exported: bytes) -> DeviceMemory:
        """A peer's, or this process's own, which the driver refuses to open. Raises TransportError."""
        way = self._ways.get(len(exported) - _EXPORT.size)
        if way is None:
            raise TransportError(f"an export of NVIDIA GPU memory does not have {len(exported)} bytes")
        process, address, nbytes = _EXPORT.unpack_from(exported)
        if process == self._process:
            return self._held(address)
        if nbytes >= _MOST_NBYTES:
            raise TransportError(f"no NVIDIA GPU has {nbytes} bytes of memory")
        opened = way.open(exported[_EXPORT.size :], nbytes)
        return DeviceMemory(opened, nbytes, DEVICE, lambda: way.unmap(opened))

    def _take(self, nbytes: int) -> int:
        address = self._way.take(nbytes)
        try:
            with self._driver.finished() as stream:
                self._driver.call("cuMemsetD8Async", address, 0, nbytes, stream)
        except OperationError:
            self._way.give_back(address)
            raise
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
        if kind != PINNED:
            self._way.give_back(address)
            return
        with contextlib.suppress(OperationError):  # of a device that has failed
            self._driver.call("cuMemFreeHost", address)

    def _held(self, address: int) -> DeviceMemory:
        with self._lock:
            memory = self._own.get(address)
        if memory is None:
            raise TransportError("memory of this process that it no longer holds was to be opened")
        return memory.retain()
