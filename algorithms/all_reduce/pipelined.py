"""All-reduce as `pairs`, cut into slices that three blocks work on at once: send, sum and pass on, collect.

Steps: 2, overlapping. Bytes sent per rank: 2 (N - 1) / N S. Rounds: 1, summed in rank order.
Wins for large messages where sending, summing and receiving can proceed side by side: one slice is summed while the
next is on its way.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Block, Program, mine, out, scratch

PLUGIN_API = 1


def build(program: Program) -> None:
    """Slots as in `pairs`. Channel 0 says that a slice was contributed, channel 1 that a slice is finished.

    Every loop runs over part 0, the longest: all ranks turn equally often.
    """
    send, fold, collect = program.block(), program.block(), program.block()
    send.loop(lambda: _send(program, send), mine(0, 0))
    fold.loop(lambda: _fold(program, fold), mine(0, 0))
    collect.loop(lambda: _collect(program, collect), mine(0, 0))


def _send(program: Program, block: Block) -> None:
    for peer in program.peers:
        block.put(scratch(program.rank, peer), mine(0, peer), mine(0, peer))
        block.signal(0, [peer])


def _fold(program: Program, block: Block) -> None:
    rank, ranks = program.rank, program.ranks
    block.wait(0, program.peers)
    sources = [mine(0, rank) if source == rank else scratch(source) for source in range(ranks)]
    block.reduce([out(0, rank)], sources, mine(0, rank), final=True)
    for peer in program.peers:
        block.put(scratch(ranks + rank, peer), out(0, rank), mine(0, rank))
        block.signal(1, [peer])


def _collect(program: Program, block: Block) -> None:
    for peer in program.peers:
        block.wait(1, [peer])
        block.copy(out(0, peer), scratch(program.ranks + peer), mine(0, peer))


plugin = Algorithm(
    "all_reduce",
    "pipelined",
    build,
    parts=lambda ranks: ranks,
    scratch_slots=lambda ranks: 2 * ranks,
    channels=2,
    unit=1 << 15,
    rounds=lambda ranks: 1,
)
