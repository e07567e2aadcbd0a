"""multicast.py FOLDER RANK: two processes bind memory to one multicast object, and sum through it by multimem.

Nothing here knows whether the driver is a fake. One line of JSON: what was refused, and whether the sums are right.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda
from cuda_rules import got, name
from exchange import Meeting

from commrt.backends.cuda import plugin

NBYTES, COUNT = 2 << 20, 6000
FD = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
SOURCE = (Path(__file__).parent / "multicast.cu").read_text()


def memory(device: int) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = FD
    granularity = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert got(cuda.cuMemGetAllocationGranularity(properties, granularity)) == NBYTES
    return got(cuda.cuMemCreate(NBYTES, properties, 0))


def mapped(handle: Any, device: int) -> int:
    address = got(cuda.cuMemAddressReserve(NBYTES, 0, 0, 0))
    got(cuda.cuMemMap(address, NBYTES, 0, handle, 0))
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    got(cuda.cuMemSetAccess(address, NBYTES, [access], 1))
    return int(address)


def create(devices: int) -> tuple[Any, ...]:
    properties = cuda.CUmulticastObjectProp()
    properties.numDevices, properties.size, properties.handleTypes = devices, NBYTES, FD
    answer: tuple[Any, ...] = cuda.cuMulticastCreate(properties)
    return answer


def shared(rank: int, folder: Path, meeting: Meeting) -> Any:
    """Rank 0 makes the object, and hands its descriptor over a socket."""
    path = str(folder / "socket")
    if rank:
        meeting.swap(b"")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)
            _, (fd,), _, _ = socket.recv_fds(line, 1, 1)
        return got(cuda.cuMemImportFromShareableHandle(fd, FD))
    made = got(create(2))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        meeting.swap(b"")
        with server.accept()[0] as line:
            socket.send_fds(line, [b"x"], [int(got(cuda.cuMemExportToShareableHandle(made, FD, 0)))])
    return made


def copy(to: int, source: int, nbytes: int) -> None:
    plugin.copy(to, source, nbytes)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    meeting = Meeting(folder, rank)
    kernel: Any = plugin.build(SOURCE, "sum_half")  # and so the device is open
    got(cuda.cuCtxSetCurrent(got(cuda.cuDevicePrimaryCtxRetain(rank))))
    own, multicast = memory(rank), shared(rank, folder, meeting)
    refused = {
        "of one": name(create(1)),
        "bind before all are added": name(cuda.cuMulticastBindMem(multicast, 0, own, 0, NBYTES, 0)),
    }
    meeting.swap(b"nobody has added yet")
    got(cuda.cuMulticastAddDevice(multicast, rank))
    refused["added twice"] = name(cuda.cuMulticastAddDevice(multicast, rank))
    meeting.swap(b"both have added")
    refused["another device's"] = name(cuda.cuMulticastBindMem_v2(multicast, 1 - rank, 0, own, 0, NBYTES, 0))
    got(cuda.cuMulticastBindMem_v2(multicast, rank, 0, own, 0, NBYTES, 0))
    refused["bound twice"] = name(cuda.cuMulticastBindMem(multicast, 0, own, 0, NBYTES, 0))
    refused["half a piece"] = name(cuda.cuMulticastBindMem(multicast, 0, own, 0, NBYTES // 2, 0))
    here, everywhere = mapped(own, rank), mapped(multicast, rank)
    values = (ctypes.c_float * COUNT)(*(float(i + rank) for i in range(COUNT)))
    copy(here, ctypes.addressof(values), 4 * COUNT)
    refused["plain copy"] = name(cuda.cuMemcpyDtoH(ctypes.addressof(values), everywhere, 4))
    meeting.swap(b"all is bound and written")
    kernel.launch(3, (ctypes.c_void_p(everywhere), ctypes.c_uint64(COUNT), ctypes.c_uint64(rank)))
    meeting.swap(b"all is summed")
    copy(ctypes.addressof(values), here, 4 * COUNT)
    right = list(values) == [2.0 * i + 1 for i in range(COUNT)]
    meeting.swap(b"all is read")
    got(cuda.cuMulticastUnbind(multicast, rank, 0, NBYTES))
    refused["unbound twice"] = name(cuda.cuMulticastUnbind(multicast, rank, 0, NBYTES))
    got(cuda.cuMemUnmap(here, NBYTES))
    refused["mapped no more"] = name(cuda.cuMemUnmap(here, NBYTES))
    print(json.dumps({"right": right, "refused": refused, "devices": ", ".join(plugin.probe().devices)}))


if __name__ == "__main__":
    main()
