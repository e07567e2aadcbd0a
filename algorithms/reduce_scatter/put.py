"""Reduce-scatter by direct exchange: every rank puts every other's group into its scratch, and sums what it got.

Steps: 1. Bytes sent per rank: (N - 1) / N S for a total of S. Rounds: 1, summed in rank order.
Wins where every pair of ranks has a link of its own.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the scratch holds the contribution of rank r."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    for peer in program.peers:
        block.put(scratch(rank, peer), mine(peer), mine(peer))
        block.signal(0, [peer])
    block.wait(0, program.peers)
    sources = [mine(rank) if source == rank else scratch(source) for source in range(ranks)]
    block.reduce([out()], sources, mine(rank), final=True)


plugin = Algorithm(
    "reduce_scatter", "put", build, scratch_slots=lambda ranks: ranks, channels=1, rounds=lambda ranks: 1
)
