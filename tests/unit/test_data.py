"""The crafted data is exact, differs where it must, and its checks fail on any wrong bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from commrt.dtypes import DTYPES, REDUCE_OPS, REDUCIBLE
from commrt.errors import UnsupportedType
from commrt.testing.data import (
    ARITHMETIC,
    COLLECTIVES,
    PERIOD,
    REDUCING,
    REDUCTIONS,
    Case,
    Guarded,
    Stream,
    Trial,
    numpy_dtype,
)
from commrt.testing.folding import fold

pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")

SIZES = (1, 2, 3, 4, 5, 8, 64)
MOVING = [dtype.name for dtype in DTYPES]


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())


def test_the_lists_are_those_of_the_runtime() -> None:
    assert set(ARITHMETIC) == {dtype.name for dtype in REDUCIBLE}
    assert set(REDUCTIONS) == {op.name for op in REDUCE_OPS}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_any_order_of_reduction_is_exact(dtype: str, op: str, size: int) -> None:
    """Folded in one go, and in pairs in random order with a rounding after each: both are what is expected."""
    inputs = [Stream(dtype, op, size, rank).read(0, 4001) for rank in range(size)]
    expected = Stream(dtype, op, size, None)
    assert same(fold(inputs, op, size), expected.read(0, 4001))
    if op == "avg":
        return
    shuffled = random.Random(size)
    while len(inputs) > 1:
        shuffled.shuffle(inputs)
        inputs.append(fold([inputs.pop(), inputs.pop()], op))
    assert expected.count_wrong(0, inputs[0]) == 0


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_leaving_out_a_rank_or_taking_it_twice_shows(dtype: str, op: str, size: int) -> None:
    inputs = [Stream(dtype, op, size, rank).read(0, 4001) for rank in range(size)]
    expected = Stream(dtype, op, size, None)
    assert expected.count_wrong(0, fold(inputs[1:], op, size)) > 20
    if op in ("sum", "prod", "avg"):
        assert expected.count_wrong(0, fold([*inputs, inputs[0]], op, size)) > 20


@pytest.mark.parametrize("dtype", MOVING)
def test_streams_differ_by_rank_seed_and_place(dtype: str) -> None:
    stream = Stream(dtype, None, 4, 1)
    data = stream.read(0, 3000)
    others = [Stream(dtype, None, 4, 2), Stream(dtype, None, 4, 1, seed=1)]
    assert all(other.count_wrong(0, data) > 1000 for other in others)
    assert all(stream.count_wrong(1 << shift, data) > 1000 for shift in range(24))


@pytest.mark.parametrize("dtype", MOVING)
@pytest.mark.parametrize("start", [0, PERIOD - 7, 5 * PERIOD + 3])
def test_reading_in_parts_gives_the_same(dtype: str, start: int) -> None:
    stream = Stream(dtype, None, 2, 1, seed=3)
    whole = stream.read(start, 2 * PERIOD)
    parts = [stream.read(start + at, 1000) for at in range(0, 2 * PERIOD - 1000, 1000)]
    assert same(whole[: 1000 * len(parts)], np.concatenate(parts))


@pytest.mark.parametrize("dtype", MOVING)
def test_one_flipped_bit_is_one_wrong_element(dtype: str) -> None:
    stream = Stream(dtype, None, 2, 1)
    chooser = random.Random(dtype)
    for count in (1, 7, PERIOD + 5):
        data = stream.read(9, count)
        assert stream.count_wrong(9, data) == 0
        raw = data.view(np.uint8)
        raw[chooser.randrange(len(raw))] ^= 1 << chooser.randrange(8)
        assert stream.count_wrong(9, data) == 1


def carry_out(case: Case, trials: list[Trial]) -> None:
    """The collective in a few lines of numpy, on the trials' own buffers."""
    n, xs = case.count, [None if trial.x is None else trial.x.copy() for trial in trials]
    given: list[Any] = [np.empty(0) if x is None else x for x in xs]
    reduced = fold(given, case.op, case.size) if case.collective in REDUCING else None
    for rank, trial in enumerate(trials):
        mine = slice(rank * n, (rank + 1) * n)
        results: dict[str, Any] = {
            "all_reduce": reduced,
            "reduce": reduced,
            "reduce_scatter": None if reduced is None else reduced[mine],
            "broadcast": given[case.root],
            "scatter": given[case.root][mine],
            "all_gather": np.concatenate(given),
            "gather": np.concatenate(given),
            "all_to_all": np.concatenate([x[mine] for x in given]),
            "sendrecv": given[rank - 1],
        }
        if trial.out is not None and case.collective in results:
            trial.out[:] = results[case.collective]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 0), (3, 1), (4, 1021)])
def test_a_right_result_passes_and_a_wrong_one_does_not(collective: str, size: int, count: int, in_place: bool) -> None:
    case = Case(collective, size, count, "float16", "sum", root=size - 1, seed=2)
    trials = [Trial(case, rank, in_place, misalign=2) for rank in range(size)]
    for trial in trials:
        trial.fill()
    unfinished = [trial.wrong() for trial in trials]
    carry_out(case, trials)
    assert [trial.wrong() for trial in trials] == [0] * size
    if collective == "barrier" or not count or size == 1:
        return
    assert sum(unfinished) > 0
    for trial in trials:
        if trial.out is not None:
            assert trial.out.size == case.output_count
            trial.out.view(np.uint8)[-1] ^= 1
            assert trial.wrong() >= 1


def test_expected_is_what_a_right_result_holds() -> None:
    case = Case("all_to_all", 3, 10, "int32")
    trial = Trial(case, 1)
    trial.fill()
    assert trial.out is not None
    trial.out[:] = case.expected(1)
    assert trial.wrong() == 0
    assert Case("gather", 3, 10).expected(1) is None
    assert [x.size for x in case.inputs()] == [30, 30, 30]


def test_a_changed_input_shows() -> None:
    case = Case("all_gather", 2, 16)
    trial = Trial(case, 0)
    trial.fill()
    assert trial.x is not None
    assert trial.out is not None
    trial.out[:] = case.expected(0)
    trial.x[3] += 1
    assert trial.wrong() == 1


def test_what_is_left_from_the_last_call_is_wrong() -> None:
    case = Case("all_gather", 2, 16)
    trial = Trial(case, 0)
    for seed in (1, 2):
        trial.fill(seed)
        assert trial.wrong() == 32
        assert trial.out is not None
        trial.out[:] = trial.case.expected(0)
        assert trial.wrong() == 0


@pytest.mark.parametrize("misalign", [0, 1, 8])
def test_guards_find_writes_next_to_the_array(misalign: int) -> None:
    guarded = Guarded("int32", 10, misalign)
    assert guarded.array.ctypes.data % 64 == misalign
    guarded.clobber()
    assert guarded.broken() == 0
    memory = np.lib.stride_tricks.as_strided(guarded.array.view(np.uint8)[:1], (42,), (1,))
    memory[41] = 0
    assert guarded.broken() == 1


def test_what_numpy_lacks_says_what_to_install() -> None:
    with pytest.raises(UnsupportedType, match="no float24: install the package ml_dtypes"):
        numpy_dtype("float24")
