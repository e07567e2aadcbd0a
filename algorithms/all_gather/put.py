"""All-gather by direct exchange: every rank puts its input into the scratch of every other.

Steps: 1. Bytes sent per rank: (N - 1) / N S for a total of S. Wins where every pair of ranks has a link of its own.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot r of the scratch holds the input of rank r."""
    rank = program.rank
    block = program.block()
    for peer in program.peers:
        block.put(scratch(rank, peer), mine(), mine())
        block.signal(0, [peer])
    block.copy(out(rank), mine(), mine())
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(peer), scratch(peer), mine())


plugin = Algorithm("all_gather", "put", build, scratch_slots=lambda ranks: ranks, channels=1, most_ranks=4096)
