"""Broadcast along a binomial tree: whoever has the data passes it on.

Steps: log2 N, rounded up. Bytes sent per rank: at most S log2 N. Wins over `put` from about five ranks on.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.algorithms._ranks import binomial_children, binomial_parent

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the scratch holds the data. Ranks are counted from the root."""
    virtual = (program.rank - program.root) % program.ranks
    block = program.block()
    source = mine()
    if virtual:
        block.wait(0, [(binomial_parent(virtual) + program.root) % program.ranks])
        source = scratch(0)
    for child in binomial_children(virtual, program.ranks):
        peer = (child + program.root) % program.ranks
        block.put(scratch(0, peer), source, mine())
        block.signal(0, [peer])
    block.copy(out(), source, mine())


plugin = Algorithm(
    "broadcast", "tree", build, scratch_slots=lambda ranks: 1, channels=1, launch_class="one_way", most_ranks=4096
)
