"""Ranks as processes over tcp: every collective exact, and the end of a rank is seen and named."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _fault_programs.jobs import Fact, Job

from commrt.group import Options

if TYPE_CHECKING:
    from conftest import Ranks

BOUND_S = 2.0
VICTIM = "victim"  # stands for the rank of who dies


def test_four_ranks_run_everything_exactly(ranks: Ranks) -> None:
    """A part of the long list: all collectives, types, sizes and algorithms that these links carry."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    said = ranks("matrix_rank", 4, 500, 11, 0, Options().lap, transport="tcp")
    assert said.count("500 calls right over {'tcp'}") == 4, said


@pytest.mark.parametrize(
    ("size", "victim", "operation", "arguments"),
    [
        (2, 1, "all_reduce", {"count": 1 << 19}),
        (2, 0, "send", {"count": 1 << 19, "peer": VICTIM}),
        (4, 2, "all_reduce", {"count": 1 << 19}),
        (4, 1, "all_to_all", {"count": 1000}),
    ],
)
def test_killed_while_its_peers_wait(tmp_path: Path, size: int, victim: int, operation: str, arguments: Fact) -> None:
    with Job(tmp_path, size, COMMRT_TRANSPORT="tcp") as job:
        job.ready()
        for rank in job.all_but(victim):
            rank.tell(operation, **{key: victim if value == VICTIM else value for key, value in arguments.items()})
        for rank in job.all_but(victim):
            rank.is_blocked()
        killed = job[victim].kill()
        for rank in job.all_but(victim):
            named(rank.hear("ended"), victim, killed)


def test_killed_while_data_flows(tmp_path: Path) -> None:
    with Job(tmp_path, 4, COMMRT_TRANSPORT="tcp") as job:
        job.ready().tell(None, "stream", count=200_000)
        for rank in job.all_but():
            rank.hear("flows")
        killed = job[1].kill()
        for rank in job.all_but(1):
            named(rank.hear("ended"), 1, killed)


def named(fact: Fact, victim: int, since: float) -> None:
    assert fact["error"] == "PeerLost", fact
    assert fact["peer"] == victim, fact
    assert f"rank {victim} died" in fact["message"], fact
    assert fact["at"] - since < BOUND_S, fact


def test_stopped_for_long_and_continued(tmp_path: Path) -> None:
    """A rank that does not read holds its peers up, and breaks nothing: its system still answers."""
    with Job(tmp_path, 2, COMMRT_TRANSPORT="tcp") as job:
        job.ready().tell(None, "all_reduce", count=10)
        for rank in job.all_but():
            assert rank.hear("ended")["right"]
        job[1].kill(signal.SIGSTOP)
        job[0].tell("all_reduce", count=1 << 21)
        job[0].is_blocked()
        time.sleep(3.0)
        job[1].kill(signal.SIGCONT)
        job[1].tell("all_reduce", count=1 << 21)
        for rank in job.all_but():
            assert rank.hear("ended")["right"]


def test_leaving_is_no_death(tmp_path: Path) -> None:
    """What a rank sent before it left arrives; who needs more of it learns that it left."""
    with Job(tmp_path, 2, COMMRT_TRANSPORT="tcp") as job:
        job.ready().tell([1], "isend", count=100_000, peer=0)
        job[1].hear("ended")
        job[0].tell("recv", count=100_000, peer=1)
        assert job[0].hear("ended")["right"]
        assert job[1].finish() == 0
        job[0].tell("all_reduce", count=10)
        fact = job[0].hear("ended")
        assert fact["error"] == "PeerLost", fact
        assert "rank 1 left" in fact["message"], fact
        assert job[0].finish() == 0
        assert job[0].stderr == job[1].stderr == ""
