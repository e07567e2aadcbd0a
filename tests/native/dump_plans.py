"""Writes every algorithm's plan, lowered as the runtime lowers it, as numbers that harness.h reads.

python tests/native/dump_plans.py FILE [RANKS...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.collectives import ROOTED
from commrt.native import COLLECTIVE_CODES, as_native
from commrt.plan import Plan
from commrt.plugins import default_registry
from commrt.routing import identifier

NEEDS = ("symmetric", "direct", "mapped", "switch")


def _two_blocks(program: Program) -> None:
    """What one block has received another reduces: no built-in plan has a barrier between blocks."""
    rank, ranks = program.rank, program.ranks
    mover, folder = program.block(), program.block()
    for peer in program.peers:
        mover.put(scratch(rank, peer), mine(), mine())
    mover.signal(0, program.peers)
    mover.wait(0, program.peers)
    mover.barrier()
    folder.barrier()
    sources = [mine() if source == rank else scratch(source) for source in range(ranks)]
    folder.reduce([out()], sources, mine(), final=True)


TWO_BLOCKS = Algorithm("all_reduce", "two_blocks", _two_blocks, scratch_slots=lambda ranks: ranks, channels=1)


def plans(ranks: int) -> Iterator[tuple[str, int, Plan]]:
    """Name, root and plan of all that is offered for this world; send's plans come with the world of two."""
    algorithms = {**default_registry().usable("algorithms"), "all_reduce/two_blocks": TWO_BLOCKS}
    for name, algorithm in sorted(algorithms.items()):
        if algorithm.least_ranks <= ranks <= algorithm.most_ranks:
            for root in sorted({0, ranks - 1}) if algorithm.collective in ROOTED else [0]:
                yield name, root, algorithm.plan(ranks, root=root)


def _numbers(native: Any) -> Iterator[list[int]]:
    yield [native.nblocks, native.nops, native.nrefs, native.npeers, native.parts, native.scratch_slots,
           native.packet_slots, native.synchronising, native.id, native.unit]  # fmt: skip
    yield [native.begin[k] for k in range(native.nblocks + 1)]
    for k in range(native.nops):
        op = native.ops[k]
        yield [op.code, op.flags, op.channel, op.size_buffer, op.ndst, op.nsrc, op.ref, op.peer, op.npeers,
               op.size_index, op.size_part, op.target]  # fmt: skip
    for k in range(native.nrefs):
        ref = native.refs[k]
        yield [ref.buffer, ref.rank, ref.index, ref.part]
    yield [native.peers[k] for k in range(native.npeers)]


def dump(worlds: list[int]) -> str:
    """The file's text: a line `plan name collective ranks root needs`, then the program of each rank in numbers."""
    lines = []
    for ranks in worlds:
        for name, root, plan in plans(ranks):
            needs = sum(1 << bit for bit, need in enumerate(NEEDS) if need in plan.requires)
            lines.append(f"plan {name} {COLLECTIVE_CODES[plan.collective]} {ranks} {root} {needs}")
            for rank in range(ranks):
                native, keep = as_native(plan.program(rank), plan, identifier(name))
                lines += [" ".join(map(str, row)) for row in _numbers(native)]
                del keep
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(dump([int(ranks) for ranks in sys.argv[2:]] or [2, 3, 4]))
