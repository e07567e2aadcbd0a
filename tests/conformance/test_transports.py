"""The transports that come with commrt, and the example, keep their contract."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.testing import TransportSuite
from commrt.transports.fault.transport import Faults

from .conftest import Installed

SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shm": ("shm", {}),
    "loopback": ("loopback", {"processes": False}),
    "loopback-port": ("loopback", {"processes": False, "options": {"family": "port"}}),
    "late": ("fault", {"processes": False, "options": {"fault": Faults(delay_s=0.0005, reorder=True)}}),
    "socket": ("socket", {}),
    "tcp": ("tcp", {}),
}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("check", TransportSuite.checks())
def test_transport(subject: str, check: str, installed: Installed) -> None:
    name, arguments = SUBJECTS[subject]
    reason = TransportSuite(name, registry=installed.registry, **arguments).run(check)
    if reason is not None:
        pytest.skip(reason)
