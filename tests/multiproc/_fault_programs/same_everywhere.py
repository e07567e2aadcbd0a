"""A program for any launcher. Rank 0 prints what all ranks found. Arguments, if any: rank, size, rendezvous."""

from __future__ import annotations

import sys

import numpy as np

import commrt


def main() -> None:
    given = sys.argv[1:]
    explicit = {"rank": int(given[0]), "size": int(given[1]), "rendezvous": given[2]} if given else {}
    with commrt.init(**explicit, timeout=60, init_timeout=60) as comm:
        x = np.arange(10_000, dtype=np.float32) % 100 + comm.rank
        total = comm.all_reduce(x, np.empty_like(x))
        ranks = comm.all_gather(np.array([comm.rank, comm.size]))
        part = comm.split(comm.rank % 2)
        assert part is not None
        mates = part.all_reduce(np.array([1]))
        found = np.array([comm.rank, total.sum(), int(mates[0])], np.float64)
        everyone = comm.gather(found)
        part.close()
        if comm.rank == 0:
            print("ranks", ranks.tolist(), "found", everyone.tolist(), flush=True)


main()
