"""A rank that alternates between providers: asynchronous operations in random order, with delays of its own.

Arguments: another provider than native, number of operations, seed. What is done follows from the seed; the delays, in
the program and within the other library, from the seed and the rank.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from typing import Any

import commrt
from commrt.plugins import default_registry
from commrt.testing.calls import bind
from commrt.testing.data import COLLECTIVES, REDUCING, REDUCTIONS, ROOTED, Case, Trial

MOST_IN_FLIGHT = 8
DTYPES = ("float32", "float64", "int32", "int64", "uint8")


class Late:
    """A carrier that starts some operations late."""

    def __init__(self, carrier: Any, delays: random.Random) -> None:
        self._carrier, self._delays = carrier, delays

    def start(self, task: Any) -> Any:
        pause(self._delays)
        return self._carrier.start(task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)


def pause(delays: random.Random) -> None:
    if delays.random() < 0.1:
        time.sleep(delays.random() * 0.01)


def random_case(rng: random.Random, size: int) -> Case:
    collective = rng.choice([name for name in COLLECTIVES if name != "sendrecv"])
    op = rng.choice(REDUCTIONS) if collective in REDUCING else "sum"
    root = rng.randrange(size) if collective in ROOTED else 0
    count = 0 if collective == "barrier" else rng.choice([0, 1, 7, 100, 3000, 40_000])
    return Case(collective, size, count, rng.choice(DTYPES), op, root)


def check(trial: Trial, work: Any, turn: int) -> None:
    assert work.wait(60), f"operation {turn} does not end"
    wrong = trial.wrong(None)
    assert not wrong, f"{wrong} elements of operation {turn}, {trial.case}, are wrong"


def main(other: str, number: int, seed: int) -> None:
    provider = default_registry().require("providers", other)
    rng = random.Random(seed)
    carried = 0
    with commrt.init() as comm:
        delays = random.Random(f"{seed} {comm.rank}")
        carriers = comm._issuer._carriage._joined
        carriers[other] = carriers[other].__class__(provider, Late(carriers[other].carrier, delays))
        flying: deque[tuple[Trial, Any, int]] = deque()
        for turn in range(number):
            case = random_case(rng, comm.size)
            fits = provider.supports(case.collective, case.dtype, case.op)
            algorithm = other if turn % 2 and fits else "native"
            carried += algorithm == other
            trial = Trial(case, comm.rank)
            trial.fill()
            pause(delays)
            flying.append((trial, bind(comm, trial, algorithm, async_op=True)(), turn))
            while len(flying) > rng.randrange(MOST_IN_FLIGHT):
                check(*flying.popleft())
        while flying:
            check(*flying.popleft())
        print(f"{number} operations right, {carried} by {other}")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
