"""collectives.py OUT BACKENDS: one rank of a job, on that of the backends whose turn it is.

Writes the bits of its results to OUT.rank, as JSON. Plans are forced by name, so that every kind of link runs the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.arrays import on_device
from commrt.backend import DeviceBackend

COUNTS = (1, 1021, 70001)
CALLS = (("all_reduce", "pairs"), ("all_reduce", "ring"), ("all_gather", "put"), ("all_gather", "ring"))


def values(rank: int, count: int) -> Any:
    return np.sin(np.arange(count) * (rank + 1)).astype(np.float32)


def place(comm: Any, host: Any) -> Any:
    if not isinstance(comm.backend, DeviceBackend):
        return host.copy()
    memory = comm.backend.allocate(max(host.nbytes, 1))
    comm.backend.copy(memory.address, host.ctypes.data, host.nbytes)
    return on_device(comm.backend, memory, host.size, host.dtype.name)


def fetch(comm: Any, array: Any) -> Any:
    if not isinstance(comm.backend, DeviceBackend):
        return array
    host = np.empty(array.count, array.dtype.name)
    comm.backend.copy(host.ctypes.data, array.address, host.nbytes)
    return host


def main() -> None:
    lines = []
    backends = sys.argv[2].split(",")
    with commrt.init(backend=backends[int(os.environ["COMMRT_RANK"]) % len(backends)]) as comm:
        for collective, algorithm in CALLS:
            for count in COUNTS:
                x = place(comm, values(comm.rank, count))
                out = place(comm, np.zeros(count * (comm.size if collective == "all_gather" else 1), np.float32))
                getattr(comm, collective)(x, out, algorithm=algorithm)
                lines.append([collective, algorithm, count, fetch(comm, out).tobytes().hex()])
        links, name = sorted(set(comm.links.values())), comm.backend.name
    report = {"links": links, "backend": name, "results": lines}
    Path(f"{sys.argv[1]}.{comm.rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
