"""Broadcast by puts from the root into the scratch of every other rank.

Steps: 1. Bytes sent by the root: (N - 1) S. Wins for a few ranks on links without loads.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the scratch holds the root's input."""
    block = program.block()
    if program.rank == program.root:
        for peer in program.peers:
            block.put(scratch(0, peer), mine(), mine())
            block.signal(0, [peer])
        block.copy(out(), mine(), mine())
    else:
        block.wait(0, [program.root])
        block.copy(out(), scratch(0), mine())


plugin = Algorithm(
    "broadcast", "put", build, scratch_slots=lambda ranks: 1, channels=1, launch_class="one_way", most_ranks=4096
)
