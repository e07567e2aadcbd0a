"""Reduce by puts into the root's scratch, which sums them.

Steps: 1. Bytes sent per rank: S. Rounds: 1, summed in rank order. Wins for two ranks, or middling messages.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the root's scratch holds the input of rank r."""
    rank, root = program.rank, program.root
    block = program.block()
    if rank == root:
        block.wait(0, program.peers)
        sources = [mine() if source == rank else scratch(source) for source in range(program.ranks)]
        block.reduce([out()], sources, mine(), final=True)
    else:
        block.put(scratch(rank, root), mine(), mine())
        block.signal(0, [root])


plugin = Algorithm(
    "reduce",
    "put",
    build,
    scratch_slots=lambda ranks: ranks,
    channels=1,
    launch_class="one_way",
    rounds=lambda ranks: 1,
)
