"""Every collective by every algorithm on every type, exact, between real processes over shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from commrt.group import Options

if TYPE_CHECKING:
    from conftest import Ranks

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

SIZES = (1, 2, 3, 4, 5, 8)
LAP = Options().lap
STARTS = {"flag": (LAP - 100, LAP), "word": ((1 << 32) - 100, LAP), "tiny": (4, 6)}


def check(said: str, size: int, calls: int | None = None) -> None:
    """Every rank must have said that its calls were right."""
    links = "{'shm'}" if size > 1 else "no link"
    assert said.count(f"calls right over {links}") == size, said
    assert calls is None or said.count(f"{calls} calls") == size, said


@pytest.mark.parametrize("size", SIZES)
def test_sample(ranks: Ranks, size: int) -> None:
    check(ranks("matrix_rank", size, 1000, 100 + size, 0, LAP), size, 1000)


@pytest.mark.parametrize("start", STARTS)
def test_sample_around_wraps(ranks: Ranks, start: str) -> None:
    check(ranks("matrix_rank", 4, 500, 7, *STARTS[start]), 4, 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
def test_whole(ranks: Ranks, size: int) -> None:
    check(ranks("matrix_rank", size, 0, size, 0, LAP, timeout_s=3000), size)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
def test_whole_with_a_tiny_lap(ranks: Ranks, size: int) -> None:
    check(ranks("matrix_rank", size, 0, size, *STARTS["tiny"], timeout_s=3000), size)
