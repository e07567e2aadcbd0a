"""Every collective by every algorithm on every type, exact, between real processes over shared memory."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from commrt.group import Options
from commrt.launcher import launch

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

PROGRAM = Path(__file__).parent / "_programs" / "matrix_rank.py"
SIZES = (1, 2, 3, 4, 5, 8)
LAP = Options().lap
STARTS = {"flag": (LAP - 100, LAP), "word": ((1 << 32) - 100, LAP), "tiny": (4, 6)}


def run_ranks(size: int, most: int, seed: int, epoch: int = 0, lap: int = LAP, timeout_s: float = 120) -> None:
    """Every rank must say that its calls were right."""
    out, err = io.BytesIO(), io.BytesIO()
    argv = [sys.executable, str(PROGRAM), str(most), str(seed), str(epoch), str(lap)]
    status = launch(argv, size, timeout_s=timeout_s, stdout=out, stderr=err, env={"COMMRT_TRANSPORT": "shm"})
    assert status == 0, f"{out.getvalue().decode()}\n{err.getvalue().decode()}"
    said = out.getvalue().decode()
    assert said.count("calls right over {'shm'}" if size > 1 else "calls right over no link") == size, said
    assert not most or said.count(f"{most} calls") == size, said


@pytest.mark.parametrize("size", SIZES)
def test_sample(size: int) -> None:
    run_ranks(size, 1000, seed=100 + size)


@pytest.mark.parametrize("start", STARTS)
def test_sample_around_wraps(start: str) -> None:
    epoch, lap = STARTS[start]
    run_ranks(4, 500, 7, epoch, lap)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
def test_whole(size: int) -> None:
    run_ranks(size, 0, seed=size, timeout_s=3000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
def test_whole_with_a_tiny_lap(size: int) -> None:
    run_ranks(size, 0, size, 4, 6, timeout_s=3000)
