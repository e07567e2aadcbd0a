"""Reduce in symmetric memory: each rank reduces its part straight from everyone's input; the root collects the parts.

Steps: publish addresses, reduce one's own part (the root into its output, others into scratch), a handshake that says
that the inputs are free and the parts are there, the root copies them. Bytes on the wire: (N-1)/N of the message into
each rank, and as much again into the root. Rounds once. Wins for large messages on more than two ranks.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Only inputs are reached by peers: the root alone has an output, which may be ordinary memory."""
    rank, ranks, root = program.rank, program.ranks, program.root
    block = program.block()
    block.signal(0, program.peers, publish=True)
    block.wait(0, program.peers, publish=True)
    sources = [mine(0, rank) if source == rank else mine(0, rank, source) for source in range(ranks)]
    result = out(0, rank) if rank == root else scratch(0)
    block.reduce([result], sources, mine(0, rank), final=True)
    block.signal(0, program.peers)
    block.wait(0, program.peers)
    if rank == root:
        for peer in program.peers:
            block.copy(out(0, peer), scratch(0, peer), mine(0, peer))


plugin = Algorithm(
    "reduce",
    "direct",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: 1,
    channels=1,
    requires=("symmetric", "mapped"),
    rounds=lambda ranks: 1,
)
