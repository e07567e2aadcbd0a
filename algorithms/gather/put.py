"""Gather by puts into the root's scratch.

Steps: 1. Bytes sent per rank: S / N for a total of S. Runs on links of any kind.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the root's scratch holds the input of rank r."""
    rank, root = program.rank, program.root
    block = program.block()
    if rank != root:
        block.put(scratch(rank, root), mine(), mine())
        block.signal(0, [root])
        return
    block.copy(out(rank), mine(), mine())
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(peer), scratch(peer), mine())


plugin = Algorithm(
    "gather", "put", build, scratch_slots=lambda ranks: ranks, channels=1, launch_class="one_way", most_ranks=4096
)
