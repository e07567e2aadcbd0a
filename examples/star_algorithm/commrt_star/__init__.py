"""All-reduce by way of rank 0: everyone sends it their input, and it sends everyone the sum.

Steps: 2. Bytes sent: S by each rank, (N - 1) S by rank 0. Rounds: 1, summed in rank order.
Wins nowhere: it is the shortest plan that is right, on any link.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.plan import MAX_REFS

PLUGIN_API = 1
CENTRE = 0


def build(program: Program) -> None:
    """Slot r of the centre receives the input of rank r; slot 0 of any other the sum."""
    block = program.block()
    if program.rank == CENTRE:
        block.wait(0, program.peers)
        sources = [mine() if rank == CENTRE else scratch(rank) for rank in range(program.ranks)]
        block.reduce([out()], sources, mine(), final=True)
        for peer in program.peers:
            block.put(scratch(0, peer), out(), mine())
        block.signal(0, program.peers)
    else:
        block.put(scratch(program.rank, CENTRE), mine(), mine())
        block.signal(0, [CENTRE])
        block.wait(0, [CENTRE])
        block.copy(out(), scratch(0), mine())


plugin = Algorithm(
    "all_reduce",
    "star",
    build,
    scratch_slots=lambda ranks: ranks,
    channels=1,
    rounds=lambda ranks: 1,
    most_ranks=MAX_REFS,
)
