"""Send by reading: rank 1 of the pair fetches the data from the memory of rank 0, which stays until it has.

Steps: 1, between two handshakes. Bytes read: S.
Wins from some ten KiB on when links can read ordinary memory, and always for symmetric memory: nothing is staged.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """The sender hands over its address, the receiver says that it has read."""
    block = program.block()
    if program.rank == 0:
        block.signal(0, [1], publish=True)
        block.wait(0, [1])
    else:
        block.wait(0, [0], publish=True)
        block.get(out(), mine(rank=0), out())
        block.signal(0, [0])


plugin = Algorithm("send", "direct", build, channels=1, requires=("direct",), least_ranks=2, most_ranks=2)
