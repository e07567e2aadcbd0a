"""Send by a put into the receiver's scratch, from rank 0 of the pair to rank 1.

Steps: 1. Bytes sent: S. Runs on links of any kind.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slot 0 of the receiver's scratch holds the data."""
    block = program.block()
    if program.rank == 0:
        block.put(scratch(0, 1), mine(), mine())
        block.signal(0, [1])
    else:
        block.wait(0, [0])
        block.copy(out(), scratch(0), out())


plugin = Algorithm(
    "send", "put", build, scratch_slots=lambda ranks: 1, channels=1, launch_class="one_way", least_ranks=2, most_ranks=2
)
