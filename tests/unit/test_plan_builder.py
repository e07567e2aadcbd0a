"""The builder that algorithms are written with."""

from __future__ import annotations

import pytest

from commrt.algorithm import Algorithm, Block, Program, mine, out, packets, scratch
from commrt.errors import PlanError
from commrt.plan import SELF, Operation, Ref, Size


def test_references() -> None:
    assert mine(1, 2) == Ref("input", 1, 2, SELF)
    assert out(1, 2, 3) == Ref("output", 1, 2, 3)
    assert scratch(4) == Ref("scratch", 4, 0, SELF)
    assert packets(4, 5) == Ref("packets", 4, 0, 5)


def test_sizes_come_from_the_chunk_named() -> None:
    block = Block()
    block.copy(out(), scratch(0), mine(2, 1))
    block.copy(out(), scratch(0), out(0, 1))
    assert [operation.size for operation in block.operations] == [Size("input", 2, 1), Size("output", 0, 1)]


def test_loops_slice_what_moves_data() -> None:
    block = Block()
    block.wait(0, [1])

    def body() -> None:
        block.put(scratch(0, 1), mine(), mine())
        block.signal(0, [1])

    block.loop(body, mine())
    block.copy(out(), scratch(0), mine())
    assert [operation.sliced for operation in block.operations] == [False, True, False, False, False]
    assert block.operations[3] == Operation("loop", target=1)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_peers_start_behind_the_rank(ranks: int) -> None:
    orders = [Program(rank, ranks).peers for rank in range(ranks)]
    for rank, order in enumerate(orders):
        assert sorted([*order, rank]) == list(range(ranks))
    for step in zip(*orders, strict=True):
        assert len(set(step)) == ranks


def test_an_algorithm_out_of_bounds_is_refused() -> None:
    def build(program: Program) -> None:
        program.block().copy(out(), scratch(1), mine())

    with pytest.raises(PlanError, match="scratch index 1"):
        Algorithm("all_reduce", "bad", build, scratch_slots=lambda ranks: 1).plan(2)


def test_the_root_reaches_the_builder() -> None:
    def build(program: Program) -> None:
        block = program.block()
        if program.rank == program.root:
            block.copy(out(), mine(), mine())

    plan = Algorithm("broadcast", "mock", build).plan(3, root=2)
    assert [len(program.blocks[0]) for program in plan.programs] == [0, 0, 1]
