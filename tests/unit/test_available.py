"""How much memory can still be had, by system and control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from commrt.backends.cpu import available
from commrt.backends.cpu.memory import SharedMemory


def test_something_is_available() -> None:
    assert 1 << 20 < available.available_nbytes() < 1 << 50


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 60, 1 << 63, 1 << 70])
def test_more_than_there_is_is_refused_at_once(nbytes: int) -> None:
    for reserve in (False, True):
        with pytest.raises(MemoryError, match=f"{nbytes} bytes"):
            SharedMemory.create(nbytes, reserve)


def test_reserving_stops_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken until then is given back."""
    left = iter((1 << 30, 1 << 30, 1 << 20))
    monkeypatch.setattr("commrt.backends.cpu.memory.available_nbytes", lambda: next(left))
    with pytest.raises(MemoryError, match="no memory for the last 16777216 of 33554432 bytes"):
        SharedMemory.create(32 << 20, reserve=True)


def test_groups(tmp_path: Path) -> None:
    """Unified and old names; limits that are none; caches that can be given back."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    assert available._group(tmp_path, "memory.max", "memory.current") == 400_000
    (tmp_path / "memory.stat").write_text("active_file 7\ninactive_file 1000\n")
    assert available._group(tmp_path, "memory.max", "memory.current") == 401_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available._group(tmp_path, "memory.max", "memory.current") > 1 << 60
    assert available._group(tmp_path, "memory.limit_in_bytes", "memory.usage_in_bytes") > 1 << 60
