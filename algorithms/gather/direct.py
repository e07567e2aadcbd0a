"""Gather by reading: the root fetches all inputs from the other ranks' own memory.

Steps: 1, between two handshakes. Bytes read by the root: (N - 1) / N S for a total of S.
Wins from some ten KiB on when links can read ordinary memory, and always for symmetric memory: nothing is staged.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The others hand over their addresses, and stay until the root has read."""
    rank, root = program.rank, program.root
    block = program.block()
    if rank != root:
        block.signal(0, [root], publish=True)
        block.wait(0, [root])
        return
    block.copy(out(rank), mine(), mine())
    for peer in program.peers:
        block.wait(0, [peer], publish=True)
        block.get(out(peer), mine(rank=peer), mine())
        block.signal(0, [peer])


plugin = Algorithm("gather", "direct", build, channels=1, launch_class="one_way", requires=("direct",), most_ranks=4096)
