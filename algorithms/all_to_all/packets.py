"""All-to-all in one step of packets.

Steps: 1. Bytes sent per rank: 2 (N - 1) / N S. Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the packets holds what rank r has for this one."""
    rank = program.rank
    block = program.block()
    for peer in program.peers:
        block.put_packets([packets(rank, peer)], mine(peer), mine(peer))
    block.copy(out(rank), mine(rank), mine(rank))
    for peer in program.peers:
        block.unpack_packets(out(peer), packets(peer), mine(peer))


plugin = Algorithm("all_to_all", "packets", build, packet_slots=lambda ranks: ranks, requires=("mapped",))
