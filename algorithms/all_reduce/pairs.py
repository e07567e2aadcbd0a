"""All-reduce by direct exchange: rank p sums part p of all ranks, then hands it to every other.

Steps: 2. Bytes sent per rank: 2 (N - 1) / N S. Rounds: 1, summed in rank order.
Wins for large messages on links of any kind, when every pair of ranks has its own; `ring` if neighbours alone do.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r holds the contribution of rank r to this rank's part, slot N + r the finished part r."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    for peer in program.peers:
        block.put(scratch(rank, peer), mine(0, peer), mine(0, peer))
        block.signal(0, [peer])
    block.wait(0, program.peers)
    sources = [mine(0, rank) if source == rank else scratch(source) for source in range(ranks)]
    block.reduce([out(0, rank)], sources, mine(0, rank), final=True)
    for peer in program.peers:
        block.put(scratch(ranks + rank, peer), out(0, rank), mine(0, rank))
        block.signal(0, [peer])
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(0, peer), scratch(ranks + peer), mine(0, peer))


plugin = Algorithm(
    "all_reduce",
    "pairs",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: 2 * ranks,
    channels=1,
    rounds=lambda ranks: 1,
)
