"""Reduce by direct exchange: rank p sums part p of all ranks, then puts it into the root's scratch.

Steps: 2. Bytes sent per rank: at most S. Rounds: 1, summed in rank order.
Wins over `put` for large messages and more than two ranks: the root doesn't sum alone.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r holds the contribution of rank r to this rank's part, slot N + r (on the root) the finished part r.

    Slot N is this rank's own finished part on the other ranks, which receive none.
    """
    rank, ranks, root = program.rank, program.ranks, program.root
    block = program.block()
    for peer in program.peers:
        block.put(scratch(rank, peer), mine(0, peer), mine(0, peer))
        block.signal(0, [peer])
    block.wait(0, program.peers)
    sources = [mine(0, rank) if source == rank else scratch(source) for source in range(ranks)]
    result = out(0, rank) if rank == root else scratch(ranks)
    block.reduce([result], sources, mine(0, rank), final=True)
    if rank != root:
        block.put(scratch(ranks + rank, root), result, mine(0, rank))
        block.signal(0, [root])
        return
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(0, peer), scratch(ranks + peer), mine(0, peer))


plugin = Algorithm(
    "reduce",
    "pairs",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: 2 * ranks,
    channels=1,
    rounds=lambda ranks: 1,
)
