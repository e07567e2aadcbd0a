"""Scatter in one step of packets: the root sends every other rank its group.

Steps: 1. Bytes sent by the root: 2 (N - 1) / N S for a total of S. Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the packets holds this rank's group."""
    rank = program.rank
    block = program.block()
    if rank != program.root:
        block.unpack_packets(out(), packets(0), out())
        return
    for peer in program.peers:
        block.put_packets([packets(0, peer)], mine(peer), mine(peer))
    block.copy(out(), mine(rank), mine(rank))


plugin = Algorithm(
    "scatter", "packets", build, packet_slots=lambda ranks: 1, launch_class="one_way", requires=("mapped",)
)
