"""Fault injection: every connection of the wrapped, mapped transport becomes a port whose requests meet with faults.

Offered only when asked for by name. Option `fault`: a `Faults`. Faults are drawn from a seed, so a run can be replayed.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commrt.backend import Memory, MemoryKind, Probe
from commrt.errors import ConfigError, TransportError
from commrt.plugins import default_registry
from commrt.ports import Mapped, QueuePort, Regions, Request
from commrt.transport import Connection, Context, Endpoint, Exchange, Reach


@dataclass(frozen=True)
class Faults:
    """What happens to requests on their way.

    inner: the wrapped transport. delay_s: each waits up to so long, order kept. reorder: puts between two signals
    arrive in any order. drop: the probability that one is lost for good; as links keep order, nothing behind it arrives
    either. cut_after: the link breaks behind so many.
    """

    inner: str = "loopback"
    delay_s: float = 0.0
    reorder: bool = False
    drop: float = 0.0
    cut_after: int | None = None
    seed: int = 0


class FaultTransport:
    """Implements `commrt.transport.Transport`."""

    name = "fault"
    backends = ("cpu",)
    groups = False
    memory_kinds: tuple[MemoryKind, ...] = ()

    def probe(self) -> Probe:
        """Only for those who ask for it by name."""
        return Probe(devices=("wrapper",), level="injected faults", joins="options")

    def open(self, context: Context) -> FaultEndpoint:
        """Wrap an endpoint of the inner transport."""
        faults = context.options.get("fault")
        if not isinstance(faults, Faults):
            raise ConfigError("the fault transport needs the option `fault`, a Faults")
        return FaultEndpoint(default_registry().require("transports", faults.inner).open(context), context, faults)


class FaultEndpoint:
    """Implements `commrt.transport.Endpoint`."""

    def __init__(self, inner: Endpoint, context: Context, faults: Faults) -> None:
        self._inner, self._context, self._faults = inner, context, faults
        self.address = inner.address
        self._segments: dict[int, int] = {}

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """As the inner one."""
        return self._inner.reach(rank, address)

    def register(self, memory: Memory) -> bytes:
        """As the inner one."""
        self._segments.setdefault(0, memory.nbytes)
        return self._inner.register(memory)

    def connect(self, rank: int, address: bytes, key: bytes) -> FaultConnection:
        """Put the faults in front of the inner connection. All segments of a communicator have the same size."""
        inner = self._inner.connect(rank, address, key)
        return FaultConnection(inner, self._segments[0], self._faults, self._context.rank * 1009 + rank)

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """No switch."""
        return frozenset()

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()


class FaultConnection:
    """Implements `commrt.transport.Connection`, port family."""

    mapped = None
    direct = None

    def __init__(self, inner: Connection, nbytes: int, faults: Faults, link: int) -> None:
        if inner.mapped is None:
            raise ConfigError(f"the fault transport wraps mapped transports; {faults.inner} is none")
        self._inner, self._regions = inner, Regions()
        self._regions.add(Mapped(inner.mapped, nbytes))
        self.life = inner.life
        self.port = QueuePort(self._regions, due=Trouble(faults, random.Random(faults.seed * 7919 + link)))

    def open(self, key: bytes) -> Memory:
        """Not mapped."""
        raise TransportError("a fault connection maps nothing")

    def locate(self, key: bytes) -> int:
        """Where the inner connection's mapping went."""
        return self._regions.add(self._inner.open(key))

    def close(self) -> None:
        """Close the inner one."""
        self._regions.close()
        self._inner.close()


class Trouble:
    """Decides what leaves a queue when: the order kept, but for puts between two signals if `reorder`."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self._faults, self._rng = faults, rng
        self._ready_at = 0.0
        self._passed = 0
        self._lost = False

    def __call__(self, queue: deque[Request]) -> Iterator[Request]:
        """The requests that arrive now. Raises ConnectionError once the link is cut."""
        while queue and not self._lost and self._ready():
            self._count()
            request = self._next(queue)
            self._lost = self._rng.random() < self._faults.drop
            if not self._lost:
                yield request

    def _ready(self) -> bool:
        now = time.monotonic()
        if now < self._ready_at:
            return False
        self._ready_at = now + self._rng.uniform(0, self._faults.delay_s)
        return True

    def _count(self) -> None:
        if self._faults.cut_after is not None and self._passed >= self._faults.cut_after:
            raise ConnectionError(f"the link was cut behind {self._passed} requests")
        self._passed += 1

    def _next(self, queue: deque[Request]) -> Request:
        puts = 0
        while self._faults.reorder and puts < len(queue) and not queue[puts].is_signal:
            puts += 1
        position = self._rng.randrange(puts) if puts > 1 else 0
        request = queue[position]
        del queue[position]
        return request
