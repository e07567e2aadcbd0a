"""Scatter by puts from the root into the scratch of every other rank.

Steps: 1. Bytes sent by the root: (N - 1) / N S for a total of S. Runs on links of any kind.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the scratch holds this rank's group."""
    rank, root = program.rank, program.root
    block = program.block()
    if rank != root:
        block.wait(0, [root])
        block.copy(out(), scratch(0), out())
        return
    for peer in program.peers:
        block.put(scratch(0, peer), mine(peer), mine(peer))
        block.signal(0, [peer])
    block.copy(out(), mine(rank), mine(rank))


plugin = Algorithm(
    "scatter", "put", build, scratch_slots=lambda ranks: 1, channels=1, launch_class="one_way", most_ranks=4096
)
