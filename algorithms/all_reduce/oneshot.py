"""All-reduce in one step of packets: every rank sends its input to every other and sums what it gets.

Steps: 1. Bytes sent per rank: 2 (N - 1) S, flags included. Rounds: 1, summed in rank order on every rank.
Wins for small messages, where latency is all: one hop, and the data is its own signal.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets
from commrt.plan import MAX_PACKET_SOURCES

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the packets holds the input of rank r."""
    block = program.block()
    block.put_packets([packets(program.rank, peer) for peer in program.peers], mine(), mine())
    sources = [mine() if rank == program.rank else packets(rank) for rank in range(program.ranks)]
    block.reduce_packets([out()], sources, mine(), final=True)


plugin = Algorithm(
    "all_reduce",
    "oneshot",
    build,
    packet_slots=lambda ranks: ranks,
    requires=("mapped",),
    rounds=lambda ranks: 1,
    most_ranks=MAX_PACKET_SOURCES,
)
