"""All-reduce through scratch: every rank shows its input in its own scratch, and sums all of them by loads.

Steps: 1. Bytes loaded per rank from peers: (N - 1) S. Rounds: 1, summed in rank order on every rank.
Wins for two ranks beyond packet sizes: one copy, one handshake, one pass.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of each rank's scratch is a copy of its input."""
    block = program.block()
    block.copy(scratch(0), mine(), mine())
    block.signal(0, program.peers)
    block.wait(0, program.peers)
    sources = [mine() if rank == program.rank else scratch(0, rank) for rank in range(program.ranks)]
    block.reduce([out()], sources, mine(), final=True)


plugin = Algorithm(
    "all_reduce",
    "staged",
    build,
    scratch_slots=lambda ranks: 1,
    channels=1,
    requires=("mapped",),
    rounds=lambda ranks: 1,
)
