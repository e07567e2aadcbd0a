"""All-gather by reading: every rank fetches the inputs of all others from their own memory.

Steps: 1, between two handshakes. Bytes read per rank: (N - 1) / N S for a total of S.
Wins from some ten KiB on when links can read ordinary memory, and always for symmetric memory: nothing is staged.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The first signal hands over addresses, the second says that this rank has read."""
    block = program.block()
    block.signal(0, program.peers, publish=True)
    block.copy(out(program.rank), mine(), mine())
    for peer in program.peers:
        block.wait(0, [peer], publish=True)
        block.get(out(peer), mine(rank=peer), mine())
        block.signal(0, [peer])
    block.wait(0, program.peers)


plugin = Algorithm("all_gather", "direct", build, channels=1, requires=("direct",), most_ranks=4096)
