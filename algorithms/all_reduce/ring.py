"""All-reduce on a ring: a reduce-scatter, then an all-gather, each rank talking to its two neighbours alone.

Steps: 2 (N - 1). Bytes sent per rank: 2 (N - 1) / N S, the least possible. Rounds: N - 1.
Order: part p is summed as ((x[p] + x[p + 1]) + x[p + 2]) + ... up to rank p - 1, indices modulo N, on every run.
Wins where links between neighbours are the bottleneck and messages are large. Needs nothing but puts and signals.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.algorithms._ranks import ring_block, ring_neighbours

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot s receives the partial sum of step s, slot N - 1 + s the finished part of step s; none is used twice."""
    rank, ranks = program.rank, program.ranks
    before, behind = ring_neighbours(rank, ranks)
    block = program.block()
    source = mine(0, rank)
    for step in range(ranks - 1):
        sent, received = ring_block(rank, ranks, step, 0)
        last = step == ranks - 2
        block.put(scratch(step, behind), source, mine(0, sent))
        block.signal(0, [behind])
        block.wait(0, [before])
        source = out(0, received) if last else scratch(step)
        block.reduce([source], [scratch(step), mine(0, received)], mine(0, received), final=last)
    for step in range(ranks - 1):
        sent, received = ring_block(rank, ranks, step, 1)
        slot = ranks - 1 + step
        block.put(scratch(slot, behind), source, mine(0, sent))
        block.signal(0, [behind])
        block.wait(0, [before])
        source = scratch(slot)
        block.copy(out(0, received), source, mine(0, received))


plugin = Algorithm(
    "all_reduce",
    "ring",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: 2 * (ranks - 1),
    channels=1,
    most_ranks=4096,
    rounds=lambda ranks: ranks - 1,
)
