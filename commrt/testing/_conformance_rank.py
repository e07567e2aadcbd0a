"""One rank of a job that tries a transport between processes: `... -m commrt.testing._conformance_rank NAME SECONDS`.

SECONDS: within which a rank's end must be noticed.
"""

from __future__ import annotations

import os
import sys
import time

import commrt
from commrt.errors import PeerLost, TransportError
from commrt.plugins import default_registry
from commrt.testing import matrix
from commrt.testing.transport_suite import plain_variants


def main(name: str, notice_s: float) -> None:
    """Every plain algorithm; then the last rank leaves without a word, which the others must notice."""
    comm = commrt.init(transport=name, timeout=60)
    matrix.run(comm, list(plain_variants(default_registry(), comm)))
    comm.barrier()
    if comm.rank == comm.size - 1:
        os._exit(0)
    started = time.monotonic()
    try:
        comm.barrier()
    except (PeerLost, TransportError):
        late = time.monotonic() - started > notice_s
    else:
        raise AssertionError("an operation ended well without one of its ranks")
    if late:
        raise AssertionError(f"a rank's end was noticed after more than {notice_s:g} s")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
