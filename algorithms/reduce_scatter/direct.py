"""Reduce-scatter in the users' own memory: every rank loads its group of all inputs.

Steps: 1, between two handshakes. Bytes loaded per rank: (N - 1) / N S for a total of S.
Rounds: 1, summed in rank order.
Wins for symmetric memory: nothing is staged. In place too: a rank writes only the group that it alone reads.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The first signal hands over addresses, the second says that this rank has read."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    block.signal(0, program.peers, publish=True)
    block.wait(0, program.peers, publish=True)
    sources = [mine(rank) if source == rank else mine(rank, 0, source) for source in range(ranks)]
    block.reduce([out()], sources, mine(rank), final=True)
    block.signal(0, program.peers)
    block.wait(0, program.peers)


plugin = Algorithm("reduce_scatter", "direct", build, channels=1, requires=("symmetric",), rounds=lambda ranks: 1)
