"""All-reduce in two steps of packets: part r is summed on rank r, which sends the result to every other.

Steps: 2. Bytes sent per rank: 4 (N - 1) / N S, flags included. Rounds: 1, summed in rank order.
Wins between `oneshot` (fewer steps) and plans without packets (half of the bytes), the sooner the more ranks there are.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets
from commrt.plan import MAX_PACKET_SOURCES

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r holds the contribution of rank r to this rank's part, slot N + r the finished part r."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    for peer in program.peers:
        block.put_packets([packets(rank, peer)], mine(0, peer), mine(0, peer))
    sources = [mine(0, rank) if source == rank else packets(source) for source in range(ranks)]
    results = [out(0, rank), *(packets(ranks + rank, peer) for peer in program.peers)]
    block.reduce_packets(results, sources, mine(0, rank), final=True)
    for peer in program.peers:
        block.unpack_packets(out(0, peer), packets(ranks + peer), mine(0, peer))


plugin = Algorithm(
    "all_reduce",
    "twoshot",
    build,
    parts=lambda ranks: ranks,
    packet_slots=lambda ranks: 2 * ranks,
    requires=("mapped",),
    rounds=lambda ranks: 1,
    most_ranks=MAX_PACKET_SOURCES,
)
