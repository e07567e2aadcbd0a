"""The store's state for one world: who joined, who left, the exchanges under way. No sockets, no clock; one thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from commrt.bootstrap.auth import Hello
from commrt.bootstrap.wire import MAX_TOTAL, MAX_WORLD, PROTOCOL_VERSION, Refused, Welcome, encode, part_frames

MAX_OPEN_KEYS = 1024


class Member(Protocol):
    """A joined rank's connection."""

    def send(self, frame: bytes) -> None:
        """Queue one frame; never blocks, never raises."""
        ...


@dataclass
class _Exchange:
    values: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0
    refusal: Refused | None = None
    told: set[int] = field(default_factory=set)


def name_ranks(ranks: Iterable[int], noun: str = "rank") -> str:
    """`rank 3`, `ranks 1, 2`; long lists are cut, with their count."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:20]))
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    return f"{noun}{'' if len(listed) == 1 else 's'} {shown}{more}"


def _root_last(ranks: Iterable[int]) -> list[int]:
    """Rank 0 may exit upon what it hears, and the server with it."""
    return sorted(ranks, reverse=True)


class World:
    """Exchanges among `size` ranks. Any fault in joining fails the world: every rank is told, also those that come
    later. `noun`: what messages call a rank.
    """

    def __init__(self, size: int, noun: str = "rank") -> None:
        self.size, self._noun = size, noun
        self.failure: Refused | None = None
        self._members: dict[int, Member] = {}
        self._gone: dict[int, str] = {}
        self._told: set[int] = set()
        self._exchanges: dict[str, _Exchange] = {}

    @property
    def everyone_told(self) -> bool:
        """No failure that some rank has yet to hear of: of joining, any rank; of an exchange, any that is connected."""
        if self.failure:
            return len(self._told | self._gone.keys()) >= self.size
        return all(x.refusal is None or self._members.keys() <= x.told for x in self._exchanges.values())

    @property
    def pending(self) -> int:
        """Exchanges that some rank has begun and not every rank has heard the end of."""
        return len(self._exchanges)

    def join(self, hello: Hello, member: Member) -> bool:
        """Admit a rank and greet it; otherwise tell it, and everybody, why not, and return False."""
        fault = self._fault(hello)
        if fault and not self.failure:
            self._fail(fault, [hello.rank] if hello.rank < MAX_WORLD else [])
        if self.failure:
            self._told.add(hello.rank)
            member.send(encode(self.failure))
            return False
        self._members[hello.rank] = member
        member.send(encode(Welcome()))
        return True

    def _fault(self, hello: Hello) -> str | None:
        one, root = f"{self._noun} {hello.rank}", f"{self._noun} 0"
        if hello.version != PROTOCOL_VERSION:
            return f"{one} speaks protocol version {hello.version}, {root} speaks {PROTOCOL_VERSION}"
        if hello.size != self.size:
            return f"{one} joined with world size {hello.size}, {root} has world size {self.size}"
        if hello.rank >= self.size:
            return f"{one} is out of range for world size {self.size}"
        if hello.rank in self._members or hello.rank in self._gone:
            return f"{one} joined twice"
        return None

    def _fail(self, message: str, ranks: list[int]) -> None:
        self.failure = Refused("", "error", message, ranks)
        self._exchanges.clear()
        for rank in _root_last(self._members):
            self._told.add(rank)
            self._members[rank].send(encode(self.failure))

    def put(self, rank: int, key: str, value: bytes) -> None:
        """A rank's value for `key`; completes or fails the exchange where it decides it."""
        if self.failure:
            return
        exchange = self._exchanges.setdefault(key, _Exchange())
        if exchange.refusal:
            self._tell(key, exchange, exchange.refusal, [rank])
            return
        doubled = rank in exchange.values
        exchange.values[rank] = value
        exchange.nbytes += len(value)
        if doubled:
            self._refuse(key, "error", f"{self._noun} {rank} used the key {key!r} twice in one exchange", [rank])
        elif exchange.nbytes > MAX_TOTAL:
            self._refuse(key, "error", f"the values of {key!r} exceed {MAX_TOTAL} bytes", [rank])
        elif len(self._exchanges) > MAX_OPEN_KEYS:
            self._refuse(key, "error", f"more than {MAX_OPEN_KEYS} exchanges are open", [rank])
        elif len(exchange.values) == self.size:
            self._complete(key, exchange)
        else:
            self._refuse_hopeless(key, exchange)

    def _complete(self, key: str, exchange: _Exchange) -> None:
        frames = part_frames(key, [exchange.values[rank] for rank in range(self.size)])
        for rank in _root_last(self._members):
            for frame in frames:
                self._members[rank].send(frame)
        del self._exchanges[key]

    def give_up(self, key: str) -> None:
        """Some rank's deadline for `key` has passed: the exchange fails on all, naming the missing."""
        exchange = self._exchanges.get(key)
        if exchange is None or exchange.refusal:
            return
        missing = list(self._missing(exchange))
        self._refuse(
            key, "timeout", f"{self._names(missing)} of {self.size} did not arrive in time at {key!r}", missing
        )

    def leave(self, rank: int, reason: str) -> None:
        """A rank is gone; exchanges that still need it fail."""
        self._members.pop(rank, None)
        self._gone[rank] = reason
        for key, exchange in list(self._exchanges.items()):
            self._refuse_hopeless(key, exchange)

    def close(self) -> None:
        """Rank 0 ends the world: whoever waits is told. Failed exchanges stay, for those yet to hear of them."""
        for key in [key for key, exchange in self._exchanges.items() if exchange.refusal is None]:
            exchange = self._exchanges[key]
            missing = list(self._missing(exchange))
            self._refuse(
                key, "error",
                f"{self._noun} 0 closed the store while {self._names(missing)} had yet to reach {key!r}", missing,
            )  # fmt: skip
            self._exchanges.pop(key, None)

    def _names(self, ranks: Iterable[int]) -> str:
        return name_ranks(ranks, self._noun)

    def _missing(self, exchange: _Exchange) -> Iterator[int]:
        return (rank for rank in range(self.size) if rank not in exchange.values)

    def _refuse_hopeless(self, key: str, exchange: _Exchange) -> None:
        lost = sorted(rank for rank in self._gone if rank not in exchange.values)
        if lost and not exchange.refusal:
            reasons = "; ".join(f"{self._noun} {rank} {self._gone[rank]}" for rank in lost[:20])
            self._refuse(key, "error", f"{reasons} before {key!r}", lost)

    def _refuse(self, key: str, kind: Literal["error", "timeout"], message: str, ranks: list[int]) -> None:
        exchange = self._exchanges[key]
        refusal = exchange.refusal = Refused(key, kind, message, ranks)
        waiting = list(exchange.values)
        exchange.values.clear()
        self._tell(key, exchange, refusal, waiting)

    def _tell(self, key: str, exchange: _Exchange, refusal: Refused, ranks: list[int]) -> None:
        frame = encode(refusal)
        for rank in _root_last(ranks):
            exchange.told.add(rank)
            if rank in self._members:
                self._members[rank].send(frame)
        if len(exchange.told | self._gone.keys()) >= self.size:
            self._exchanges.pop(key, None)
