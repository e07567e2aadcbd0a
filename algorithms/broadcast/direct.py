"""Broadcast by reading: every rank fetches the root's input from its own memory.

Steps: 1, between two handshakes. Bytes read per rank: S.
Wins from some ten KiB on when links can read ordinary memory, and always for symmetric memory: nothing is staged.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The root hands over its address, and stays until all have read."""
    root = program.root
    block = program.block()
    if program.rank == root:
        block.signal(0, program.peers, publish=True)
        block.copy(out(), mine(), mine())
        block.wait(0, program.peers)
    else:
        block.wait(0, [root], publish=True)
        block.get(out(), mine(rank=root), mine())
        block.signal(0, [root])


plugin = Algorithm(
    "broadcast", "direct", build, channels=1, launch_class="one_way", requires=("direct",), most_ranks=4096
)
