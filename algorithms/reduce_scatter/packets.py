"""Reduce-scatter in one step of packets: every rank sends every other its group, and sums what it gets.

Steps: 1. Bytes sent per rank: 2 (N - 1) / N S for a total of S. Rounds: 1, summed in rank order.
Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets
from commrt.plan import MAX_PACKET_SOURCES

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the packets holds the contribution of rank r."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    for peer in program.peers:
        block.put_packets([packets(rank, peer)], mine(peer), mine(peer))
    sources = [mine(rank) if source == rank else packets(source) for source in range(ranks)]
    block.reduce_packets([out()], sources, mine(rank), final=True)


plugin = Algorithm(
    "reduce_scatter",
    "packets",
    build,
    packet_slots=lambda ranks: ranks,
    requires=("mapped",),
    rounds=lambda ranks: 1,
    most_ranks=MAX_PACKET_SOURCES,
)
