"""Memory of NVIDIA GPUs made piece by piece, and shared by descriptors: the only kind that switches act on."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from commrt.backends.cuda.driver import Driver
from commrt.devices import export_descriptor, passes_descriptors, take_descriptor
from commrt.errors import OperationError, TransportError


class Pieces:
    """Implements `commrt.backends.cuda.memory.Way`, where `serves` says so."""

    export_nbytes = len(export_descriptor(0))

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kind = driver.cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._held: dict[int, contextlib.ExitStack] = {}  # by address: how to give it back
        self._made: dict[int, Any] = {}  # by address: the driver's handle
        self._exported: dict[int, bytes] = {}
        self.unit = self._granularity() if self.serves() else 1

    def serves(self) -> bool:
        """Whether device, driver and kernel let processes share such memory."""
        names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        return all(self._driver.attribute(name) for name in names) and passes_descriptors()

    def take(self, nbytes: int) -> int:
        """With what was left there."""
        handle = self._driver.call("cuMemCreate", nbytes, self._properties(), 0)
        address = self._map(handle, nbytes)
        self._made[address] = handle
        return address

    def give_back(self, address: int) -> None:
        """Waits for all kernels of the device: to unmap does not."""
        self._made.pop(address, None)
        self._exported.pop(address, None)
        self._driver.attempt("cuCtxSynchronize")
        self._held.pop(address).close()

    def export(self, address: int) -> bytes:
        """A descriptor, which lives as long as the memory."""
        if address not in self._exported:
            fd = int(self._driver.call("cuMemExportToShareableHandle", self._made[address], self._kind, 0))
            os.set_inheritable(fd, False)
            self._held[address].callback(os.close, fd)
            self._exported[address] = export_descriptor(fd)
        return self._exported[address]

    def open(self, exported: bytes, nbytes: int) -> int:
        """The driver refuses to map more than there is. Raises TransportError."""
        if not nbytes or nbytes % self.unit:
            raise TransportError(f"a peer exported {nbytes} bytes of memory: no multiple of {self.unit}")
        fd = take_descriptor(exported)
        try:
            return self._map(self._driver.call("cuMemImportFromShareableHandle", fd, self._kind), nbytes)
        except (OperationError, MemoryError) as error:
            raise TransportError(f"a peer's {nbytes} bytes of memory can't be opened: {error}") from error
        finally:
            os.close(fd)

    def unmap(self, address: int) -> None:
        """What was opened."""
        self.give_back(address)

    def _map(self, handle: Any, nbytes: int) -> int:
        """For this device's kernels, until it is given back. The handle is released in any case."""
        call, attempt = self._driver.call, self._driver.attempt
        with contextlib.ExitStack() as undo:
            undo.callback(attempt, "cuMemRelease", handle)
            address = int(call("cuMemAddressReserve", nbytes, self.unit, 0, 0))
            undo.callback(attempt, "cuMemAddressFree", address, nbytes)
            call("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(attempt, "cuMemUnmap", address, nbytes)
            call("cuMemSetAccess", address, nbytes, [self._access()], 1)
            self._held[address] = undo.pop_all()
        return address

    def _granularity(self) -> int:
        """Of allocations, and of what binds them."""
        cuda, properties = self._driver.cuda, self._properties()
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(self._driver.call("cuMemGetAllocationGranularity", properties, least))
        if not self._driver.attribute("MULTICAST_SUPPORTED"):
            return unit
        group = cuda.CUmulticastObjectProp()
        group.numDevices, group.size, group.handleTypes = 2, unit, self._kind
        error, found = self._driver.attempt(
            "cuMulticastGetGranularity", group, cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        )
        return unit if int(error) else max(unit, int(found))

    def _properties(self) -> Any:
        properties = self._driver.cuda.CUmemAllocationProp()
        properties.type = self._driver.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        properties.requestedHandleTypes = self._kind
        return properties

    def _access(self) -> Any:
        access = self._driver.cuda.CUmemAccessDesc()
        access.location = self._location()
        access.flags = self._driver.cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _location(self) -> Any:
        location = self._driver.cuda.CUmemLocation()
        location.type = self._driver.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._driver.device
        return location
