"""Broken plans are caught: the controls of the reference interpreter, and of the plans' tests with it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from commrt.algorithm import Algorithm, Program, mine, out, packets, scratch
from commrt.errors import CommrtError, Deadlock, PlanError
from commrt.plan import Operation, Plan, operations
from commrt.testing import reference

from .cases import ALGORITHMS, make_case

SEEDS = range(12)
SEVERAL = [name for name, algorithm in ALGORITHMS.items() if algorithm.most_ranks > 1]


def edited(plan: Plan, rank: int, block: int, position: int, replacement: tuple[Operation, ...]) -> Plan:
    """The plan with one operation of one rank replaced."""
    programs = list(plan.programs)
    blocks = list(programs[rank].blocks)
    blocks[block] = (*blocks[block][:position], *replacement, *blocks[block][position + 1 :])
    programs[rank] = msgspec.structs.replace(programs[rank], blocks=tuple(blocks))
    return msgspec.structs.replace(plan, programs=tuple(programs))


def outcome(plan: Plan, seed: int) -> str:
    """What running the plan shows: the error, "wrong data" or "fine"."""
    case = make_case(plan.collective, plan.ranks, 100, 0, False, np.float32, "avg")
    try:
        reference.run(plan, case.inputs, case.outputs, "avg", window=70, seed=seed)
        case.check(in_place=False)
    except CommrtError as error:
        return str(error)
    except AssertionError:
        return "wrong data"
    return "fine"


def caught(plan: Plan) -> bool:
    return any(outcome(plan, seed) != "fine" for seed in SEEDS)


@pytest.mark.parametrize("name", SEVERAL)
def test_every_operation_is_needed(name: str) -> None:
    ranks = min(3, ALGORITHMS[name].most_ranks)
    plan = ALGORITHMS[name].plan(ranks)
    assert not caught(plan)
    for program in plan.programs:
        for block, position, operation in operations(program):
            if operation.name != "loop":
                assert caught(edited(plan, program.rank, block, position, ())), (program.rank, position, operation)


@pytest.mark.parametrize("name", SEVERAL)
def test_every_chunk_matters(name: str) -> None:
    """The first source of each operation, moved to the next slot."""
    plan = ALGORITHMS[name].plan(min(3, ALGORITHMS[name].most_ranks))
    slots = {"scratch": plan.scratch_slots, "packets": plan.packet_slots}
    for program in plan.programs:
        for block, position, operation in operations(program):
            if not operation.src or operation.src[0].buffer not in slots:
                continue
            ref = operation.src[0]
            if slots[ref.buffer] > 1:
                moved = msgspec.structs.replace(ref, index=(ref.index + 1) % plan.ranks)
                mutant = msgspec.structs.replace(operation, src=(moved, *operation.src[1:]))
                assert caught(edited(plan, program.rank, block, position, (mutant,))), (program.rank, operation)


def test_a_dropped_signal_is_a_named_deadlock() -> None:
    plan = ALGORITHMS["all_reduce/ring"].plan(3)
    position = next(at for _, at, operation in operations(plan.program(1)) if operation.name == "signal")
    case, mutant = make_case("all_reduce", 3, 10, 0, False), edited(plan, 1, 0, position, ())
    with pytest.raises(Deadlock, match=r"rank 2, block 0, operation \d+ \(wait\) waits on channel 0 for ranks \[1\]"):
        reference.run(mutant, case.inputs, case.outputs)


def test_swapped_shards_are_wrong_data() -> None:
    plan = ALGORITHMS["all_gather/put"].plan(3)
    copies = [(at, operation) for _, at, operation in operations(plan.program(0)) if operation.name == "copy"][1:]
    (first, one), (_, other) = copies
    mutant = edited(plan, 0, 0, first, (msgspec.structs.replace(one, dst=other.dst),))
    assert outcome(mutant, 0) == "wrong data"


def test_leaving_early_is_caught() -> None:
    """The closing handshake of a direct plan, dropped on both sides."""
    plan = msgspec.structs.replace(ALGORITHMS["send/direct"].plan(2), launch_class="one_way")
    plan = edited(edited(plan, 0, 0, 1, ()), 1, 0, 2, ())
    assert any("which has left" in outcome(plan, seed) for seed in SEEDS)


def hand_written(build: object, **facts: object) -> Plan:
    return Algorithm("all_reduce", "broken", build, **facts).plan(2)  # type: ignore[arg-type]


def test_a_packet_slot_written_twice() -> None:
    def build(program: Program) -> None:
        block = program.block()
        for _ in range(2):
            block.put_packets([packets(0, 1 - program.rank)], mine(), mine())
        block.reduce_packets([out()], [packets(0), mine()], mine(), final=True)

    plan = hand_written(build, packet_slots=lambda ranks: 1, requires=("mapped",))
    assert "writes packet slot 0 of rank" in outcome(plan, 1)


def test_writing_the_input() -> None:
    def build(program: Program) -> None:
        program.block().reduce([mine()], [mine()], mine(), final=True)

    assert "writes to the input of rank" in outcome(hand_written(build), 1)


def test_a_false_claim_to_synchronise() -> None:
    plan = msgspec.structs.replace(ALGORITHMS["broadcast/put"].plan(3), launch_class="synchronising")
    assert "is not synchronising" in outcome(plan, 1)


def test_a_source_overwritten_while_its_put_is_under_way() -> None:
    def build(program: Program) -> None:
        peer = 1 - program.rank
        block = program.block()
        block.copy(scratch(0), mine(), mine())
        block.put(scratch(1, peer), scratch(0), mine())
        block.signal(0, [peer])
        block.reduce([scratch(0)], [scratch(0), scratch(0)], mine())
        block.wait(0, [peer])
        block.reduce([out()], [mine(), scratch(1)], mine(), final=True)

    plan = hand_written(build, scratch_slots=lambda ranks: 2, channels=1)
    assert any(outcome(plan, seed) == "wrong data" for seed in SEEDS)


def test_barriers_order_the_blocks_of_a_rank() -> None:
    def build(program: Program, ordered: bool = True) -> None:
        first, second = program.block(), program.block()
        first.copy(scratch(0), mine(), mine())
        if ordered:
            first.barrier()
            second.barrier()
        second.put(scratch(1, 1 - program.rank), scratch(0), mine())
        second.signal(0, [1 - program.rank])
        second.wait(0, [1 - program.rank])
        second.reduce([out()], [mine(), scratch(1)] if program.rank == 0 else [scratch(1), mine()], mine(), final=True)

    facts = {"scratch_slots": lambda ranks: 2, "channels": 1}
    assert not caught(hand_written(build, **facts))
    assert caught(hand_written(lambda program: build(program, ordered=False), **facts))


def test_plan_errors_are_argument_errors() -> None:
    assert issubclass(PlanError, ValueError)
