"""Random operations, one behind the other with no barrier: collectives of every kind and point-to-point transfers.

Which they are follows from a seed and is the same on all ranks; when a rank pauses, and what it waits for when, is its
own. A run is replayed by its seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from commrt.testing import matrix
from commrt.testing.calls import bind
from commrt.testing.data import ROOTED, Array, Guarded, Stream, Trial
from commrt.work import Work

_MOST_COUNT = 20000
_MOST_PENDING = 6
_PAUSES, _LONGEST_PAUSE_S = 0.02, 0.003


@dataclass(frozen=True)
class Transfer:
    """One message."""

    source: int
    target: int
    dtype: str
    count: int
    seed: int

    def stream(self, size: int) -> Stream:
        """What it carries."""
        return Stream(self.dtype, None, size, self.source, self.seed)


@dataclass(frozen=True)
class Step:
    """A collective, or transfers; `overlapped`: started only, and waited for later."""

    number: int
    variant: matrix.Variant | None
    transfers: tuple[Transfer, ...]
    overlapped: bool


def steps(size: int, capabilities: frozenset[str], number: int, seed: int) -> Iterator[Step]:
    """The operations of a run."""
    rng = random.Random(seed)
    menu = matrix.variants(size, capabilities, only=(1,))
    for position in range(number):
        overlapped = rng.random() < 0.4
        if rng.random() < 0.3:
            transfers = tuple(_transfer(rng, size, position) for _ in range(rng.randint(1, 2 * size)))
            yield Step(position, None, transfers, overlapped)
        else:
            one = rng.choice(menu)
            root = rng.randrange(size) if one.case.collective in ROOTED else 0
            case = replace(one.case, count=_count(rng), root=root, seed=position % 1009)
            misalign = rng.choice((0, 0, 1, 8))
            variant = replace(one, case=case, in_place=one.in_place and rng.random() < 0.5, misalign=misalign)
            yield Step(position, variant, (), overlapped and not variant.symmetric)


def run(comm: Any, number: int, seed: int) -> int:
    """Run them all, and check each. Collective. The number of operations; raises AssertionError, with the seed."""
    runner = _Runner(comm, seed)
    for step in steps(comm.size, comm.capabilities, number, seed):
        runner.run(step)
    while runner.pending:
        runner.settle()
    return number


def _count(rng: random.Random) -> int:
    return int(_MOST_COUNT ** rng.random()) - 1 if rng.random() < 0.95 else rng.randrange(3 * _MOST_COUNT)


def _transfer(rng: random.Random, size: int, position: int) -> Transfer:
    return Transfer(
        rng.randrange(size), rng.randrange(size), rng.choice(matrix.DTYPES), _count(rng), rng.randrange(position + 1)
    )


@dataclass
class _Pending:
    what: object
    works: list[Work]
    checks: list[Any]


@dataclass
class _Runner:
    comm: Any
    seed: int
    pending: list[_Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed * 64 + self.comm.rank)
        nbytes = 3 * _MOST_COUNT * 8 * self.comm.size + 4096
        mapped = "mapped" in self.comm.capabilities
        self.symmetric = [self.comm.empty(nbytes, "uint8") for _ in range(2)] if mapped else []

    def run(self, step: Step) -> None:
        if self.rng.random() < _PAUSES:
            time.sleep(self.rng.uniform(0, _LONGEST_PAUSE_S))
        started = self._collective(step) if step.variant is not None else self._transfers(step)
        if started is not None:
            self.pending.append(started)
        while self.pending and not (step.overlapped and len(self.pending) < _MOST_PENDING):
            self.settle()
            if self.rng.random() < 0.5:
                break

    def settle(self) -> None:
        """Wait for one of those under way, and check it."""
        one = self.pending.pop(self.rng.randrange(len(self.pending)))
        for work in one.works:
            work.wait()
        self._check(one)

    def _check(self, one: _Pending) -> None:
        wrong = sum(check() for check in one.checks)
        if wrong:
            raise AssertionError(f"seed {self.seed}: {wrong} elements are wrong on rank {self.comm.rank} of {one.what}")

    def _collective(self, step: Step) -> _Pending | None:
        one = step.variant
        assert one is not None
        trial = Trial(one.case, self.comm.rank, one.in_place, one.misalign, self._take if one.symmetric else None)
        trial.fill()
        if step.overlapped:
            works = [bind(self.comm, trial, one.algorithm, async_op=True)()]
            return _Pending(step, works, [trial.wrong])
        bind(self.comm, trial, one.algorithm)()
        self._check(_Pending(step, [], [trial.wrong]))  # at once: symmetric memory is used again
        return None

    def _take(self, nbytes: int) -> Array:
        self.symmetric.reverse()
        taken: Array = self.symmetric[0][:nbytes]
        return taken

    def _transfers(self, step: Step) -> _Pending:
        """Sends and receives in an order of this rank's own, but that of each pair of ranks."""
        found = _Pending(step, [], [])
        ends = [(one, send) for one in step.transfers for send in (True, False)]
        mine = [end for end in ends if self.comm.rank == (end[0].source if end[1] else end[0].target)]
        groups: dict[tuple[int, int, bool], list[tuple[Transfer, bool]]] = {}
        for end in mine:
            groups.setdefault((end[0].source, end[0].target, end[1]), []).append(end)
        while groups:
            key = self.rng.choice(list(groups))
            self._start(*groups[key].pop(0), found)
            if not groups[key]:
                del groups[key]
        return found

    def _start(self, one: Transfer, send: bool, found: _Pending) -> None:
        guarded, stream = Guarded(one.dtype, one.count, self.rng.choice((0, 1))), one.stream(self.comm.size)
        if send:
            stream.write(0, guarded.array)
            found.works.append(self.comm.isend(guarded.array, one.target))
        else:
            guarded.clobber()
            found.works.append(self.comm.irecv(guarded.array, one.source))
        found.checks.append(lambda: stream.count_wrong(0, guarded.array) + guarded.broken())
