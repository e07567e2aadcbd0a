"""All-reduce by direct exchange, over scratch that peers can load: results are fetched from where they were made.

Steps: 2. Bytes over the links per rank: 2 (N - 1) / N S. Rounds: 1, summed in rank order.
Wins over `pairs` on mapped links: results are moved once (peer's scratch to output), not twice, and half of the scratch
is needed, so that windows are twice as long.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r holds the contribution of rank r to this rank's part; the own slot, which no peer writes, the sum."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    for peer in program.peers:
        block.put(scratch(rank, peer), mine(0, peer), mine(0, peer))
        block.signal(0, [peer])
    block.wait(0, program.peers)
    sources = [mine(0, rank) if source == rank else scratch(source) for source in range(ranks)]
    block.reduce([scratch(rank), out(0, rank)], sources, mine(0, rank), final=True)
    block.signal(0, program.peers)
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(0, peer), scratch(peer, peer), mine(0, peer))


plugin = Algorithm(
    "all_reduce",
    "pull",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: ranks,
    channels=1,
    requires=("mapped",),
    rounds=lambda ranks: 1,
)
