"""Barrier by dissemination: in round k, rank r signals rank r + 2^k and waits for rank r - 2^k.

Steps: log2 N, rounded up; signals sent per rank: as many. Wins from about five ranks on.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program
from commrt.algorithms._ranks import distances
from commrt.plan import MAX_RANKS

PLUGIN_API = 1


def build(program: Program) -> None:
    """One channel is enough: no ordered pair of ranks meets in two rounds."""
    block = program.block()
    for distance in distances(program.ranks):
        block.signal(0, [(program.rank + distance) % program.ranks])
        block.wait(0, [(program.rank - distance) % program.ranks])


plugin = Algorithm("barrier", "dissemination", build, channels=1, most_ranks=MAX_RANKS)
