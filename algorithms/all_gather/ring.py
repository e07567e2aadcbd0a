"""All-gather on a ring: every rank passes on to its next what it got from its previous.

Steps: N - 1. Bytes sent per rank: (N - 1) / N S for a total of S.
Wins for large messages where links between neighbours are the bottleneck. Needs nothing but puts and signals.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.algorithms._ranks import ring_block, ring_neighbours

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot g of the scratch receives the input of rank g; none is used twice."""
    rank, ranks = program.rank, program.ranks
    before, behind = ring_neighbours(rank, ranks)
    block = program.block()
    source = mine()
    for step in range(ranks - 1):
        sent, received = ring_block(rank, ranks, step, 0)
        block.put(scratch(sent, behind), source, mine())
        block.signal(0, [behind])
        if step == 0:
            block.copy(out(rank), mine(), mine())
        block.wait(0, [before])
        source = scratch(received)
        block.copy(out(received), source, mine())


plugin = Algorithm("all_gather", "ring", build, scratch_slots=lambda ranks: ranks, channels=1, most_ranks=4096)
