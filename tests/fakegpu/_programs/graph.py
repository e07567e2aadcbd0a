"""graph.py OUT REPLAYS: one rank that captures two collectives into a graph and launches it again and again.

Other operations run between; the inputs differ each time. Writes what was wrong to OUT.rank, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

import commrt
from commrt.arrays import on_device
from commrt.devices import own_device

COUNT = 1021


def call(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if int(error):
        raise RuntimeError(f"{error.name}")
    return values[0] if values else None


def main() -> None:
    replays, wrong = int(sys.argv[2]), []
    with commrt.init(backend="cuda") as comm:
        arrays = [on_device(comm.backend, comm.backend.allocate(4 * COUNT), COUNT, "float32") for _ in range(3)]  # type: ignore[arg-type]
        x, total, largest = arrays
        stream = comm.backend.stream()
        host = np.empty(COUNT, np.float32)

        def put(turn: int) -> None:
            host[:] = np.arange(COUNT) % 89 + turn + 1000 * comm.rank
            comm.backend.copy(x.address, host.ctypes.data, host.nbytes)

        def check(array: Any, expected: Any, what: str) -> None:
            comm.backend.copy(host.ctypes.data, array.address, host.nbytes)
            if not np.array_equal(host, expected):
                wrong.append([what, turn])

        comm.all_reduce(x, total, stream=stream).wait()  # loads the kernels
        comm.all_reduce(x, largest, "max", stream=stream).wait()
        call(
            driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(own_device(len(comm.backend.probe().devices)))))
        )
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture(stream.handle, mode))
        comm.all_reduce(x, total, stream=stream)
        comm.all_reduce(x, largest, "max", stream=stream)
        graph = call(driver.cuGraphInstantiate(call(driver.cuStreamEndCapture(stream.handle)), 0))
        base = np.arange(COUNT) % 89
        for turn in range(replays):
            put(turn)
            call(driver.cuGraphLaunch(graph, stream.handle))
            if turn % 3 == 0:
                comm.all_reduce(total, op="max", stream=stream).wait()
            stream.synchronize()
            ranks = np.arange(comm.size)
            check(total, sum((base + turn + 1000 * rank).astype(np.float32) for rank in ranks), "sum")
            check(largest, (base + turn + 1000 * (comm.size - 1)).astype(np.float32), "max")
    Path(f"{sys.argv[1]}.{comm.rank}").write_text(json.dumps(wrong))


main()
