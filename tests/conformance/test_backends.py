"""The backend that comes with commrt keeps its contract."""

from __future__ import annotations

import pytest

from commrt.testing import BackendSuite


@pytest.mark.parametrize("check", BackendSuite.checks())
def test_cpu(check: str) -> None:
    reason = BackendSuite("cpu").run(check)
    if reason is not None:
        pytest.skip(reason)
