"""The providers that come with commrt keep their contract."""

from __future__ import annotations

import pytest

from commrt.plugins import default_registry
from commrt.testing import ProviderSuite


@pytest.mark.parametrize("name", ["native", "gloo"])
@pytest.mark.parametrize("check", ProviderSuite.checks())
def test_provider(name: str, check: str) -> None:
    probe = default_registry().require("providers", name).probe()
    if not probe.devices and check not in ("probe", "supports"):
        pytest.skip(probe.reason)
    ranks = (3,) if name == "native" else (1, 2, 3)  # whose values other tests look at
    reason = ProviderSuite(name, ranks=ranks).run(check)
    if reason is not None:
        pytest.skip(reason)
