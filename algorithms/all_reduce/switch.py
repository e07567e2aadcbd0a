"""All-reduce inside a switch: it sums part p of all scratches for rank p, and hands the sum to all of them.

Steps: 2, between handshakes. Bytes per rank and direction: S / N up, S down. Rounds: 1, in the switch's own order, so
this is no choice where a fixed order of summation is asked for.
Wins for large messages on links that reduce.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot p holds part p, slot N this rank's finished part."""
    rank, ranks = program.rank, program.ranks
    block = program.block()
    for part in range(ranks):
        block.copy(scratch(part), mine(0, part), mine(0, part))
    block.signal(0, program.peers)
    block.wait(0, program.peers)
    block.switch_reduce(scratch(ranks), scratch(rank), mine(0, rank), final=True)
    block.switch_broadcast(scratch(rank), scratch(ranks), mine(0, rank))
    block.signal(0, program.peers)
    block.wait(0, program.peers)
    for part in range(ranks):
        block.copy(out(0, part), scratch(part), mine(0, part))


plugin = Algorithm(
    "all_reduce",
    "switch",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: ranks + 1,
    channels=1,
    requires=("switch",),
    rounds=lambda ranks: 1,
)
