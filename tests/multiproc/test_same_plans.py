"""One plan on every kind of link: the digest that is shown is the same, and so are the bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "fakegpu" / "_programs" / "collectives.py"
LIMIT_S = 120


def commrt(*arguments: object, **settings: str) -> str:
    command = [sys.executable, "-m", "commrt", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits(out: Path, transport: str) -> list[Any]:
    """What each of 4 ranks got, of plans that are forced by name."""
    commrt("run", "-n", 4, PROGRAM, out, "cpu", COMMRT_TRANSPORT=transport)
    reports = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(4)]
    assert all(report["links"] == [transport] for report in reports)
    return [report["results"] for report in reports]


def test_tcp_gives_the_bits_of_shared_memory(tmp_path: Path) -> None:
    assert bits(tmp_path / "tcp", "tcp") == bits(tmp_path / "shm", "shm")


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "pairs"), ("all_gather", "put")])
def test_the_digest_is_that_of_the_plan(collective: str, algorithm: str) -> None:
    digests = set()
    for transport in ("shm", "tcp", "loopback"):
        said = commrt(
            "bench", collective, "-n", 4, "--algo", algorithm, "--transport", transport, "-e", "4K", "--iters", 2
        )
        assert "# Out of bounds values : 0 OK" in said
        digests |= set(re.findall(r"plan: (\w{16})$", said, re.MULTILINE))
    assert len(digests) == 1
