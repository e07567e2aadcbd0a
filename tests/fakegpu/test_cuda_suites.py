"""The cuda backend and the cuda_ipc transport keep their contracts, on a fake driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commrt.testing import BackendSuite, TransportSuite
from commrt.testing.backend_suite import KERNEL

from . import kernels
from .conftest import PROGRAMS, RESIDENT, Fake


@pytest.fixture(scope="module", params=[1, 0], ids=["pieces", "whole"])
def backend_outcomes(request: Any, fake_cuda: Fake) -> Any:
    command = (PROGRAMS / "suite.py", "backend", "cuda", "cuda")
    return fake_cuda.run(*command, kernels=kernels(KERNEL, "count"), vmm=request.param)


@pytest.fixture(scope="module")
def transport_outcomes(fake_cuda: Fake, plan_kernels: Path) -> Any:
    command = (PROGRAMS / "suite.py", "transport", "cuda_ipc", "cuda")
    return fake_cuda.run(*command, kernels=plan_kernels, multiprocessors=RESIDENT)


def see(outcome: tuple[str, str]) -> None:
    status, text = outcome
    if status == "skipped":
        pytest.skip(text)
    assert status == "passed", text


@pytest.mark.parametrize("check", BackendSuite.checks())
def test_backend(check: str, backend_outcomes: Any) -> None:
    see(backend_outcomes[check])


@pytest.mark.parametrize("check", TransportSuite.checks())
def test_transport(check: str, transport_outcomes: Any) -> None:
    see(transport_outcomes[check])


@pytest.mark.parametrize("vmm", [1, 0])
def test_two_processes_reach_into_each_others_memory(
    fake_cuda: Fake, exchange_kernels: Path, tmp_path: Path, vmm: int
) -> None:
    """A kernel that puts, signals and waits there: the channels of algorithms/device."""
    command = (PROGRAMS / "exchange.py", tmp_path, "RANK", 4, 20, "cuda_ipc", "cuda")
    for output in fake_cuda.ranks(2, *command, kernels=exchange_kernels, vmm=vmm):
        assert "fake GPU" in output.pop("devices")
        assert output == {"wrong": 0, "failed": 0, "reach": True, "more": 2 << 20}


@pytest.mark.parametrize(("peers", "reached"), [(1, [True, True, True, False]), (0, [True, False, True, False])])
def test_devices_that_do_not_reach_each_other_are_not_joined(fake_cuda: Fake, peers: int, reached: list[bool]) -> None:
    """Itself, a device beside it, one that this process does not see, and nonsense."""
    ask = """
import json
from commrt.backend import LocatedBackend
from commrt.backends.cuda import plugin
own = plugin.location()
others = [own, own[:15] + bytes([1]), own[:15] + bytes([9]), b"nonsense"]
print(json.dumps([isinstance(plugin, LocatedBackend), *map(plugin.reaches, others)]))
"""
    assert fake_cuda.run("-c", ask, devices=2, peers=peers) == [True, *reached]
