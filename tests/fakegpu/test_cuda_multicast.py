"""Multicast objects of the fake driver: the ground on which a switch's reductions are tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import Unavailable, kernels
from .conftest import PROGRAMS, Fake

REFUSED = {
    "of one": "INVALID_VALUE",
    "bind before all are added": "NOT_READY",
    "added twice": "INVALID_VALUE",
    "another device's": "INVALID_DEVICE",
    "bound twice": "INVALID_VALUE",
    "half a piece": "INVALID_VALUE",
    "plain copy": "INVALID_VALUE",
    "unbound twice": "INVALID_VALUE",
    "mapped no more": "INVALID_VALUE",
}


def test_two_processes_sum_through_a_multicast_object(fake_cuda: Fake, tmp_path: Path) -> None:
    try:
        built = kernels((PROGRAMS / "multicast.cu").read_text(), "sum_half")
    except Unavailable as error:
        pytest.skip(str(error))
    for output in fake_cuda.ranks(2, PROGRAMS / "multicast.py", tmp_path, "RANK", kernels=built):
        assert "fake GPU" in output.pop("devices")
        assert output == {"right": True, "refused": REFUSED}
