"""Gloo beside native, as real processes over shared memory: order, agreement, and ranks that die in the middle."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _fault_programs.jobs import Fact, Job

from commrt.launcher import launch

if TYPE_CHECKING:
    from conftest import Ranks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch, which brings Gloo, is not installed")

BOUND_S = 4.0  # a library is given two seconds to stop
GLOO: Fact = {"algorithm": "gloo"}


def gloo_job(folder: Path, size: int, **options: str | float) -> Job:
    return Job(folder, size, COMMRT_PROVIDERS="gloo", INIT_S="60", **options)  # type: ignore[arg-type]


def test_two_thousand_by_turns(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous, native and Gloo by turns, ranks and library late at random: all end, each is right."""
    monkeypatch.setenv("COMMRT_PROVIDERS", "gloo")
    said = ranks("providers_rank", 3, "gloo", 2000, 31)
    assert said.count("2000 operations right") == 3
    assert int(said.split()[-3]) > 700, said


def test_ranks_that_force_different_providers_all_raise(tmp_path: Path) -> None:
    with gloo_job(tmp_path, 3) as job:
        job.ready()
        for number, rank in job.ranks.items():
            rank.tell("all_reduce", count=50, algorithm="native" if number == 1 else "gloo")
        for number, rank in job.ranks.items():
            fact = rank.hear("ended")
            assert fact["error"] == "Mismatch", fact
            assert fact["took"] < BOUND_S, fact
            assert fact["peer"] not in (number, None), fact
            assert "algorithm gloo" in fact["message"] and "algorithm oneshot" in fact["message"], fact


def test_killed_while_gloo_carries(tmp_path: Path) -> None:
    """The victim has come to the operation, so that the others wait for it inside of Gloo."""
    with gloo_job(tmp_path, 3) as job:
        job.ready()[1].tell("stall", provider="gloo")
        job[1].hear("ended")
        job.tell(None, "all_reduce", count=1 << 19, **GLOO)
        for rank in job.ranks.values():
            rank.is_blocked()
        killed = job[1].kill()
        for rank in job.all_but(1):
            fact = rank.hear("ended")
            assert fact["error"] == "PeerLost", fact
            assert fact["peer"] == 1, fact
            assert "rank 1 died" in fact["message"], fact
            assert fact["at"] - killed < 2.0, fact
        for rank in job.all_but(1):
            rank.tell("all_reduce", count=3)
            assert rank.hear("ended")["error"] == "CommunicatorBroken"
            rank.tell("close")
            fact = rank.hear("ended")
            assert fact["error"] is None, fact
            assert fact["took"] < BOUND_S, fact
            assert rank.finish() == 0
            assert rank.stderr == ""


TABLE = """
version: 1
rows:
  all_reduce: [{use: [[64K, oneshot, staged], [1M, gloo, pull], [max, pull]]}]
fallback: {all_reduce: [ring]}
"""
PROGRAM = """
import os, sys
if os.environ["COMMRT_RANK"] != "0":
    os.environ["COMMRT_TABLE"] = "/nonexistent"
import commrt, numpy as np
with commrt.init() as comm:
    assert comm.providers == ("native", "gloo")
    names = [comm.explain("all_reduce", n).choice.provider for n in (1024, 1 << 17, 1 << 21)]
    assert names == ["native", "gloo", "native"], names
    assert comm.explain("all_reduce", 1 << 17, dtype="float16").choice.provider == "native"
    gloo = comm._issuer._carriage._joined["gloo"].carrier
    carried, start = [], gloo.start
    gloo.start = lambda task: carried.append((task.collective, task.dtype.name, task.count)) or start(task)
    for dtype in ("float32", "float16"):
        for count in (10, 30_000, 300_000):
            x = np.full(count, comm.rank, dtype)
            assert (comm.all_reduce(x) == 3).all()
            assert (comm.all_reduce(np.full(count, 1, dtype), op="avg") == 1).all()
    assert carried == [("all_reduce", "float32", 30_000)], carried
    print("agreed on", carried)
"""


def test_the_table_of_rank_0_chooses_for_all(tmp_path: Path) -> None:
    """In its range Gloo carries what it supports; what it doesn't goes to the next on the line, on all ranks."""
    (tmp_path / "table.yaml").write_text(TABLE)
    (tmp_path / "program.py").write_text(PROGRAM)
    out, err = io.BytesIO(), io.BytesIO()
    env = {"COMMRT_TABLE": str(tmp_path / "table.yaml"), "COMMRT_TRANSPORT": "shm"}
    argv = [sys.executable, str(tmp_path / "program.py")]
    status = launch(argv, 3, timeout_s=120, env=env, stdout=out, stderr=err)
    assert status == 0, err.getvalue().decode()
    assert out.getvalue().decode().count("agreed on") == 3
