"""opposite.py OUT: two communicators, launched in opposite orders on two ranks, whose devices hold one grid each.

Writes how each operation ended to OUT.rank, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import commrt
from commrt.arrays import on_device
from commrt.errors import CommrtError


def main() -> None:
    one = commrt.init(backend="cuda", timeout=2.0)
    two = one.split(0)
    assert two is not None
    x = on_device(one.backend, one.backend.allocate(4096), 1024, "float32")  # type: ignore[arg-type]
    one.all_reduce(x)
    two.all_reduce(x)
    order = (one, two) if one.rank == 0 else (two, one)
    began = time.monotonic()
    works = [comm.all_reduce(x, stream=comm.backend.stream(), async_op=True) for comm in order]
    ends = []
    for work in works:
        try:
            work.wait(20)
            ends.append("well")
        except CommrtError as error:
            ends.append(type(error).__name__)
    Path(f"{sys.argv[1]}.{one.rank}").write_text(json.dumps({"ends": ends, "seconds": time.monotonic() - began}))
    for comm in (two, one):
        try:
            comm.close()
        except CommrtError:
            continue  # they are broken


main()
