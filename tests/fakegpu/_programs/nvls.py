"""nvls.py OUT BACKEND CASES: one rank of a job sums by way of a switch, and by what is chosen, in each of the cases.

CASES, in JSON: which rank's driver fails and how (as FAKEGPU_FAIL), and the transport to force. Writes JSON to
OUT.rank, for each case: what was offered, the bits of the results, what was logged, and what is left in the end.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from collectives import fetch, place

import commrt
from commrt.arrays import Buffer
from commrt.errors import CommrtError
from commrt.plugins import default_registry

COUNTS = (1, 70001)
DTYPES = ("float32", "int32")


def values(rank: int, count: int, dtype: str) -> Any:
    """Whole numbers, small enough for sums to be exact in any order."""
    return ((np.arange(count) * (rank + 3)) % 1009 - 500).astype(dtype)


def sums(comm: Any, algorithm: str | None) -> Any:
    results = []
    for dtype in DTYPES:
        for count in COUNTS:
            arrays = [place(comm, array) for array in (values(comm.rank, count, dtype), np.zeros(count, dtype))]
            try:
                comm.all_reduce(*arrays, algorithm=algorithm)
                results.append(fetch(comm, arrays[1]).tobytes().hex())
            finally:
                for array in arrays:
                    if isinstance(array, Buffer):
                        array.owner.close()
    return results


def digest(comm: Any) -> str:
    """Of the switch's plan."""
    plan = default_registry().require("algorithms", "all_reduce/switch").plan(comm.size)
    return str(plan.digest)


def tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except CommrtError as error:
        return f"{type(error).__name__}: {error}"


def left() -> list[str]:
    """Open files of the fake driver that stand for its memory and its objects, mapped or bound ones among them."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(one) for one in folder.iterdir() if one.is_symlink()]
    return sorted(link for link in links if "fakegpu-" in link)


def job(backend: str, transport: str | None) -> Any:
    with commrt.init(backend=backend, transport=transport) as comm:
        return {
            "offered": sorted(comm.capabilities),
            "links": sorted(set(comm.links.values())),
            "chosen": tried(lambda: sums(comm, None)),
            "switch": tried(lambda: sums(comm, "switch")),
            "digest": digest(comm),
        }


class Said(logging.Handler):
    """What was logged of transports that were left out."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "left out" in (line := record.getMessage()):
            self.lines.append(line)


def main() -> None:
    out, backend, cases = sys.argv[1:]
    rank, reports, said = int(os.environ["COMMRT_RANK"]), [], Said()
    logging.getLogger("commrt.init").addHandler(said)
    logging.getLogger("commrt.init").setLevel(logging.INFO)
    for failing, fail, transport in json.loads(cases):
        said.lines = []
        if failing == rank:
            ctypes.CDLL("libcuda.so.1").fakegpu_fail(fail.encode())
        report = tried(lambda: job(backend, transport))  # noqa: B023
        if failing == rank:
            ctypes.CDLL("libcuda.so.1").fakegpu_fail(b"")
        reports.append({"outcome": report, "said": said.lines, "left": left()})
    Path(f"{out}.{rank}").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
