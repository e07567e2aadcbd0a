"""Plans of the caller's: run by the contract of their collective; a deadlock is ended at once, and its cycle shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from commrt.algorithm import Algorithm, Program, mine, out, packets, scratch
from commrt.errors import CommunicatorBroken, Deadlock, InvalidArgument, Mismatch, OperationTimeout, PlanError
from commrt.group import Options
from commrt.plan import Plan
from commrt.testing.world import World

ENDS_S = 1.0
Build = Callable[[Program], None]


def plan(build: Build, ranks: int, **more: Any) -> Plan:
    options = {"parts": lambda ranks: 1, "scratch_slots": lambda ranks: ranks, "channels": 2, **more}
    return Algorithm("all_reduce", "by_hand", build, **options).plan(ranks)


def gather_and_sum(program: Program) -> None:
    """Right: everyone puts into slot `rank` of everyone, and sums."""
    block = program.block()
    for peer in program.peers:
        block.put(scratch(program.rank, peer), mine(), mine())
    block.signal(0, program.peers)
    block.wait(0, program.peers)
    sources = [mine() if rank == program.rank else scratch(rank) for rank in range(program.ranks)]
    block.reduce([out()], sources, mine(), final=True)


def waits_first(program: Program) -> None:
    """Each waits for its predecessor before it signals its successor."""
    block = program.block()
    block.wait(0, [(program.rank - 1) % program.ranks])
    block.signal(0, [(program.rank + 1) % program.ranks])


def forgets_a_signal(program: Program) -> None:
    """As `gather_and_sum`, but rank 1 leaves rank 0 out; then all meet."""
    block = program.block()
    block.signal(0, [peer for peer in program.peers if (program.rank, peer) != (1, 0)])
    block.wait(0, program.peers)
    block.signal(1, program.peers)
    block.wait(1, program.peers)


def crosses_a_barrier(program: Program) -> None:
    """Block 0 of rank 0 is at the barrier, for block 1, which waits for rank 1, which waits for rank 0 behind it."""
    first, second = program.block(), program.block()
    first.barrier()
    if program.rank == 0:
        first.signal(0, [1])
        second.wait(1, [1])
        second.barrier()
    else:
        second.wait(0, [0])
        second.signal(1, [0])
        second.barrier()


def reads_what_nobody_writes(program: Program) -> None:
    """Rank 1 sends packets to nobody; the others wait for them."""
    block = program.block()
    if program.rank != 1:
        block.unpack_packets(out(), packets(0), mine())
    block.signal(0, program.peers)
    block.wait(0, program.peers)


def run_on_all(world: World, custom: Plan) -> tuple[list[Any], float]:
    start = time.monotonic()
    errors = world.outcomes(lambda comm: comm.run_plan(custom, np.ones(100, np.float32)))
    return errors, time.monotonic() - start


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_of_waits_is_shown(ranks: int) -> None:
    with World(ranks) as world:
        errors, took = run_on_all(world, plan(waits_first, ranks))
        assert took < ENDS_S
        for rank, error in enumerate(errors):
            assert type(error) is Deadlock, error
            assert str(error).startswith("no block of any rank can move: ")
            assert ": a cycle" in str(error)
            for each in range(ranks):
                place = f"rank {each} at block 0, operation 0 (wait) on channel 0 for rank {(each - 1) % ranks}"
                assert place in str(error), error
            assert error.context.rank == rank
            assert error.context.peer == (rank - 1) % ranks
            assert error.context.operation == "all_reduce"
        for error in world.outcomes(lambda comm: comm.barrier()):
            assert isinstance(error, CommunicatorBroken)


def test_who_waits_for_the_stuck_is_told_apart_from_the_cycle() -> None:
    """Rank 0 lacks rank 1's signal; the others wait for rank 0 behind that."""
    with World(4) as world:
        errors, took = run_on_all(world, plan(forgets_a_signal, 4))
        assert took < ENDS_S
        for error in errors:
            assert type(error) is Deadlock
            cycle, _, others = str(error).partition(": a cycle; besides, ")
            assert "rank 0 at block 0, operation 1 (wait) on channel 0 for rank 1" in cycle
            assert "rank 1 at block 0, operation 3 (wait) on channel 1 for rank 0" in cycle
            assert "rank 2 at block 0, operation 3 (wait) on channel 1 for rank 0" in others
            assert "rank 3 at" in others


def test_a_cycle_through_a_barrier_of_blocks() -> None:
    with World(2) as world:
        errors, took = run_on_all(world, plan(crosses_a_barrier, 2))
        assert took < ENDS_S
        for error in errors:
            assert type(error) is Deadlock
            cycle = str(error).partition(": a cycle")[0]
            assert "rank 0 at block 0, operation 0 (barrier)" in cycle
            assert "rank 0 at block 1, operation 0 (wait) on channel 1 for rank 1" in cycle
            assert "rank 1 at block 1, operation 0 (wait) on channel 0 for rank 0" in cycle


def test_packets_that_nobody_sends() -> None:
    custom = plan(reads_what_nobody_writes, 3, packet_slots=lambda ranks: 1, requires=("mapped",))
    with World(3) as world:
        errors, took = run_on_all(world, custom)
        assert took < ENDS_S
        for error in errors:
            assert type(error) is Deadlock
            assert "rank 0 at block 0, operation 0 (unpack_packets)" in str(error)
            assert "rank 1 at block 0, operation 1 (wait) on channel 0 for rank 2" in str(error)


def test_ranks_that_have_ended_their_part_learn_of_it_too() -> None:
    """Rank 1's part needs nobody: it returns; what the others are stuck in shows at its next operation."""

    def leaves_early(program: Program) -> None:
        block = program.block()
        if program.rank == 1:
            block.copy(out(), mine(), mine())
        else:
            block.wait(0, [1])

    custom = plan(leaves_early, 2, launch_class="one_way")
    with World(2) as world:
        errors, took = run_on_all(world, custom)
        assert took < ENDS_S
        assert type(errors[0]) is Deadlock
        assert "rank 0 at block 0, operation 0 (wait) on channel 0 for rank 1" in str(errors[0])
        assert not isinstance(errors[1], Exception)
        assert isinstance(world.outcomes(lambda comm: comm.barrier())[1], Deadlock)


def test_who_is_late_is_no_deadlock() -> None:
    with World(3) as world:

        def run(comm: Any) -> Any:
            time.sleep(0.3 * comm.rank)
            return comm.run_plan(plan(gather_and_sum, 3), np.full(10, comm.rank + 1.0))

        for result in world.run(run):
            assert (result == 6).all()


def test_without_a_shared_engine_it_ends_with_the_timeout() -> None:
    """Nobody sees all ranks: each says what it waits for."""
    with World(2, "shm", shared_engine=False, timeout_s=1.0) as world:
        errors, _ = run_on_all(world, plan(waits_first, 2))
        for rank, error in enumerate(errors):
            assert isinstance(error, OperationTimeout)
            assert f"operation 0 (wait) on channel 0 for rank {1 - rank}" in str(error) or "gave up" in str(error)


@pytest.mark.parametrize(
    "world_of",
    [
        lambda: World(3),
        lambda: World(3, "shm", shared_engine=False),
        lambda: World(3, options=Options(transport={"family": "port"})),
    ],
    ids=["loopback", "shm", "ports"],
)
def test_a_right_plan_does_its_collective(world_of: Callable[[], World]) -> None:
    custom = plan(gather_and_sum, 3)
    with world_of() as world:

        def run(comm: Any) -> None:
            for count in (1, 1000, 0, 300_000):
                x = np.arange(count) + comm.rank
                result = np.empty_like(x)
                assert comm.run_plan(custom, x, result) is result
                assert (result == np.arange(count) * 3 + 3).all()
                assert (x == np.arange(count) + comm.rank).all()
                comm.run_plan(custom, x)  # in place
                assert (x == np.arange(count) * 3 + 3).all()
            work = comm.run_plan(custom, x := np.full(5, comm.rank), op="max", async_op=True)
            assert work.wait()
            assert (x == 2).all()

        world.run(run)


def test_rooted_plans_and_made_outputs() -> None:
    def fan_out(program: Program) -> None:
        block = program.block()
        if program.rank == program.root:
            for peer in program.peers:
                block.put(scratch(0, peer), mine(), mine())
            block.signal(0, program.peers)
        else:
            block.wait(0, [program.root])
            block.copy(out(), scratch(0), mine())

    def collect(program: Program) -> None:
        block = program.block()
        block.copy(out(program.rank), mine(), mine())
        for peer in program.peers:
            block.put(scratch(program.rank, peer), mine(), mine())
        block.signal(0, program.peers)
        block.wait(0, program.peers)
        for peer in program.peers:
            block.copy(out(peer), scratch(peer), mine())

    one_way = Algorithm("broadcast", "x", fan_out, scratch_slots=lambda n: 1, channels=1, launch_class="one_way")
    both = Algorithm("all_gather", "x", collect, scratch_slots=lambda n: n, channels=1)
    with World(3) as world:

        def run(comm: Any) -> None:
            x = np.full(7, comm.rank)
            comm.run_plan(one_way.plan(3, root=2), x, root=2)
            assert (x == 2).all()
            gathered = comm.run_plan(both.plan(3), np.full(4, comm.rank))
            assert (gathered == np.arange(3)[:, None]).all()

        world.run(run)


def test_plans_that_can_not_run_are_refused_and_harm_nothing() -> None:
    good = plan(gather_and_sum, 3)
    beyond = replace_operation(good, size_part=5)
    by_packets = Algorithm(
        "all_reduce", "x", lambda program: program.block().put_packets([packets(0, program.peers[0])], mine(), mine()),
        packet_slots=lambda ranks: 1, requires=("mapped",),
    ).plan(3)  # fmt: skip
    with World(3, options=Options(transport={"family": "port"})) as world:

        def run(comm: Any) -> None:
            x = np.ones(3)
            with pytest.raises(InvalidArgument, match="for 2 ranks, not 3"):
                comm.run_plan(plan(gather_and_sum, 2), x)
            with pytest.raises(PlanError, match="size part 5 is not in"):
                comm.run_plan(beyond, x)
            with pytest.raises(InvalidArgument, match="needs mapped, which is not offered"):
                comm.run_plan(by_packets, x)
            with pytest.raises(InvalidArgument, match="missing"):
                comm.run_plan(good, None)
            assert (comm.run_plan(good, x) == 3).all()

        world.run(run)


def replace_operation(whole: Plan, size_part: int) -> Plan:
    replace = msgspec.structs.replace
    program = whole.programs[0]
    first = program.blocks[0][0]
    wrong = replace(first, size=replace(first.size, part=size_part))
    program = replace(program, blocks=((wrong, *program.blocks[0][1:]),))
    return replace(whole, programs=(program, *whole.programs[1:]))


def test_ranks_with_different_plans_disagree() -> None:
    """Of the same name; what is compared is what they say."""
    one, other = plan(gather_and_sum, 2), plan(gather_and_sum, 2, channels=1)
    with World(2) as world:
        errors = world.outcomes(lambda comm: comm.run_plan(other if comm.rank else one, np.ones(3)))
        for error in errors:
            assert isinstance(error, Mismatch)
            assert f"#{one.digest[:8]}" in str(error)
            assert f"#{other.digest[:8]}" in str(error)
