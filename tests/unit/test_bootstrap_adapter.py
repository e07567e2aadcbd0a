"""The `Store` interface over a handed-in store with torch's methods."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

import commrt
from commrt.bootstrap import adapt
from commrt.errors import BootstrapError, BootstrapTimeout, InvalidArgument


class Plain:
    """The least that is asked for: set, and a get that blocks."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, 10):
                raise RuntimeError("timed out")
            return self.values[key]


class LikeTorch(Plain):
    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = b"%d" % total
            return total

    def delete_key(self, key: str) -> bool:
        with self.changed:
            return self.values.pop(key, None) is not None


@pytest.mark.parametrize("kind", [Plain, LikeTorch])
def test_exchange(kind: type[Plain]) -> None:
    shared = kind()
    stores = [adapt(shared, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for turn in range(3):
            values = [b"%d %d" % (turn, rank) for rank in range(3)]
            assert list(pool.map(lambda s, value: s.exchange("k", value), stores, values)) == [values] * 3
        list(pool.map(lambda s: s.barrier("b"), stores))


def test_nothing_is_left_in_the_store() -> None:
    shared = LikeTorch()
    stores = [adapt(shared, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda s: s.exchange("k", b"v"), stores))
    assert shared.values == {}


def test_missing_ranks_are_named() -> None:
    with pytest.raises(BootstrapTimeout) as caught:
        adapt(LikeTorch(), 1, 4).exchange("k", b"", timeout_s=0.1)
    assert caught.value.missing == [0, 2, 3]


def test_prefixes_keep_adapters_apart() -> None:
    shared = Plain()
    first, second = (adapt(shared, 0, 1, prefix=prefix) for prefix in ("a", "b"))
    assert first.exchange("k", b"1") == [b"1"]
    assert second.exchange("k", b"2") == [b"2"]


def test_a_store_that_fails() -> None:
    class Failing(Plain):
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(BootstrapError, match="Connection reset by peer"):
        adapt(Failing(), 0, 2).exchange("k", b"")


def test_bad_arguments_and_closed() -> None:
    with pytest.raises(InvalidArgument):
        adapt(Plain(), 2, 2)
    with pytest.raises(InvalidArgument, match="set"):
        adapt(object(), 0, 2)
    store = adapt(Plain(), 0, 1)
    store.close()
    store.close()
    with pytest.raises(BootstrapError, match="closed"):
        store.exchange("k", b"")


def test_a_store_with_rank_and_size_asks_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank, size, asked in ((0, 2, "a store needs set"), (0, None, "contradiction")):
        with pytest.raises(InvalidArgument, match=asked):
            commrt.init(rank, size, store=object())
