"""All-reduce in the users' own memory: rank p loads part p of all inputs and stores the sum into all outputs.

Steps: 1, between two handshakes. Bytes over the links per rank: 2 (N - 1) / N S. Rounds: 1, summed in rank order.
Wins for symmetric memory: nothing is staged. In place too: part p of every buffer is touched by rank p alone.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The first signal hands over addresses, the second says that the peer's part is in place."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    block.signal(0, program.peers, publish=True)
    block.wait(0, program.peers, publish=True)
    sources = [mine(0, rank) if source == rank else mine(0, rank, source) for source in range(ranks)]
    results = [out(0, rank), *(out(0, rank, peer) for peer in program.peers)]
    block.reduce(results, sources, mine(0, rank), final=True)
    block.signal(0, program.peers)
    block.wait(0, program.peers)


plugin = Algorithm(
    "all_reduce",
    "direct",
    build,
    parts=lambda ranks: ranks,
    channels=1,
    requires=("symmetric",),
    rounds=lambda ranks: 1,
)
