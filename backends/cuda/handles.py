"""Memory of NVIDIA GPUs as cuMemAlloc gives it, shared by IPC handles."""

from __future__ import annotations

import ctypes

from commrt.backends.cuda.driver import Driver
from commrt.errors import OperationError, TransportError

_HANDLE_NBYTES = 64


class Handles:
    """Implements `commrt.backends.cuda.memory.Way`, on every device and driver.

    Drivers cut smaller allocations from pieces of `unit` bytes, and a handle opens the piece: with other memory in it.
    """

    export_nbytes = _HANDLE_NBYTES
    unit = 2 << 20

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def take(self, nbytes: int) -> int:
        """With what was left there."""
        return int(self._driver.call("cuMemAlloc", nbytes))

    def give_back(self, address: int) -> None:
        """Waits for all kernels of the device."""
        self._driver.attempt("cuMemFree", address)

    def export(self, address: int) -> bytes:
        """A handle of the whole."""
        handle = self._driver.call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), _HANDLE_NBYTES)

    def open(self, exported: bytes, nbytes: int) -> int:
        """Raises TransportError."""
        cuda = self._driver.cuda
        native = cuda.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), exported, _HANDLE_NBYTES)
        flags = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        try:
            address = int(self._driver.call("cuIpcOpenMemHandle", native, flags))
        except OperationError as error:
            raise TransportError(f"a peer's memory can't be opened: {error}") from error
        _, there = self._driver.call("cuMemGetAddressRange", address)
        if nbytes > there:
            self.unmap(address)
            raise TransportError(f"a peer exported {nbytes} bytes of memory that has {there}")
        return address

    def unmap(self, address: int) -> None:
        """What was opened."""
        self._driver.attempt("cuIpcCloseMemHandle", address)
