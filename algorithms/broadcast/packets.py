"""Broadcast in one step of packets from the root to every other rank.

Steps: 1. Bytes sent by the root: 2 (N - 1) S. Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the packets holds the root's input."""
    block = program.block()
    if program.rank == program.root:
        block.put_packets([packets(0, peer) for peer in program.peers], mine(), mine())
        block.copy(out(), mine(), mine())
    else:
        block.unpack_packets(out(), packets(0), mine())


plugin = Algorithm(
    "broadcast", "packets", build, packet_slots=lambda ranks: 1, launch_class="one_way", requires=("mapped",)
)
