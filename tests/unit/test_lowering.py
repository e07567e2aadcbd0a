"""Syncs are put where threads of a block share what they touch, there alone, and change nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from commrt.algorithm import Block, mine, out, packets, scratch
from commrt.lowering import with_syncs
from commrt.plan import Operation, Plan, RankProgram, validate
from commrt.plugins import default_registry
from commrt.testing import reference

ALGORITHMS = default_registry().usable("algorithms")
SUMS = [
    (name, ranks)
    for name, algorithm in sorted(ALGORITHMS.items())
    for ranks in (2, 3, 4)
    if algorithm.collective == "all_reduce" and algorithm.least_ranks <= ranks <= algorithm.most_ranks
]


def lowered(block: Block) -> list[str]:
    """The operations' names, of loops with their targets."""
    (operations,) = with_syncs(RankProgram(0, (tuple(block.operations),))).blocks
    return [f"loop to {op.target}" if op.name == "loop" else op.name for op in operations]


def test_what_was_written_is_read_behind_a_sync() -> None:
    block = Block()
    block.copy(scratch(0), mine(), mine())
    block.copy(scratch(1), mine(), mine())
    block.put(scratch(0, 1), scratch(0), mine())
    block.copy(out(), scratch(1), mine())
    assert lowered(block) == ["copy", "copy", "sync", "put", "copy"]


def test_what_was_read_is_written_behind_a_sync() -> None:
    block = Block()
    block.put(scratch(0, 1), scratch(1), mine())
    block.copy(scratch(1), mine(), mine())
    block.copy(scratch(1), scratch(2), mine())
    assert lowered(block) == ["put", "sync", "copy", "sync", "copy"]


def test_the_users_buffers_may_be_one() -> None:
    block = Block()
    block.put(scratch(0, 1), mine(0, 1), mine(0, 1))
    block.copy(out(0, 0), scratch(3), mine(0, 0))
    block.copy(out(1, 1), scratch(4), mine(0, 1))
    assert lowered(block) == ["put", "copy", "sync", "copy"]


@pytest.mark.parametrize("meeting", ["signal", "wait", "barrier", "reduce"])
def test_where_threads_meet_no_sync_is_needed(meeting: str) -> None:
    block = Block()
    block.copy(scratch(0), mine(), mine())
    if meeting == "reduce":
        block.reduce([scratch(2)], [scratch(0), scratch(1)], mine())
    elif meeting == "barrier":
        block.barrier()
    else:
        getattr(block, meeting)(0, [1])
    block.copy(out(), scratch(0), mine())
    assert lowered(block) == ["copy", meeting, "copy"]


def test_a_reduction_is_read_behind_a_sync() -> None:
    block = Block()
    block.reduce([out()], [mine(), scratch(1)], mine(), final=True)
    block.put(scratch(0, 1), out(), mine())
    assert lowered(block) == ["reduce", "sync", "put"]


def test_operations_on_packets_deal_out_words_alike() -> None:
    block = Block()
    block.put_packets([packets(0, 1)], mine(), mine())
    block.reduce_packets([out(), packets(1, 1)], [mine(), packets(0)], mine(), final=True)
    block.unpack_packets(out(), packets(1), mine())
    assert lowered(block) == ["put_packets", "reduce_packets", "unpack_packets"]
    block.copy(scratch(0), out(), mine())
    block.put_packets([packets(2, 1)], out(), mine())
    block.unpack_packets(scratch(0), packets(2), mine())
    assert lowered(block)[3:] == ["sync", "copy", "put_packets", "sync", "unpack_packets"]


def test_memory_of_different_ranks_differs() -> None:
    block = Block()
    block.put(scratch(0, 1), mine(), mine())
    block.put(scratch(0, 2), mine(), mine())
    block.copy(out(), scratch(0), mine())
    assert lowered(block) == ["put", "put", "sync", "copy"]  # the last is for an output that is the input


def test_loops_turn_to_the_same_operation() -> None:
    block = Block()
    block.copy(scratch(0), mine(), mine())

    def body() -> None:
        block.copy(scratch(1), scratch(0), mine())
        block.put(scratch(0, 1), scratch(1), mine())

    block.loop(body, mine())
    block.copy(out(), scratch(1), mine())
    assert lowered(block) == ["copy", "sync", "copy", "sync", "put", "loop to 2", "copy"]


def test_what_is_not_sliced_meets_the_next_turn() -> None:
    block = Block()
    whole = Operation("copy", (scratch(0),), (mine(),))
    block.operations += [whole, Operation("wait", channel=0, peers=(1,)), whole, Operation("loop", target=0)]
    assert lowered(block) == ["copy", "wait", "copy", "sync", "loop to 0"]


def in_syncs(plan: Plan) -> Plan:
    """The plan as devices run it."""
    return replace(plan, programs=tuple(with_syncs(program) for program in plan.programs))


@pytest.mark.parametrize(("name", "ranks"), SUMS)
def test_plans_stay_what_they_are(name: str, ranks: int) -> None:
    algorithm = ALGORITHMS[name]
    plan = in_syncs(algorithm.plan(ranks))
    validate(plan)
    assert in_syncs(plan) == plan, "nothing is left to put in"
    rest = [[op for op in block if op.name != "sync"] for program in plan.programs for block in program.blocks]
    bare = [list(block) for program in algorithm.plan(ranks).programs for block in program.blocks]
    assert [[replace(op, target=0) for op in block] for block in rest] == [
        [replace(op, target=0) for op in block] for block in bare
    ]
    count = 3 * max(plan.unit, 64) + 5
    inputs = [np.arange(count, dtype=np.float32) + rank for rank in range(ranks)]
    outputs = [np.zeros(count, np.float32) for _ in range(ranks)]
    reference.run(plan, list(inputs), list(outputs), seed=1)
    for output in outputs:
        np.testing.assert_array_equal(output, np.sum(inputs, axis=0))
