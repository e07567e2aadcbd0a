"""From native failure records to exceptions: who waits for whom, where, and who never came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commrt import errors
from commrt.dtypes import by_code, op_by_code
from commrt.native import lib
from commrt.plan import COLLECTIVES, OPERATIONS

_UNKNOWN = 0xFFFFFFFF
_SILENT_S = 0.5
_BARRIER = OPERATIONS.index("barrier")

_ERRORS: dict[int, type[errors.OperationError]] = {
    lib.CR_MISMATCH: errors.Mismatch,
    lib.CR_PEER_LOST: errors.PeerLost,
    lib.CR_TIMEOUT: errors.OperationTimeout,
    lib.CR_ABORTED: errors.Aborted,
    lib.CR_DEADLOCK: errors.Deadlock,
    lib.CR_TRANSPORT: errors.TransportError,
    lib.CR_BOUNDS: errors.TransportError,
    lib.CR_CARRIER: errors.ProviderError,
}


@dataclass(frozen=True)
class Standing:
    """How a rank stood when an operation failed here. `state`: what its communicator was closed or broken with."""

    sequence: int
    completed: int
    state: int
    dead: bool
    silent_s: float


@dataclass(frozen=True)
class Place:
    """Where a thread block of a deadlock stands, as native code numbers it."""

    rank: int
    block: int
    operation: int
    op_code: int
    channel: int
    waits_for: int


@dataclass(frozen=True)
class Circumstances:
    """What is known of a failure besides its record. `troubles`: what ended links, by peer, where that is known."""

    rank: int
    algorithms: Mapping[int, str]
    standing: Mapping[int, Standing]
    stuck: Sequence[Place]  # of a deadlock
    troubles: Mapping[int, str] = field(default_factory=dict)
    cause: Exception | None = None  # what another library failed with here


def to_error(failure: Any, around: Circumstances) -> errors.OperationError:
    """The exception for a native failure record."""
    kind = _ERRORS.get(failure.code, errors.OperationError)
    message = _Message(failure, around)
    code = failure.mine[1] & 0xFF
    known = failure.sequence and code < len(COLLECTIVES)
    return kind(
        message.text(), rank=around.rank, peer=message.peer, operation=COLLECTIVES[code] if known else None,
        sequence=int(failure.sequence) or None, nbytes=int(failure.nbytes) if failure.sequence else None,
    )  # fmt: skip


class _Message:
    def __init__(self, failure: Any, around: Circumstances) -> None:
        self.failure, self.around = failure, around
        self.peer = None if failure.peer == _UNKNOWN else int(failure.peer)
        self.finder = int(failure.finder)
        self.elsewhere = self.finder != around.rank

    def text(self) -> str:
        f = self.failure
        texts: dict[int, Callable[[], str]] = {
            lib.CR_MISMATCH: self._mismatch, lib.CR_PEER_LOST: self._lost, lib.CR_TIMEOUT: self._timeout,
            lib.CR_ABORTED: self._aborted, lib.CR_DEADLOCK: lambda: deadlock(self.around.stuck),
            lib.CR_CARRIER: self._carried,
            lib.CR_BOUNDS: lambda: f"rank {self.peer} published a buffer that does not lie in its symmetric memory",
        }  # fmt: skip
        found = f" (found by rank {self.finder})" if self.elsewhere and f.code != lib.CR_ABORTED else ""
        return texts.get(f.code, self._link)() + found

    def _mismatch(self) -> str:
        theirs = "a peer something else" if self.peer is None else f"rank {self.peer} {self._call(self.failure.theirs)}"
        mine = f"rank {self.finder} {self._call(self.failure.mine)}"
        return f"ranks disagree on operation {self.failure.sequence}: {mine}, {theirs}"

    def _lost(self) -> str:
        dead = [rank for rank, standing in self.around.standing.items() if standing.dead and not standing.state]
        gone = [rank for rank in dead if rank not in self.around.troubles]
        standing = self.around.standing.get(-1 if self.peer is None else self.peer)
        if self.peer in gone and len(gone) > 1:
            return f"{_ranks(gone)} died before their part of {self._mine()} was done{self._where()}"
        verb = "died" if self.peer in gone else "left" if standing and standing.state == lib.CR_CLOSED else "was lost"
        never = standing and standing.sequence < self.failure.sequence
        begun = f"; it had begun {standing.sequence} operations" if standing and never else ""
        return (
            f"rank {self.peer} {verb} before its part of {self._mine()} was done{begun}{self._trouble()}{self._where()}"
        )

    def _timeout(self) -> str:
        if self.elsewhere and self.peer == self.finder:
            return f"rank {self.finder} gave up waiting for this one, so {self._mine()} can't end"
        return f"{self._mine()} did not end in time: {self._missing()}{self._where()}"

    def _missing(self) -> str:
        sequence, standing = self.failure.sequence, self.around.standing
        late = {rank: place.sequence for rank, place in standing.items() if place.sequence < sequence}
        if late:
            never = ", ".join(f"rank {rank} (begun so far: {begun})" for rank, begun in late.items())
            waiting = [rank for rank, place in standing.items() if rank not in late and place.completed < sequence]
            return f"it was never called by {never}; {_ranks(waiting)} waited in it"
        silent_s = 0.0 if self.peer is None else standing[self.peer].silent_s
        if silent_s >= _SILENT_S:
            return f"rank {self.peer} is in it too, but has given no sign of life for {silent_s:.1f} s"
        return "every rank has called it"

    def _aborted(self) -> str:
        by = self.finder if self.elsewhere else None
        return "the communicator was aborted" + ("" if by is None else f" by rank {by}")

    def _carried(self) -> str:
        cause = self.around.cause
        said = "" if self.elsewhere or cause is None else f": {type(cause).__name__}: {cause}"
        return f"the library that carried {self._mine()} failed{said}"

    def _link(self) -> str:
        of = f"of rank {self.finder} " if self.elsewhere else ""
        return f"the link {of}to rank {self.peer} failed{self._trouble()}{self._where()}"

    def _trouble(self) -> str:
        trouble = "" if self.peer is None or self.elsewhere else self.around.troubles.get(self.peer, "")
        return trouble and f": {trouble}"

    def _where(self) -> str:
        place = position(self.failure)
        return f"; this rank was at {place}" if place else ""

    def _mine(self) -> str:
        return f"operation {self.failure.sequence}, {self._arguments(self.failure.mine)},"

    def _call(self, words: Any) -> str:
        return f"called {self._arguments(words)}" if words[0] else "has not called it"

    def _arguments(self, words: Any) -> str:
        what, count, root = int(words[1]), int(words[2]), int(words[3])
        collective, dtype, op = what & 0xFF, what >> 8 & 0xFF, what >> 16 & 0xFF
        name = COLLECTIVES[collective] if collective < len(COLLECTIVES) else f"collective {collective}"
        memory = "symmetric" if what >> 24 & 0xFF else "ordinary"
        algorithm = self.around.algorithms.get(what >> 32, f"/#{what >> 32:08x}").partition("/")[2]
        return (
            f"{name}(count {count}, dtype {by_code(dtype).name}, op {op_by_code(op).name}, root {root}, "
            f"{memory} memory, algorithm {algorithm})"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def position(place: Any) -> str:
    """Where a rank or block stands: block, plan operation, what it waits for."""
    if place.op_code == _UNKNOWN:
        return "" if place.waits_for == _UNKNOWN else f"its start, waiting for rank {place.waits_for}"
    text = f"block {place.block}, operation {place.operation} ({OPERATIONS[place.op_code]})"
    if place.waits_for != _UNKNOWN:
        text += f" on channel {place.channel} for rank {place.waits_for}"
    return text


def deadlock(stuck: Sequence[Place]) -> str:
    """What keeps the blocks of a deadlock: the cycle, if there is one, then those that wait for it."""
    ring = _cycle(stuck)
    told = [f"rank {stuck[k].rank} at {position(stuck[k])}" for k in ring]
    others = [f"rank {place.rank} at {position(place)}" for k, place in enumerate(stuck) if k not in ring]
    parts = ["no block of any rank can move"]
    if ring:
        parts.append("; ".join(told) + ": a cycle")
    if others:
        parts.append(("besides, " if ring else "") + "; ".join(others))
    return ": ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])


def _cycle(stuck: Sequence[Place]) -> list[int]:
    """Indices of places that wait for one another in turn. A rank may hold others up in any of its blocks."""
    of_rank: dict[int, list[int]] = {}
    for k, place in enumerate(stuck):
        of_rank.setdefault(place.rank, []).append(k)
    after = [
        [] if place.waits_for == _UNKNOWN and place.op_code != _BARRIER
        else [j for j in of_rank.get(place.rank if place.op_code == _BARRIER else place.waits_for, []) if j != k]
        for k, place in enumerate(stuck)
    ]  # fmt: skip
    finished: set[int] = set()
    for start in range(len(stuck)):
        path: list[int] = []
        if found := _search(start, after, path, finished):
            return found
    return []


def _search(start: int, after: Sequence[Sequence[int]], path: list[int], finished: set[int]) -> list[int]:
    """Depth first, without recursion: a ring of many ranks is deep."""
    path.append(start)
    turns = [iter(after[start])]
    while path:
        step = next((j for j in turns[-1] if j not in finished), None)
        if step is None:
            finished.add(path.pop())
            turns.pop()
        elif step in path:
            return path[path.index(step) :]
        else:
            path.append(step)
            turns.append(iter(after[step]))
    return []
