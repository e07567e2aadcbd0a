"""Ranks that die, stop, raise or leave, as real processes over shared memory: the others raise in time, naming them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from _fault_programs.jobs import Fact, Job, Rank

BOUND_S = 2.0
VICTIM = "victim"  # stands for the rank of who dies
BLOCKED: list[tuple[int, int, str, Fact]] = [
    (2, 0, "all_reduce", {"count": 1}),
    (2, 1, "all_reduce", {"count": 1 << 19}),
    (2, 0, "broadcast", {"count": 5, "root": VICTIM}),
    (2, 1, "broadcast", {"count": 1 << 19, "root": VICTIM}),
    (2, 1, "all_to_all", {"count": 100}),
    (2, 0, "barrier", {}),
    (2, 1, "wait_async", {"count": 50_000}),
    (2, 0, "recv", {"count": 3, "peer": VICTIM}),
    (2, 1, "wait_irecv", {"count": 100_000, "peer": VICTIM}),
    (2, 0, "send", {"count": 1 << 19, "peer": VICTIM}),
    (4, 2, "all_reduce", {"count": 1}),
    (4, 0, "all_reduce", {"count": 1 << 19}),
    (4, 3, "broadcast", {"count": 5, "root": VICTIM}),
    (4, 1, "recv", {"count": 3, "peer": VICTIM}),
]


def assert_lost(fact: Fact, victim: int, since: float) -> None:
    assert fact["error"] == "PeerLost", fact
    assert fact["peer"] == victim, fact
    assert f"rank {victim} died" in fact["message"], fact
    assert fact["at"] - since < BOUND_S, fact


def assert_usable_no_more(rank: Rank) -> None:
    """Later calls raise at once, as does closing nothing; the process ends well."""
    rank.tell("all_reduce", count=3)
    fact = rank.hear("ended")
    assert fact["error"] == "CommunicatorBroken", fact
    assert fact["took"] < 0.1, fact
    rank.tell("close")
    fact = rank.hear("ended")
    assert fact["error"] is None, fact
    assert fact["took"] < 0.5, fact
    assert rank.finish() == 0
    assert rank.stderr == ""


@pytest.mark.parametrize(("size", "victim", "operation", "arguments"), BLOCKED)
def test_killed_while_its_peers_wait(tmp_path: Path, size: int, victim: int, operation: str, arguments: Fact) -> None:
    with Job(tmp_path, size) as job:
        job.ready()
        survivors = job.all_but(victim)
        for rank in survivors:
            rank.tell(operation, **{key: victim if value == VICTIM else value for key, value in arguments.items()})
        for rank in survivors:
            rank.is_blocked()
        killed = job[victim].kill()
        for rank in survivors:
            assert_lost(rank.hear("ended"), victim, killed)
        assert_usable_no_more(survivors[0])


@pytest.mark.parametrize("size", [2, 4])
def test_killed_while_data_flows(tmp_path: Path, size: int) -> None:
    with Job(tmp_path, size) as job:
        job.ready().tell(None, "stream", count=200_000)
        for rank in job.all_but():
            rank.hear("flows")
        killed = job[1].kill()
        for rank in job.all_but(1):
            assert_lost(rank.hear("ended"), 1, killed)


def test_killed_inside_of_an_operation_that_waits_for_another(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        job.ready().tell([0, 1, 2], "all_reduce", count=70_000)
        for rank in job.all_but(3):
            rank.is_blocked()
        killed = job[1].kill()
        for rank in job.all_but(1, 3):
            assert_lost(rank.hear("ended"), 1, killed)
        job[3].tell("all_reduce", count=70_000)
        fact = job[3].hear("ended")
        assert fact["error"] == "PeerLost", fact
        assert fact["peer"] == 1, fact
        assert fact["took"] < BOUND_S, fact


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_killed_while_idle(tmp_path: Path, size: int, operation: str) -> None:
    """The first operation raises; a root, which needs nobody, by the one after."""
    victim = size - 1
    with Job(tmp_path, size) as job:
        job.ready().tell(None, "all_reduce", count=10)
        for rank in job.all_but():
            assert rank.hear("ended")["right"]
        job[victim].kill()
        job[victim].process.wait()
        for rank in job.all_but(victim):
            rank.tell(operation, count=10)
            rank.tell("all_reduce", count=10)
        for rank in job.all_but(victim):
            fact = rank.hear("ended")
            if operation == "broadcast" and fact["error"] is None:
                fact = rank.hear("ended")
            assert_lost(fact, victim, fact["at"] - fact["took"])


def test_two_die_together(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        job.ready().tell([0, 2], "all_reduce", count=10)
        for rank in job.all_but(1, 3):
            rank.is_blocked()
        killed = job[1].kill()
        job[3].kill()
        for rank in job.all_but(1, 3):
            fact = rank.hear("ended")
            assert fact["error"] == "PeerLost", fact
            assert fact["peer"] in (1, 3), fact
            assert "ranks 1, 3 died" in fact["message"], fact
            assert fact["at"] - killed < 3.0, fact


def test_stopped_and_continued(tmp_path: Path) -> None:
    """Who waits names the stopped rank; that one, continued, raises too, though all it needed had come."""
    timeout_s = 2.0
    with Job(tmp_path, 3, timeout_s=timeout_s) as job:
        job.ready()
        job[1].kill(signal.SIGSTOP)
        start = time.monotonic()
        job.tell([0, 2], "all_reduce", count=100)
        for rank in job.all_but(1):
            fact = rank.hear("ended")
            assert fact["error"] == "OperationTimeout", fact
            assert fact["peer"] == 1, fact
            assert "never called by rank 1 (begun so far: 0)" in fact["message"], fact
            assert fact["at"] - start < timeout_s + BOUND_S, fact
        job[1].tell("all_reduce", count=100)
        job[1].kill(signal.SIGCONT)
        fact = job[1].hear("ended")
        assert fact["error"] == "OperationTimeout", fact
        assert fact["took"] < BOUND_S, fact
        assert "gave up waiting for this one" in fact["message"], fact


def test_stopped_in_the_middle_shows_no_life(tmp_path: Path) -> None:
    timeout_s = 2.0
    with Job(tmp_path, 2, timeout_s=timeout_s) as job:
        job.ready().tell([1], "all_reduce", count=1 << 19)
        job[1].is_blocked()
        job[1].kill(signal.SIGSTOP)
        start = time.monotonic()
        job[0].tell("all_reduce", count=1 << 19)
        fact = job[0].hear("ended")
        assert fact["error"] == "OperationTimeout", fact
        assert fact["peer"] == 1, fact
        assert "rank 1 is in it too, but has given no sign of life" in fact["message"], fact
        assert fact["at"] - start < timeout_s + BOUND_S, fact
        continued = job[1].kill(signal.SIGCONT)
        fact = job[1].hear("ended")
        assert fact["error"] == "OperationTimeout", fact
        assert fact["at"] - continued < BOUND_S, fact


def test_late_by_half_the_timeout_is_no_error(tmp_path: Path) -> None:
    with Job(tmp_path, 2, timeout_s=3.0) as job:
        job.ready().tell([0], "all_reduce", count=100)
        job[0].is_blocked()
        job[1].kill(signal.SIGSTOP)
        time.sleep(1.0)
        job[1].kill(signal.SIGCONT)
        job[1].tell("all_reduce", count=100)
        assert all(rank.hear("ended")["right"] for rank in job.all_but())


def test_an_exception_in_one_rank_ends_the_others(tmp_path: Path) -> None:
    with Job(tmp_path, 3, style="with") as job:
        job.ready().tell([0, 1], "all_reduce", count=10)
        for rank in (0, 1):
            job[rank].is_blocked()
        job[2].tell("fail")
        failed = job[2].hear("calling")["at"]
        for rank in (0, 1):
            fact = job[rank].hear("ended")
            assert fact["error"] == "Aborted", fact
            assert "by rank 2" in fact["message"], fact
            assert fact["at"] - failed < BOUND_S, fact
        assert job[2].process.wait(BOUND_S) == 1
        assert "SystemError: as told" in job[2].stderr or job[2].finish() == 1


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    with Job(tmp_path, 3, start=[0, 2], INIT_S="3") as job:
        start = time.monotonic()
        for rank in job.all_but():
            fact = rank.hear("ended")
            assert fact["error"] == "BootstrapTimeout", fact
            assert "rank 1" in fact["message"], fact
            assert fact["at"] - start < 3 + BOUND_S + 5, fact


def test_leaving_without_close_is_silent(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ready().tell(None, "all_reduce", count=10)
        assert all(rank.hear("ended")["right"] for rank in job.all_but())
        job[1].tell("leave")
        assert job[1].process.wait(BOUND_S + 5) == 0
        assert job[1].finish() == 0
        assert job[1].stderr == ""
        job[0].tell("all_reduce", count=10)
        fact = job[0].hear("ended")
        assert fact["error"] == "PeerLost", fact
        assert "rank 1 left" in fact["message"], fact
        assert job[0].finish() == 0
        assert job[0].stderr == ""


def test_leaving_with_work_in_flight_is_silent(tmp_path: Path) -> None:
    """Nobody ever answers the work; the process ends with 0 nevertheless."""
    with Job(tmp_path, 2) as job:
        job.ready().tell([1], "leave_pending", count=1000)
        job[1].hear("ended")
        start = time.monotonic()
        assert job[1].finish() == 0
        assert job[1].stderr == ""
        assert time.monotonic() - start < 1 + BOUND_S


def test_sent_data_outlives_its_sender(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ready().tell([1], "isend", count=100, peer=0)
        job[1].hear("ended")
        assert job[1].finish() == 0
        job[0].tell("recv", count=100, peer=1)
        assert job[0].hear("ended")["right"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_blocked_rank(tmp_path: Path, signum: int) -> None:
    with Job(tmp_path, 2) as job:
        job.ready().tell([0], "all_reduce", count=10)
        job[0].is_blocked()
        sent = job[0].kill(signum)
        status = job[0].process.wait(BOUND_S + 5)
        assert time.monotonic() - sent < BOUND_S
        assert status == -signum, job[0].stderr


@pytest.mark.parametrize("how", ["os._exit", "sys.exit", "multiprocessing"])
def test_a_forked_child_harms_nothing(tmp_path: Path, how: str) -> None:
    """With a receive in flight on both sides; afterwards the parents go on, and the receives end."""
    with Job(tmp_path, 2, PYTHONWARNINGS="ignore::DeprecationWarning") as job:
        job.ready().tell(None, "fork", how=how)
        for rank in job.all_but():
            fact = rank.hear("ended")
            assert fact["error"] is None, fact
            assert fact["right"], rank.stderr
        for operation, arguments in (("all_reduce", {"count": 1000}), ("wait_async", {"count": 100_000})):
            job.tell(None, operation, **arguments)
            assert all(rank.hear("ended")["right"] for rank in job.all_but())
        job[0].tell("send", count=3, peer=1)
        job[1].tell("send", count=3, peer=0)
        for rank in job.all_but():
            assert rank.hear("ended")["right"]
            rank.tell("close")
            assert rank.hear("ended")["error"] is None
            assert rank.finish() == 0
            assert rank.stderr == ""
