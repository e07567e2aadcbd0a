"""All-gather through scratch that peers can load: every rank shows its input there once, the others fetch it.

Steps: 1. Bytes over the links per rank: (N - 1) / N S for a total of S.
Wins over `put` on mapped links: an input is written once, not once a peer.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of each rank's scratch is a copy of its input."""
    block = program.block()
    block.copy(scratch(0), mine(), mine())
    block.signal(0, program.peers)
    block.copy(out(program.rank), mine(), mine())
    for peer in program.peers:
        block.wait(0, [peer])
        block.copy(out(peer), scratch(0, peer), mine())


plugin = Algorithm(
    "all_gather", "staged", build, scratch_slots=lambda ranks: 1, channels=1, requires=("mapped",), most_ranks=4096
)
