"""Reduce-scatter on a ring: partial sums travel once around, each ending on the rank it belongs to.

Steps: N - 1. Bytes sent per rank: (N - 1) / N S for a total of S. Rounds: N - 1.
Order: group g is summed as ((x[g + 1] + x[g + 2]) + ...) + x[g], indices modulo N, on every run.
Wins for large messages where links between neighbours are the bottleneck. Needs nothing but puts and signals.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.algorithms._ranks import ring_block, ring_neighbours

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot s of the scratch receives the partial sum of step s; none is used twice."""
    rank, ranks = program.rank, program.ranks
    before, behind = ring_neighbours(rank, ranks)
    block = program.block()
    source = mine(before)
    for step in range(ranks - 1):
        sent, received = ring_block(rank, ranks, step, -1)
        last = step == ranks - 2
        block.put(scratch(step, behind), source, mine(sent))
        block.signal(0, [behind])
        block.wait(0, [before])
        source = out() if last else scratch(step)
        block.reduce([source], [scratch(step), mine(received)], mine(received), final=last)


plugin = Algorithm(
    "reduce_scatter",
    "ring",
    build,
    scratch_slots=lambda ranks: ranks - 1,
    channels=1,
    rounds=lambda ranks: ranks - 1,
    most_ranks=4096,
)
