"""A world in one process: ranks as threads. For tests, and for trying things without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from commrt.communicator import Communicator
from commrt.errors import BootstrapTimeout
from commrt.group import Options, Setup
from commrt.native import ffi, lib
from commrt.plugins import Registry, default_registry
from commrt.settings import Settings

_Result = TypeVar("_Result")


class _Meeting:
    """What a store is between processes: everyone's bytes, by rank."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._values: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def exchange(self, rank: int, value: bytes) -> list[bytes]:
        self._values[rank] = value
        try:
            self._barrier.wait()
            seen = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise BootstrapTimeout("not every rank of the world came", rank=rank) from None
        return seen


class World:
    """`size` communicators of one process. `run` calls a function once per rank, each in a thread of its own.

    transport: "loopback" (all cursors in one engine, deadlocks found), or any other that joins threads, such as "shm".
    shared_engine=False gives each rank an engine of its own, so that ranks really run at once, as sanitizers want.
    backends: of each rank, where they are not all the same.
    """

    def __init__(
        self, size: int, transport: str = "loopback", *, options: Options | None = None, shared_engine: bool = True,
        registry: Registry | None = None, backends: Sequence[str] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.size = size
        self._registry = registry or default_registry()
        self._settings = Settings.from_environment({}, **{"transport": transport, "timeout_s": 60.0, **settings})
        self._backends = backends or [self._settings.backend] * size
        self._options = options or Options()
        # Works and communicators may outlive the world, and hold on to these.
        self._engines = [ffi.gc(lib.cr_engine_new(), lib.cr_engine_free) for _ in range(1 if shared_engine else size)]
        grouped = shared_engine and transport == "loopback"
        self._group = ffi.gc(lib.cr_group_new(size), lib.cr_group_free) if grouped else ffi.NULL
        meeting = _Meeting(size, self._settings.init_timeout_s)
        self.communicators: list[Communicator] = self._threads(lambda rank: self._join(rank, meeting))

    def run(self, function: Callable[[Communicator], _Result]) -> list[_Result]:
        """function(communicator) on every rank at once; the results by rank. Raises the first rank's error, if any."""
        return self._threads(lambda rank: function(self.communicators[rank]))

    def outcomes(self, function: Callable[[Communicator], Any]) -> list[Any]:
        """As `run`, but an error takes the place of its rank's result."""

        def guarded(rank: int) -> Any:
            try:
                return function(self.communicators[rank])
            except Exception as error:
                return error

        return self._threads(guarded)

    def close(self) -> None:
        """Close all communicators, then stop the engines."""
        self._threads(lambda rank: self.communicators[rank].close())
        for engine in self._engines:
            lib.cr_engine_stop(engine)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for communicator in self.communicators:
                communicator.abort()
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def _join(self, rank: int, meeting: _Meeting) -> Communicator:
        engine = self._engines[rank % len(self._engines)]
        exchange = lambda value: meeting.exchange(rank, value)  # noqa: E731
        settings = replace(self._settings, backend=self._backends[rank])
        return Communicator(
            Setup(rank, self.size, exchange, settings, self._registry, self._options, engine, self._group)
        )

    def _threads(self, function: Callable[[int], _Result]) -> list[_Result]:
        results: dict[int, _Result] = {}
        errors: dict[int, BaseException] = {}

        def rank_thread(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=rank_thread, args=(rank,), name=f"rank-{rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return [results[rank] for rank in range(self.size)]
