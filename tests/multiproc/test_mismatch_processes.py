"""Processes that call different things over shared memory: all raise within moments, with both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from _fault_programs.jobs import Fact, Job

BOUND_S = 2.0
SAME: Fact = {"count": 50}
DIFFERENT: list[tuple[int, str, Fact, str, Fact, list[str]]] = [
    (2, "all_reduce", SAME, "all_reduce", {"count": 51}, ["count 50,", "count 51,"]),
    (2, "all_reduce", SAME, "barrier", {}, ["all_reduce(", "barrier("]),
    (2, "all_reduce", SAME, "all_reduce", {"count": 50, "op": "max"}, ["op sum", "op max"]),
    (2, "all_reduce", {"count": 1 << 19}, "all_reduce", {"count": 1 << 18}, ["count 524288,", "count 262144,"]),
    (4, "all_reduce", SAME, "all_reduce", {"count": 50, "algorithm": "ring"}, ["algorithm oneshot", "algorithm ring"]),
    (4, "broadcast", SAME, "broadcast", {"count": 50, "root": 1}, ["root 0", "root 1"]),
    (4, "broadcast", SAME, "broadcast", {"count": 49}, ["count 50,", "count 49,"]),
    (4, "all_to_all", SAME, "broadcast", SAME, ["all_to_all(", "broadcast("]),
]


@pytest.mark.parametrize(("size", "first", "arguments", "second", "others", "expected"), DIFFERENT)
def test_one_rank_differs(
    tmp_path: Path, size: int, first: str, arguments: Fact, second: str, others: Fact, expected: list[str]
) -> None:
    """Rank 1 differs. A sender that could return raises in what follows: a barrier, or close."""
    with Job(tmp_path, size) as job:
        job.ready()
        for number, rank in job.ranks.items():
            rank.tell(second if number == 1 else first, **(others if number == 1 else arguments))
            rank.tell("barrier")
            rank.tell("close")
        for number, rank in job.ranks.items():
            fact = rank.hear("ended")
            if fact["error"] is None:
                assert "broadcast" in (first, second), fact
                assert fact["right"], fact
                fact = rank.hear("ended")
            assert fact["error"] == "Mismatch", fact
            assert fact["took"] < BOUND_S, fact
            assert fact["peer"] not in (number, None), fact
            assert all(part in fact["message"] for part in expected), fact


def test_a_receive_of_another_size(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ready()
        job[0].tell("send", count=10, peer=1)
        job[0].tell("close")
        job[1].tell("recv", count=11, peer=0)
        received = job[1].hear("ended")
        sent = job[0].hear("ended")
        if sent["error"] is None:
            sent = job[0].hear("ended")
        for fact in (sent, received):
            assert fact["error"] == "Mismatch", fact
            assert fact["took"] < BOUND_S, fact
            assert "send(count 10," in fact["message"], fact
            assert "send(count 11," in fact["message"], fact
        assert job[0].finish() == job[1].finish() == 0
