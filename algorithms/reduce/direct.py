"""Reduce in the users' own memory: rank p loads part p of all inputs and stores the sum into the root's output.

Steps: 1, between two handshakes. Bytes loaded per rank: (N - 1) / N S. Rounds: 1, summed in rank order.
Wins for symmetric memory: nothing is staged, and the root doesn't sum alone.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The first signal hands over addresses, the second says that this rank is done with the others' memory."""
    rank, ranks, root = program.rank, program.ranks, program.root
    block = program.block()
    block.signal(0, program.peers, publish=True)
    block.wait(0, program.peers, publish=True)
    sources = [mine(0, rank) if source == rank else mine(0, rank, source) for source in range(ranks)]
    result = out(0, rank) if rank == root else out(0, rank, root)
    block.reduce([result], sources, mine(0, rank), final=True)
    block.signal(0, program.peers)
    block.wait(0, program.peers)


plugin = Algorithm(
    "reduce", "direct", build, parts=lambda ranks: ranks, channels=1, requires=("symmetric",), rounds=lambda ranks: 1
)
