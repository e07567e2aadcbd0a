"""Must-fail controls: plugins that break their contract in one way each, and the check that says so."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from commrt.algorithm import Algorithm, Program, mine, out, scratch
from commrt.backend import Memory, MemoryKind, Probe
from commrt.backends.cpu.backend import CpuBackend
from commrt.backends.cpu.stream import CpuEvent, CpuStream
from commrt.plugins import Kind, Plugin, Registry, discover
from commrt.ports import QueuePort, Request
from commrt.testing import AlgorithmSuite, BackendSuite, ConformanceError, TransportSuite
from commrt.transport import Context, Exchange, Reach
from commrt.transports.loopback.transport import LoopbackConnection, LoopbackEndpoint, LoopbackTransport


def registry_with(kind: Kind, name: str, plugin: Any) -> Registry:
    """What is installed, and one plugin more."""
    return Registry([*discover(), Plugin(kind, name, "a test", __name__, _loaded=plugin)])


# --- transports ---


class Quick(QueuePort):
    def signal(self, offset: int, value: int) -> int:
        self._apply(Request(offset, value=value))
        return 1


class Additive(QueuePort):
    def _apply(self, request: Request) -> None:
        if request.value is not None:
            before = int.from_bytes(self._target.view(request.offset, 8), "little")
            request = replace(request, value=(before + request.value) % (1 << 64))
        super()._apply(request)


class Lossy(QueuePort):
    def _push(self, make: Callable[[], Request]) -> int:
        return super()._push(make) or 1


class Lazy(QueuePort):
    """Looks at sources when it sends, and claims at once that they are free."""

    def put(self, offset: int, source: memoryview) -> int:
        self._target.address(offset, source.nbytes)
        return self._push(lambda: Request(offset, source))  # type: ignore[arg-type]

    def flush(self) -> int:
        return 1

    def _apply(self, request: Request) -> None:
        super()._apply(replace(request, data=bytes(request.data)))


class Unbounded(QueuePort):
    def put(self, offset: int, source: memoryview) -> int:
        try:
            return super().put(offset, source)
        except ValueError:
            return 1


class Shuffled(QueuePort):
    def __init__(self, target: Any) -> None:
        super().__init__(target, due=self._youngest_first)

    def _youngest_first(self, queue: deque[Request]) -> Iterator[Request]:
        while queue:
            yield queue.pop()


class Broken(LoopbackTransport):
    """Loopback's port form with one thing wrong."""

    name = "broken"
    memory_kinds: tuple[MemoryKind, ...] = ()

    def __init__(self, port: type[QueuePort] = QueuePort, **wrong: Any) -> None:
        super().__init__()
        self.port_class, self.wrong = port, wrong

    def open(self, context: Context) -> LoopbackEndpoint:
        return BrokenEndpoint(self, context)

    def probe(self) -> Probe:
        probe: Probe = self.wrong["probe"]() if "probe" in self.wrong else super().probe()
        return probe


class BrokenEndpoint(LoopbackEndpoint):
    def __init__(self, transport: Broken, context: Context) -> None:
        super().__init__(transport, context, "port")
        self._wrong, self._port_class, self._closed = transport.wrong, transport.port_class, False

    def reach(self, rank: int, address: bytes) -> Reach | None:
        if "reach" in self._wrong and self._context.rank < rank:
            return None
        return super().reach(rank, address)

    def connect(self, rank: int, address: bytes, key: bytes) -> LoopbackConnection:
        connection = super().connect(rank, address, key)
        connection.port = self._port_class(connection._regions)
        return connection

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        return frozenset({"switch"} if "group" in self._wrong and self._context.rank == 0 else ())

    def close(self) -> None:
        if "close" in self._wrong and self._closed:
            raise OSError("closed twice")
        self._closed = True
        super().close()


def raising() -> Probe:
    raise OSError("no device")


TRANSPORTS: list[tuple[str, Broken]] = [
    ("puts_come_before_their_signal", Broken(Quick)),
    ("puts_come_before_their_signal", Broken(Shuffled)),
    ("signals_are_absolute", Broken(Additive)),
    ("back_pressure", Broken(Lossy)),
    ("flush_frees_the_source", Broken(Lazy)),
    ("bounds", Broken(Unbounded)),
    ("last_words", Broken(Lazy)),
    ("peer_gone", Broken()),
    ("reach", Broken(reach=True)),
    ("group", Broken(group=True)),
    ("close_is_idempotent", Broken(close=True)),
    ("probe", Broken(probe=raising)),
    ("probe", Broken(probe=Probe)),
]


@pytest.mark.parametrize(("check", "transport"), TRANSPORTS)
def test_broken_transport(check: str, transport: Broken) -> None:
    suite = TransportSuite("broken", registry=registry_with("transports", "broken", transport), patience_s=0.5)
    with pytest.raises(ConformanceError, match=f"transport broken: {check}"):
        suite.run(check)


def test_what_is_broken_is_else_right() -> None:
    """The checks find the faults above, and nothing else, in what is made like those but for the fault."""
    suite = TransportSuite("broken", registry=registry_with("transports", "broken", Broken()), processes=False)
    for check in sorted({check for check, _ in TRANSPORTS} - {"peer_gone"}):
        assert suite.run(check) is None


# --- algorithms ---


def star(
    *, wait: bool = True, final: bool = True, apart: bool = True, answer: bool = True, seed: Iterator[int] | None = None
) -> Algorithm:
    """The example, but for what is said to be missing."""

    def build(program: Program) -> None:
        block = program.block()
        others = list(range(1, program.ranks))
        if program.rank == 0:
            block.wait(0, others)
            sources = [mine(), *(scratch(rank if apart else 1) for rank in others)]
            block.reduce([out()], sources, mine(), final=final)
            for peer in others:
                block.put(scratch(0, peer), out(), mine())
            block.signal(0, others)
        else:
            block.put(scratch(program.rank if apart else 1, 0), mine(), mine())
            block.signal(0, [0])
            if wait:
                block.wait(0, [0])
            if answer:
                block.copy(out(), scratch(0), mine())
        if seed is not None and next(seed) % 2:
            block.copy(out(), out(), mine())

    return Algorithm("all_reduce", "broken", build, scratch_slots=lambda ranks: ranks, channels=1, most_ranks=256)


ALGORITHMS: list[tuple[str, Algorithm]] = [
    ("description", replace(star(), name="other")),
    ("plans_are_valid", replace(star(), scratch_slots=lambda ranks: 1)),
    ("plans_are_reproducible", star(seed=itertools.count())),
    ("reference", star(wait=False)),
    ("reference", star(apart=False)),
    ("reference_of_reductions", star(final=False)),
    ("reference_on_many_ranks", star(answer=False)),
    ("native", star(answer=False)),
    ("native_on_many_ranks", star(answer=False)),
]


@pytest.mark.parametrize(("check", "algorithm"), ALGORITHMS)
def test_broken_algorithm(check: str, algorithm: Algorithm) -> None:
    registry = registry_with("algorithms", "all_reduce/broken", algorithm)
    with pytest.raises(ConformanceError, match=f"algorithm all_reduce/broken: {check}"):
        AlgorithmSuite("all_reduce/broken", registry=registry).run(check)


def test_the_algorithm_is_else_right() -> None:
    registry = registry_with("algorithms", "all_reduce/broken", star())
    AlgorithmSuite("all_reduce/broken", registry=registry, ranks=(2, 3)).run_all()


# --- backends ---


class Dirty(CpuBackend):
    def allocate(self, nbytes: int, kind: str | None = None, reserve: bool = False) -> Memory:
        memory = super().allocate(nbytes, kind, reserve)
        ctypes.memset(memory.address, 1, 1)
        return memory


class Trusting(CpuBackend):
    def open(self, exported: bytes) -> Memory:
        return self.allocate(5000)


class Forgetful(CpuStream):
    def synchronize(self) -> None:
        self.record().wait()
        self._error = None


class Hasty(CpuStream):
    """Does its work at once, whatever stands before it."""

    def submit(self, work: Callable[[], Any]) -> CpuEvent:
        event = CpuEvent()
        event.set()
        return event


class WithStream(CpuBackend):
    def __init__(self, stream: type[CpuStream]) -> None:
        self._stream_class = stream

    def stream(self) -> CpuStream:
        return self._stream_class()


BACKENDS: list[tuple[str, CpuBackend]] = [
    ("allocate", Dirty()),
    ("export", Trusting()),
    ("open_malformed", Trusting()),
    ("stream_errors", WithStream(Forgetful)),
    ("stream_order", WithStream(Hasty)),
    ("stream_waits_for_events", WithStream(Hasty)),
]


@pytest.mark.parametrize(("check", "backend"), BACKENDS)
def test_broken_backend(check: str, backend: CpuBackend) -> None:
    registry = registry_with("backends", "broken", backend)
    with pytest.raises(ConformanceError, match=f"backend broken: {check}"):
        BackendSuite("broken", registry=registry).run(check)
