"""What is left behind: nothing, however ranks end, and however often communicators come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _fault_programs.jobs import Job

CRASHES = 20
GROWTH_KIB = 5 << 10


def shared_files() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if entry.stat().st_uid == os.geteuid()}


def processes_that_name(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return found


def test_killed_jobs_leave_nothing(tmp_path: Path) -> None:
    """All ranks are killed in the middle of an operation, again and again; the next job starts as the first did."""
    before = shared_files()
    for _ in range(CRASHES):
        with Job(tmp_path, 2) as job:
            job.ready().tell(None, "stream", count=100_000)
            for rank in job.all_but():
                rank.hear("flows")
            for rank in job.all_but():
                rank.kill()
    assert processes_that_name(str(tmp_path)) == []
    new = {name for name in shared_files() - before if "commrt" in name}
    assert new == set()
    with Job(tmp_path, 2) as job:
        job.ready().tell(None, "all_reduce", count=100)
        assert all(rank.hear("ended")["right"] for rank in job.all_but())


@pytest.mark.parametrize("way", ["alone", "loopback", "shm", "disagreeing", "refused"])
def test_communicators_come_and_go(way: str) -> None:
    program = Path(__file__).parent / "_fault_programs" / "churn.py"
    turns = 200 if way in ("alone", "loopback") else 60
    done = subprocess.run(
        [sys.executable, str(program), way, "20", str(turns)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    before, after = held["before"], held["after"]
    assert after["descriptors"] == before["descriptors"], held
    assert after["threads"] == before["threads"], held
    assert after["segments"] == before["segments"], held
    assert after["mappings"] < before["mappings"] + turns // 3, held  # the C library makes some as it pleases
    assert after["kib"] - before["kib"] < GROWTH_KIB, held
