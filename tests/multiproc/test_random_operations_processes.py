"""Random operations, no barrier between, by processes over shared memory. A failure names the seed that replays it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from commrt.group import Options

if TYPE_CHECKING:
    from conftest import Ranks

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

LAP = Options().lap


@pytest.mark.parametrize(("size", "seed"), [(2, 11), (4, 12), (5, 13)])
def test_two_thousand(ranks: Ranks, size: int, seed: int) -> None:
    said = ranks("operations_rank", size, 2000, seed, 0, LAP)
    assert said.count(f"2000 operations right, seed {seed}") == size


def test_with_a_tiny_lap(ranks: Ranks) -> None:
    assert ranks("operations_rank", 3, 1000, 14, 3, 6).count("1000 operations right") == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(100, 105))
def test_many_seeds(ranks: Ranks, size: int, seed: int) -> None:
    said = ranks("operations_rank", size, 2000, seed, 0, LAP, timeout_s=600)
    assert said.count(f"2000 operations right, seed {seed}") == size
