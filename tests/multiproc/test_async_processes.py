"""Operations make progress by themselves, between processes over shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from commrt.testing import scenarios

if TYPE_CHECKING:
    from conftest import Ranks


@pytest.mark.parametrize("size", [2, 4])
def test_scenarios(ranks: Ranks, size: int) -> None:
    said = ranks("scenarios_rank", size)
    for scenario in scenarios.ASYNCHRONY:
        assert said.count(f"{scenario.__name__} right") == size, said
