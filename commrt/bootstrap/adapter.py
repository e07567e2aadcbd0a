"""The `Store` interface over what is at hand already: one process alone, or a store with torch's methods."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from commrt.bootstrap.wire import MAX_TOTAL
from commrt.errors import BootstrapError, BootstrapTimeout, InvalidArgument


class SingleStore:
    """The store of a world of one."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._closed = False

    def exchange(self, key: str, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """See `Store.exchange`."""
        if self._closed:
            raise BootstrapError("this store is closed", rank=0)
        return [value]

    def barrier(self, key: str, timeout_s: float | None = None) -> None:
        """See `Store.barrier`."""
        self.exchange(key, b"")

    def close(self) -> None:
        """See `Store.close`."""
        self._closed = True


class StoreAdapter:
    """A `Store` over a handed-in one: torch.distributed's TCPStore, FileStore, HashStore, PrefixStore, or anything with
    `set(key, bytes)` and a blocking `get(key)`. `wait(keys, timedelta)` and `check(keys)` bound and name; `add` and
    `delete_key` clean up.

    The store stays the caller's: close() leaves it open. It is trusted as far as whoever serves it: torch's stores
    authenticate nobody. Adapters that share a store at one time need different prefixes, equal on all ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, *, prefix: str = "commrt", timeout_s: float = 120.0) -> None:
        if not 0 <= rank < size:
            raise InvalidArgument(f"rank {rank} is out of range for world size {size}")
        if not (hasattr(store, "set") and hasattr(store, "get")):
            raise InvalidArgument(f"a store needs set() and get(), {type(store).__name__} has not")
        self.rank, self.size = rank, size
        self._store, self._prefix, self._timeout_s = store, prefix, timeout_s
        self._lock = threading.Lock()
        self._uses: dict[str, int] = {}
        self._closed = False

    def exchange(self, key: str, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """See `Store.exchange`. A rank that is gone is noticed by the timeout alone."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._closed:
                raise BootstrapError("this store is closed", rank=self.rank)
            self._uses[key] = self._uses.get(key, 0) + 1
            base = f"{self._prefix}/{key}/{self._uses[key]}"
            keys = [f"{base}/{rank}" for rank in range(self.size)]
            try:
                self._store.set(keys[self.rank], value)
                self._wait(keys, deadline, key)
                values = self._read(keys)
            except BootstrapError:
                raise
            except Exception as error:
                raise BootstrapError(f"the handed-in store failed at {key!r}: {error}", rank=self.rank) from error
            self._clean_up(base, keys)
            return values

    def _wait(self, keys: Sequence[str], deadline: float, key: str) -> None:
        if not hasattr(self._store, "wait"):
            return
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait(list(keys), timedelta(seconds=left))
        except Exception as error:
            missing = [rank for rank, name in enumerate(keys) if not self._has(name)]
            if missing and time.monotonic() >= deadline - 0.01:
                listed = ", ".join(map(str, missing[:20]))
                raise BootstrapTimeout(
                    f"ranks {listed} of {self.size} did not arrive in time at {key!r}", missing, rank=self.rank
                ) from None
            raise BootstrapError(f"the handed-in store failed at {key!r}: {error}", rank=self.rank) from error

    def _has(self, name: str) -> bool:
        return bool(self._store.check([name])) if hasattr(self._store, "check") else False

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        values, nbytes = [], 0
        for name in keys:
            values.append(bytes(self._store.get(name)))
            nbytes += len(values[-1])
            if nbytes > MAX_TOTAL:
                raise BootstrapError(f"the values at {name!r} exceed {MAX_TOTAL} bytes", rank=self.rank)
        return values

    def _clean_up(self, base: str, keys: Sequence[str]) -> None:
        if not (hasattr(self._store, "add") and hasattr(self._store, "delete_key")):
            return
        # A peer that has all values may be gone with the store it served; what is left there is nobody's then.
        with suppress(Exception):
            if self._store.add(f"{base}/done", 1) == self.size:
                for name in (*keys, f"{base}/done"):
                    self._store.delete_key(name)

    def barrier(self, key: str, timeout_s: float | None = None) -> None:
        """See `Store.barrier`."""
        self.exchange(key, b"", timeout_s)

    def close(self) -> None:
        """See `Store.close`; the handed-in store stays as it is."""
        self._closed = True
