"""Every algorithm against numpy, by the reference interpreter: sizes, roots, in and out of place, random schedules."""

from __future__ import annotations

import numpy as np
import pytest

from commrt.plan import load
from commrt.testing import reference

from .cases import ALGORITHMS, ROOTED, can_alias, make_case, roots

RANKS = range(1, 10)
PAIRS = [(n, r) for n, a in ALGORITHMS.items() for r in RANKS if a.least_ranks <= r <= a.most_ranks]


@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_exact(name: str, ranks: int) -> None:
    algorithm = ALGORITHMS[name]
    for root in roots(algorithm.collective, ranks):
        plan = algorithm.plan(ranks, root=root)
        for count in sorted({0, 1, ranks - 1, ranks + 1, 1021}):
            for in_place in (False, True)[: 1 + can_alias(algorithm.collective)]:
                case = make_case(algorithm.collective, ranks, count, root, in_place)
                reference.run(plan, case.inputs, case.outputs, seed=None)
                case.check(in_place)


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, ranks in PAIRS if ranks <= 6])
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_and_windows(name: str, ranks: int, seed: int) -> None:
    algorithm = ALGORITHMS[name]
    root = seed % ranks if algorithm.collective in ROOTED else 0
    in_place = seed % 2 == 1 and can_alias(algorithm.collective)
    case = make_case(algorithm.collective, ranks, 300 + seed, root, in_place)
    reference.run(algorithm.plan(ranks, root=root), case.inputs, case.outputs, window=130, seed=seed)
    case.check(in_place)


@pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8, np.float64])
@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if "reduce" in algorithm.collective])
def test_reductions(name: str, dtype: type, reduction: str) -> None:
    algorithm = ALGORITHMS[name]
    ranks = min(4, algorithm.most_ranks)
    case = make_case(algorithm.collective, ranks, 100, 0, False, dtype, reduction)
    reference.run(algorithm.plan(ranks), case.inputs, case.outputs, reduction, seed=1)
    case.check(in_place=False)


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.unit])
def test_many_slices(name: str) -> None:
    """Parts of several units, the last part shorter than the others and one of them empty."""
    algorithm = ALGORITHMS[name]
    line = algorithm.unit // 4
    for count in (line * 7 + 5, 3 * 16 + 1):
        case = make_case(algorithm.collective, 4, count, 0, True)
        reference.run(algorithm.plan(4), case.inputs, case.outputs, seed=3)
        case.check(in_place=True)


@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_plans_survive_json(name: str, ranks: int) -> None:
    plan = ALGORITHMS[name].plan(ranks)
    again = load(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_slice_is_what_the_whole_plan_says(name: str) -> None:
    algorithm = ALGORITHMS[name]
    ranks = min(5, algorithm.most_ranks)
    whole = algorithm.plan(ranks)
    for rank in range(ranks):
        assert algorithm.plan(ranks, only=[rank]).programs == (whole.program(rank),)


def test_every_collective_runs_on_plain_links_and_alone() -> None:
    collectives = {algorithm.collective for algorithm in ALGORITHMS.values()}
    plain = {a.collective for a in ALGORITHMS.values() if not a.requires and a.most_ranks >= 2}
    alone = {algorithm.collective for algorithm in ALGORITHMS.values() if algorithm.least_ranks == 1}
    assert plain == collectives
    assert alone == collectives - {"send"}


def test_ring_sums_in_its_documented_order() -> None:
    """Part p is ((x[p] + x[p + 1]) + ...) + x[p - 1]: 2^24 + 1 - 2^24 tells the orders apart."""
    ranks, lines = 3, 16
    big = np.float32(1 << 24)
    inputs = [np.full(ranks * lines, value, np.float32) for value in (big, 1, -big)]
    outputs = [np.zeros(ranks * lines, np.float32) for _ in inputs]
    reference.run(ALGORITHMS["all_reduce/ring"].plan(ranks), inputs, outputs)
    want = [(big + np.float32(1)) - big, (np.float32(1) - big) + big, (-big + big) + np.float32(1)]
    for output in outputs:
        np.testing.assert_array_equal(output, np.repeat(want, lines))
    assert len(set(want)) > 1


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.most_ranks >= 64])
def test_sixty_four_ranks(name: str) -> None:
    algorithm = ALGORITHMS[name]
    case = make_case(algorithm.collective, 64, 70, 0, False, np.int32)
    reference.run(algorithm.plan(64, root=0), case.inputs, case.outputs)
    case.check(in_place=False)
