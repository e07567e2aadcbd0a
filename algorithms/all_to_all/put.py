"""All-to-all by puts into the scratch of every other rank.

Steps: 1. Bytes sent per rank: (N - 1) / N S. Runs on links of any kind.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the scratch holds what rank r has for this one."""
    rank = program.rank
    block = program.block()
    for peer in program.peers:
        block.put(scratch(rank, peer), mine(peer), mine(peer))
        block.signal(0, [peer])
    block.copy(out(rank), mine(rank), mine(rank))
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(peer), scratch(peer), mine(peer))


plugin = Algorithm("all_to_all", "put", build, scratch_slots=lambda ranks: ranks, channels=1, most_ranks=4096)
