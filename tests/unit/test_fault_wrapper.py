"""Links that delay and reorder change nothing; one that loses or breaks ends operations with an error that says so."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from typing import Any

import pytest

from commrt.communicator import Communicator
from commrt.errors import (
    CommunicatorBroken,
    ConfigError,
    OperationError,
    OperationTimeout,
    PeerLost,
    TransportError,
)
from commrt.group import Options
from commrt.ports import Request
from commrt.testing import matrix, operations
from commrt.testing.calls import bind
from commrt.testing.data import Case, Trial
from commrt.testing.world import World
from commrt.transports.fault.transport import Faults, Trouble

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

INNER = pytest.mark.parametrize("inner", ["loopback", "shm"])
HARMLESS = {
    "delay": {"delay_s": 0.0005},
    "reorder": {"reorder": True},
    "both": {"delay_s": 0.0002, "reorder": True},
}
ALGORITHMS = [
    ("all_reduce", "ring"),
    ("all_reduce", "pairs"),
    ("all_reduce", "pipelined"),
    ("broadcast", "tree"),
    ("broadcast", "put"),
    ("all_gather", "ring"),
    ("reduce_scatter", "put"),
    ("reduce", "pairs"),
    ("gather", "put"),
    ("scatter", "put"),
    ("all_to_all", "put"),
    ("sendrecv", "put"),
    ("barrier", "dissemination"),
    ("barrier", "flat"),
]
TIMEOUT_S = 0.5


def faulty(size: int, **faults: Any) -> World:
    options = Options({"fault": Faults(**faults)})
    return World(size, "fault", options=options, shared_engine=faults["inner"] == "loopback", timeout_s=TIMEOUT_S * 20)


@INNER
@pytest.mark.parametrize("fault", HARMLESS)
@pytest.mark.parametrize("size", [2, 4])
def test_delay_and_reorder_change_nothing(inner: str, fault: str, size: int) -> None:
    with faulty(size, inner=inner, seed=size, **HARMLESS[fault]) as world:
        whole = matrix.variants(size, world.communicators[0].capabilities, only=(0, 1, size + 1, 3001))
        chosen = matrix.sample(whole, 60, seed=size)
        assert world.run(lambda comm: matrix.run(comm, chosen)) == [60] * size


@INNER
@pytest.mark.parametrize("fault", HARMLESS)
def test_random_operations_with_delays(inner: str, fault: str) -> None:
    with faulty(3, inner=inner, **HARMLESS[fault]) as world:
        assert world.run(lambda comm: operations.run(comm, 60, 21)) == [60] * 3


@pytest.mark.parametrize("fault", HARMLESS)
def test_a_tiny_lap_with_delays(fault: str) -> None:
    options = Options({"fault": Faults(**HARMLESS[fault])}, epoch=3, lap=6)
    with World(3, "fault", options=options) as world:
        assert world.run(lambda comm: operations.run(comm, 60, 22)) == [60] * 3


def until_it_fails(comm: Communicator, collective: str, algorithm: str) -> OperationError:
    """Repeat a collective until its links fail; every call that returns must have been right."""
    trial = Trial(Case(collective, comm.size, 100, "int64"), comm.rank)
    call = bind(comm, trial, algorithm, timeout=TIMEOUT_S)
    for turn in range(500):
        trial.fill(turn)
        found: list[OperationError] = []
        try:
            call()
        except OperationError as error:
            found.append(error)
        if found:
            with pytest.raises(CommunicatorBroken) as later:
                comm.barrier()
            assert str(found[0]) in str(later.value)
            return found[0]
        assert trial.wrong() == 0
    raise AssertionError("the link never failed")


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("kind", [{"drop": 0.02}, {"cut_after": 40}], ids=["drop", "cut"])
def test_a_link_that_loses_or_breaks(kind: dict[str, Any], collective: str, algorithm: str) -> None:
    start = time.monotonic()
    with faulty(3, inner="loopback", seed=5, **kind) as world:
        errors = world.run(lambda comm: until_it_fails(comm, collective, algorithm))
        took = time.monotonic() - start
        for comm in world.communicators:
            comm._close(0.0)
    assert took < 8 * TIMEOUT_S
    assert all(isinstance(error, (OperationTimeout, PeerLost, TransportError)) for error in errors)
    named = [error for error in errors if error.context.peer is not None]
    assert named, errors
    assert all(error.context.rank == rank for rank, error in enumerate(errors))


@INNER
def test_a_cut_link_is_named_by_who_used_it(inner: str) -> None:
    with faulty(2, inner=inner, cut_after=9) as world:
        errors = world.run(lambda comm: until_it_fails(comm, "all_reduce", "pairs"))
    assert any(isinstance(error, (PeerLost, TransportError)) for error in errors)
    assert {error.context.peer for error in errors} <= {0, 1}
    assert all(error.context.operation == "all_reduce" for error in errors)


def test_a_lost_signal_names_who_waits_for_whom() -> None:
    with faulty(2, inner="loopback", drop=1.0) as world:
        errors = world.run(lambda comm: until_it_fails(comm, "all_reduce", "pairs"))
    for rank, error in enumerate(errors):
        assert isinstance(error, OperationTimeout)
        assert error.context.peer == 1 - rank
        assert "all_reduce(count 100, dtype int64, op sum" in str(error)
        assert f"for rank {1 - rank}" in str(error)


def arrivals(faults: Faults, seed: int) -> list[int]:
    """What of 200 requests arrives, by offset, in the order of arrival. Each tenth is a signal."""
    queue = deque(Request(turn, value=turn if turn % 10 == 9 else None) for turn in range(200))
    trouble = Trouble(faults, random.Random(seed))
    found = []
    with contextlib.suppress(ConnectionError):
        for request in trouble(queue):
            found.append(request.offset)
    return found


def test_faults_follow_from_their_seed() -> None:
    for faults in (Faults(drop=0.02), Faults(reorder=True), Faults(reorder=True, drop=0.01, cut_after=150)):
        runs = [arrivals(faults, seed) for seed in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]


def test_what_faults_do() -> None:
    assert arrivals(Faults(), 3) == list(range(200))
    assert arrivals(Faults(cut_after=40), 3) == list(range(40))
    assert arrivals(Faults(drop=1.0), 3) == []
    lossy = arrivals(Faults(drop=0.02), 3)
    assert lossy == list(range(len(lossy)))
    assert 0 < len(lossy) < 200
    mixed = arrivals(Faults(reorder=True), 3)
    assert mixed != sorted(mixed)
    assert [mixed.index(signal) for signal in range(9, 200, 10)] == list(range(9, 200, 10))
    assert all(sorted(mixed[first : first + 9]) == list(range(first, first + 9)) for first in range(0, 200, 10))


def test_the_wrapper_wants_faults_and_a_mapped_link() -> None:
    with pytest.raises(ConfigError, match="needs the option `fault`"):
        World(2, "fault")
    with pytest.raises(ConfigError, match="wraps mapped transports"):
        World(2, "fault", options=Options({"fault": Faults(), "family": "port"}))
