"""Random operations, no barrier between, with all ranks in this process. A failure names the seed that replays it."""

from __future__ import annotations

import pytest

from commrt.group import Options
from commrt.testing import operations
from commrt.testing.world import World

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

EVERYTHING = frozenset({"mapped", "direct", "switch"})


def run(size: int, number: int, seed: int, transport: str = "loopback", options: Options | None = None) -> None:
    with World(size, transport, options=options, shared_engine=transport == "loopback") as world:
        assert world.run(lambda comm: operations.run(comm, number, seed)) == [number] * size


@pytest.mark.parametrize(("size", "seed"), [(1, 1), (2, 2), (4, 3), (5, 4)])
def test_two_thousand(size: int, seed: int) -> None:
    run(size, 2000, seed)


def test_an_engine_for_each_rank() -> None:
    run(3, 1000, 5, transport="shm")


def test_ports() -> None:
    run(3, 500, 6, options=Options({"family": "port"}))


def test_a_tiny_lap() -> None:
    run(3, 1000, 7, options=Options(epoch=3, lap=6))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(200, 210))
def test_many_seeds(size: int, seed: int) -> None:
    run(size, 2000, seed)
    run(size, 2000, seed, options=Options(epoch=3, lap=6))


def test_a_seed_replays() -> None:
    first, again, other = (list(operations.steps(4, EVERYTHING, 300, seed)) for seed in (8, 8, 9))
    assert first == again
    assert first != other


def test_the_operations_are_of_all_kinds() -> None:
    steps = list(operations.steps(4, EVERYTHING, 2000, 10))
    variants = [step.variant for step in steps if step.variant is not None]
    assert len({(one.case.collective, one.algorithm) for one in variants}) > 45
    assert len({one.case.count for one in variants}) > 500
    assert {one.case.root for one in variants} == {0, 1, 2, 3}
    assert sum(bool(step.transfers) for step in steps) > 300
    assert sum(step.overlapped for step in steps) > 300
    assert any(one.source == one.target for step in steps for one in step.transfers)
