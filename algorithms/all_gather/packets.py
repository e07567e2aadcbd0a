"""All-gather in one step of packets: every rank sends its input to every other.

Steps: 1. Bytes sent per rank: 2 (N - 1) S / N for a total of S. Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the packets holds the input of rank r."""
    rank = program.rank
    block = program.block()
    block.put_packets([packets(rank, peer) for peer in program.peers], mine(), mine())
    block.copy(out(rank), mine(), mine())
    for peer in program.peers:
        block.unpack_packets(out(peer), packets(peer), mine())


plugin = Algorithm("all_gather", "packets", build, packet_slots=lambda ranks: ranks, requires=("mapped",))
