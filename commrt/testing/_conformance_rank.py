"""One rank of a job that tries a transport between processes: `python -m commrt.testing._conformance_rank NAME`."""

from __future__ import annotations

import os
import sys
import time

import commrt
from commrt.errors import PeerLost, TransportError
from commrt.plugins import default_registry
from commrt.testing import matrix
from commrt.testing.transport_suite import plain_variants

_NOTICE_S = 5.0


def main(name: str) -> None:
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
        late = time.monotonic() - started > _NOTICE_S
    else:
        raise AssertionError("an operation ended well without one of its ranks")
    if late:
        raise AssertionError(f"a rank's end was noticed after more than {_NOTICE_S} s")


if __name__ == "__main__":
    main(sys.argv[1])
