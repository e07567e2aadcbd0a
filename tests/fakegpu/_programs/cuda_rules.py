"""cuda_rules.py CUBIN: what a CUDA driver answers to calls that it must refuse. One line of JSON: answers by rule.

A real driver is believed to answer the same.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

NBYTES = 4096
NON_BLOCKING = 1
GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def name(answer: tuple[Any, ...]) -> str:
    return str(answer[0].name).removeprefix("CUDA_").removeprefix("ERROR_")


def got(answer: tuple[Any, ...]) -> Any:
    assert not int(answer[0]), answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]


def no_start() -> list[str]:
    return [name(cuda.cuDeviceGetCount())]


def no_context() -> list[str]:
    got(cuda.cuInit(0))
    answers = [name(cuda.cuMemAlloc(NBYTES)), name(cuda.cuStreamCreate(0))]
    got(cuda.cuCtxSetCurrent(got(cuda.cuDevicePrimaryCtxRetain(0))))
    return [*answers, name(cuda.cuDeviceGet(99))]


def memory() -> list[str]:
    address, buffer = int(got(cuda.cuMemAlloc(NBYTES))), ctypes.create_string_buffer(2 * NBYTES)
    host = ctypes.addressof(buffer)
    answers = [
        cuda.cuMemcpyDtoH(host, address, NBYTES),
        cuda.cuMemcpyDtoH(host, address, NBYTES + 1),
        cuda.cuMemcpyHtoD(address + 1, host, NBYTES),
        cuda.cuMemcpyHtoD(host, host, 1),
        cuda.cuMemFree(address + 512),
        cuda.cuMemFree(address),
        cuda.cuMemFree(address),
        cuda.cuMemcpyDtoH(host, address, 1),
        cuda.cuMemAlloc(0),
        cuda.cuMemAlloc(1 << 50),
    ]
    return [name(answer) for answer in answers]


def host_memory() -> list[str]:
    buffer = ctypes.create_string_buffer(NBYTES)
    address = ctypes.addressof(buffer)
    answers = [
        cuda.cuMemHostGetDevicePointer(address, 0),
        cuda.cuMemHostRegister(address, NBYTES, 3),
        cuda.cuMemHostGetDevicePointer(address, 0),
        cuda.cuMemHostRegister(address + 8, 8, 3),
        cuda.cuMemHostUnregister(address),
        cuda.cuMemHostUnregister(address),
        cuda.cuMemHostRegister(1 << 46, NBYTES, 3),
    ]
    return [name(answer) for answer in answers]


def sharing() -> list[str]:
    address = got(cuda.cuMemAlloc(NBYTES))
    handle = got(cuda.cuIpcGetMemHandle(address))
    garbage = cuda.CUipcMemHandle()
    pinned = got(cuda.cuMemHostAlloc(NBYTES, 0))
    answers = [
        cuda.cuIpcOpenMemHandle(handle, 1),
        cuda.cuIpcOpenMemHandle(garbage, 1),
        cuda.cuIpcGetMemHandle(pinned),
        cuda.cuIpcCloseMemHandle(address),
    ]
    return [name(answer) for answer in answers]


def images() -> list[str]:
    cubin = Path(sys.argv[1]).read_bytes()
    other = bytearray(cubin)
    other[48:52] = (0x6005004).to_bytes(4, "little")  # for sm_80
    module = got(cuda.cuModuleLoadData(cubin))
    answers = [
        cuda.cuModuleLoadData(b"// PTX text".ljust(64)),
        cuda.cuModuleLoadData(bytes(other)),
        cuda.cuModuleGetFunction(module, b"missing"),
        cuda.cuModuleGetFunction(module, b"exchange"),
        cuda.cuModuleUnload(module),
        cuda.cuModuleUnload(module),
    ]
    return [name(answer) for answer in answers]


def launches() -> list[str]:
    module = got(cuda.cuModuleLoadData(Path(sys.argv[1]).read_bytes()))
    function = got(cuda.cuModuleGetFunction(module, b"exchange"))
    stream = got(cuda.cuStreamCreate(NON_BLOCKING))

    def launch(blocks: int, threads: int, queue: Any) -> str:
        return name(cuda.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, queue, 0, 0))

    answers = [launch(0, 32, stream), launch(1, 1025, stream), launch(1, 32, stream)]
    answers.append(name(cuda.cuStreamDestroy(stream)))
    return [*answers, launch(1, 32, stream), name(cuda.cuStreamSynchronize(stream))]


def host_functions() -> list[str]:
    """The driver must not be called from one."""
    stream, answers = got(cuda.cuStreamCreate(NON_BLOCKING)), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: answers.append(name(cuda.cuMemAlloc(NBYTES))))
    got(cuda.cuLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p).value, 0))
    got(cuda.cuStreamSynchronize(stream))
    return answers


def captures() -> list[str]:
    one, other = got(cuda.cuStreamCreate(NON_BLOCKING)), got(cuda.cuStreamCreate(NON_BLOCKING))
    event = got(cuda.cuEventCreate(2))
    answers = [cuda.cuStreamEndCapture(one), cuda.cuStreamBeginCapture(0, GLOBAL)]
    got(cuda.cuEventRecord(event, other))
    got(cuda.cuStreamBeginCapture(one, GLOBAL))
    answers += [cuda.cuStreamWaitEvent(one, event, 0), cuda.cuStreamEndCapture(one)]
    got(cuda.cuStreamBeginCapture(one, GLOBAL))
    answers += [cuda.cuMemAlloc(NBYTES), cuda.cuStreamEndCapture(one)]
    got(cuda.cuStreamBeginCapture(one, GLOBAL))
    got(cuda.cuEventRecord(event, one))
    answers += [cuda.cuEventQuery(event), cuda.cuStreamSynchronize(one), cuda.cuStreamEndCapture(one)]
    return [name(answer) for answer in answers]


def graphs() -> list[str]:
    """A captured copy is done at each launch of its graph, and not before."""
    stream, seen = got(cuda.cuStreamCreate(NON_BLOCKING)), []
    source, target = (ctypes.c_uint64 * 1)(7), (ctypes.c_uint64 * 1)()
    got(cuda.cuStreamBeginCapture(stream, GLOBAL))
    got(cuda.cuMemcpyAsync(ctypes.addressof(target), ctypes.addressof(source), 8, stream))
    graph = got(cuda.cuStreamEndCapture(stream))
    executable = got(cuda.cuGraphInstantiate(graph, 0))
    got(cuda.cuGraphDestroy(graph))
    for value in (7, 8, 9):
        seen.append(str(target[0]))
        source[0] = value
        got(cuda.cuGraphLaunch(executable, stream))
        got(cuda.cuStreamSynchronize(stream))
    return [
        *seen,
        str(target[0]),
        name(cuda.cuGraphExecDestroy(executable)),
        name(cuda.cuGraphLaunch(executable, stream)),
    ]


RULES: tuple[Callable[[], list[str]], ...] = (
    no_start, no_context, memory, host_memory, sharing, images, launches, host_functions, captures, graphs,
)  # fmt: skip

if __name__ == "__main__":
    print(json.dumps({rule.__name__: rule() for rule in RULES}))
