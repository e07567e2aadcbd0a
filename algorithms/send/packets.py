"""Send in one step of packets, from rank 0 of the pair to rank 1.

Steps: 1. Bytes sent: 2 S. Wins for small messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, packets

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the receiver's packets holds the data."""
    block = program.block()
    if program.rank == 0:
        block.put_packets([packets(0, 1)], mine(), mine())
    else:
        block.unpack_packets(out(), packets(0), out())


plugin = Algorithm(
    "send",
    "packets",
    build,
    packet_slots=lambda ranks: 1,
    launch_class="one_way",
    requires=("mapped",),
    least_ranks=2,
    most_ranks=2,
)
