"""A multicast object, as one of the GPUs that it joins sees it: the calls of the CUDA driver for that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from commrt.backend import Memory
from commrt.devices import export_descriptor, take_descriptor
from commrt.errors import Unavailable

FIRST_VERSION = 12010  # of a driver with multicast objects


def bindings() -> Any:
    """cuda.bindings.driver. Raises ImportError."""
    from cuda.bindings import driver

    untyped: Any = driver
    return untyped


def able_devices(cuda: Any) -> list[int]:
    """The devices that support multicast. Raises Unavailable."""
    call(cuda, "cuInit", 0)
    if (version := call(cuda, "cuDriverGetVersion")) < FIRST_VERSION:
        raise Unavailable(f"the CUDA driver ({version}) is older than multicast objects ({FIRST_VERSION})")
    kind = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    found = range(call(cuda, "cuDeviceGetCount"))
    return [device for device in found if call(cuda, "cuDeviceGetAttribute", kind, device)]


def call(cuda: Any, name: str, *arguments: Any) -> Any:
    """The result. Raises Unavailable."""
    try:
        error, *results = getattr(cuda, name)(*arguments)
    except RuntimeError as missing:  # from the driver
        raise Unavailable(f"{name}: {missing}") from missing
    if int(error):
        raise Unavailable(f"{name}: {error.name}")
    return results[0] if results else None


class Team:
    """Made by one member; then all add their device, bind their memory, and map the object.

    A driver may wait in each step until all members have done the one before: they agree in between. Each step puts
    into `undo` what it did, and raises Unavailable or TransportError. It calls nothing before `begin`.
    """

    def __init__(self, memory: Memory, undo: contextlib.ExitStack) -> None:
        self._memory, self._undo = memory, undo
        self._cuda: Any = None
        self._context: Any = None
        self._object: Any = None
        self._device = -1
        self.multicast = 0  # the address at which kernels find the memory of all, once it is mapped

    def begin(self, location: bytes) -> None:
        """On the GPU with that UUID, whose memory it is."""
        self._cuda = cuda = bindings()
        self._device = self._find(location)
        self._context = call(cuda, "cuDevicePrimaryCtxRetain", self._device)
        self._undo.callback(cuda.cuDevicePrimaryCtxRelease, self._device)
        least = cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        unit = int(self._call("cuMulticastGetGranularity", self._properties(2), least))
        if self._memory.nbytes % unit or self._memory.address % unit:
            raise Unavailable(f"memory that is not made of pieces of {unit} bytes can't be bound")

    def make(self, members: int) -> bytes:
        """The object itself; answers what the others' `add` takes."""
        self._hold(self._call("cuMulticastCreate", self._properties(members)))
        fd = int(self._call("cuMemExportToShareableHandle", self._object, self._handle_type(), 0))
        self._undo.callback(os.close, fd)
        os.set_inheritable(fd, False)
        return export_descriptor(fd)

    def add(self, exported: bytes | None) -> None:
        """This device, to the object of this member, or to what another one has exported."""
        if exported is not None:
            self._join(exported)
        self._call("cuMulticastAddDevice", self._object, self._device)

    def bind(self) -> None:
        """This device's memory, by its address: whether it can be bound, the driver knows."""
        nbytes = self._memory.nbytes
        self._call("cuMulticastBindAddr", self._object, 0, self._memory.address, nbytes, 0)
        self._undo.callback(self._attempt, "cuMulticastUnbind", self._object, self._device, 0, nbytes)

    def map(self) -> None:
        """It may be used once all members have bound theirs."""
        nbytes = self._memory.nbytes
        address = int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))
        self._undo.callback(self._attempt, "cuMemAddressFree", address, nbytes)
        self._call("cuMemMap", address, nbytes, 0, self._object, 0)
        self._undo.callback(self._attempt, "cuMemUnmap", address, nbytes)
        self._call("cuMemSetAccess", address, nbytes, [self._access()], 1)
        self.multicast = address

    def _find(self, location: bytes) -> int:
        for device in able_devices(self._cuda):
            if bytes(call(self._cuda, "cuDeviceGetUuid", device).bytes) == location:
                return device
        raise Unavailable("its GPU does not support multicast")

    def _join(self, exported: bytes) -> None:
        fd = take_descriptor(exported)
        try:
            self._hold(self._call("cuMemImportFromShareableHandle", fd, self._handle_type()))
        finally:
            os.close(fd)

    def _hold(self, made: Any) -> None:
        self._object = made
        self._undo.callback(self._attempt, "cuMemRelease", made)

    def _handle_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, members: int) -> Any:
        properties = self._cuda.CUmulticastObjectProp()
        properties.numDevices, properties.size = members, self._memory.nbytes
        properties.handleTypes = self._handle_type()
        return properties

    def _access(self) -> Any:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._current():
            return call(self._cuda, name, *arguments)

    def _attempt(self, name: str, *arguments: Any) -> None:
        """What fails of it belongs to a device that has failed."""
        with contextlib.suppress(Unavailable):
            self._call(name, *arguments)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """In this device's context; the thread's own comes back."""
        before = call(self._cuda, "cuCtxGetCurrent")
        call(self._cuda, "cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            call(self._cuda, "cuCtxSetCurrent", before)
