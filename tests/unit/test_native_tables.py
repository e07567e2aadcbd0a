"""Tables that Python and the native core both have must agree; each is read from where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commrt.dtypes import DTYPES
from commrt.native import COLLECTIVE_CODES, lib
from commrt.plan import BUFFERS, COLLECTIVES, MAX_BLOCKS, MAX_CHANNELS, MAX_PACKET_SOURCES, MAX_REFS, OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (ROOT / "algorithms/device/launch.h").read_text()
COMM = (ROOT / "commrt/_native/comm.h").read_text()


def members(text: str, name: str) -> list[str]:
    """The names of a C++ enum, in order."""
    match = re.search(rf"enum {name} : \w+ \{{([^}}]*)\}}", text)
    assert match, name
    return [part.split("=")[0].strip() for part in match[1].split(",") if part.strip()]


def test_operations() -> None:
    assert [name.upper() for name in OPERATIONS] == members(LAUNCH, "Code")


def test_buffers() -> None:
    """HOST is of lowered plans alone: own scratch, where it lies in host memory."""
    assert [*(name.upper() for name in BUFFERS), "HOST"] == members(LAUNCH, "Buffer")


def test_collectives() -> None:
    native = [name.removesuffix("_TO").removesuffix("_OF").lower() for name in members(COMM, "Collective")]
    assert list(COLLECTIVES) == native[:-1]
    assert native[-1] == "collectives"
    assert list(COLLECTIVE_CODES.values()) == list(range(len(COLLECTIVES)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_REFS", MAX_REFS),
        ("MAX_BLOCKS", MAX_BLOCKS),
        ("MAX_CHANNELS", MAX_CHANNELS),
        ("MAX_PACKET_SOURCES", MAX_PACKET_SOURCES),
    ],
)
def test_limits(name: str, value: int) -> None:
    match = re.search(rf"\b{name} = (\d+)", LAUNCH)
    assert match
    assert int(match[1]) == value


def test_element_sizes() -> None:
    assert [lib.cr_itemsize(dtype.code) for dtype in DTYPES] == [dtype.itemsize for dtype in DTYPES]
    assert lib.cr_itemsize(len(DTYPES)) == 0


def test_reducible_types() -> None:
    from commrt.dtypes import REDUCE_OPS, supported_ops

    for dtype in DTYPES:
        for op in REDUCE_OPS:
            assert bool(lib.cr_can_reduce(dtype.code, op.code)) == (op in supported_ops(dtype)), (dtype, op)
