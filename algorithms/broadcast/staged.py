"""Broadcast through the root's scratch: written once, loaded by every other rank.

Steps: 1. Bytes loaded per rank: S.
Wins on mapped links beyond packet sizes: the root's work doesn't grow with the ranks.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the root's scratch is a copy of its input."""
    block = program.block()
    if program.rank == program.root:
        block.copy(scratch(0), mine(), mine())
        block.signal(0, program.peers)
        block.copy(out(), mine(), mine())
    else:
        block.wait(0, [program.root])
        block.copy(out(), scratch(0, program.root), mine())


plugin = Algorithm(
    "broadcast",
    "staged",
    build,
    scratch_slots=lambda ranks: 1,
    channels=1,
    launch_class="one_way",
    requires=("mapped",),
    most_ranks=4096,
)
