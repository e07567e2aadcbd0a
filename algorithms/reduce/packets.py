"""Reduce in one step of packets: every rank sends its input to the root, which sums them.

Steps: 1. Bytes sent per rank: 2 S. Rounds: 1, summed in rank order. Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets
from commrt.plan import MAX_PACKET_SOURCES

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the root's packets holds the input of rank r."""
    rank, root = program.rank, program.root
    block = program.block()
    if rank == root:
        sources = [mine() if source == rank else packets(source) for source in range(program.ranks)]
        block.reduce_packets([out()], sources, mine(), final=True)
    else:
        block.put_packets([packets(rank, root)], mine(), mine())


plugin = Algorithm(
    "reduce",
    "packets",
    build,
    packet_slots=lambda ranks: ranks,
    launch_class="one_way",
    requires=("mapped",),
    rounds=lambda ranks: 1,
    most_ranks=MAX_PACKET_SOURCES,
)
