"""A rank that prints, per batch of calls, how often memory was allocated and the kernel was asked for something."""

from __future__ import annotations

import ctypes
import json

import numpy as np

import commrt

BATCHES, CALLS = 1500, 4


def main() -> None:
    """All batches, on every rank at once."""
    trace = ctypes.CDLL(None)
    allocations, calls = ctypes.c_long(), ctypes.c_long()
    with commrt.init() as comm:
        x = np.ones(256, np.float32)
        out = np.empty_like(x)
        for _ in range(100):
            comm.all_reduce(x, out)
        seen = []
        for _ in range(BATCHES):
            comm.barrier()
            trace.trace_begin()
            for _ in range(CALLS):
                comm.all_reduce(x, out)
            trace.trace_end(ctypes.byref(allocations), ctypes.byref(calls))
            seen.append((allocations.value, calls.value))
        if comm.rank == 0:
            print(json.dumps(seen), flush=True)


main()
