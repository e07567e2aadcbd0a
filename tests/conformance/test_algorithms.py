"""The algorithms that come with commrt, and the example, keep their contract."""

from __future__ import annotations

import pytest

from commrt.plugins import default_registry
from commrt.testing import AlgorithmSuite

from .conftest import Installed

NAMES = [plugin.name for plugin in default_registry().plugins("algorithms")]


@pytest.mark.parametrize("check", AlgorithmSuite.checks())
def test_star(check: str, installed: Installed) -> None:
    """On every number of ranks; the others' plans have tests of their own."""
    reason = AlgorithmSuite("all_reduce/star", registry=installed.registry).run(check)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", NAMES)
def test_algorithm(name: str) -> None:
    AlgorithmSuite(name, ranks=(1, 2, 3)).run_all()
