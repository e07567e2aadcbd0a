"""Scatter by reading: every rank fetches its group from the root's own memory.

Steps: 1, between two handshakes. Bytes read per rank: S / N for a total of S.
Wins from some ten KiB on when links can read ordinary memory, and always for symmetric memory: nothing is staged.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The root hands over its address, and stays until all have read."""
    rank, root = program.rank, program.root
    block = program.block()
    if rank != root:
        block.wait(0, [root], publish=True)
        block.get(out(), mine(rank, rank=root), out())
        block.signal(0, [root])
        return
    block.signal(0, program.peers, publish=True)
    block.copy(out(), mine(rank), mine(rank))
    block.wait(0, program.peers)


plugin = Algorithm(
    "scatter", "direct", build, channels=1, launch_class="one_way", requires=("direct",), most_ranks=4096
)
