"""Conformance of an algorithm: that its plans are in bounds, reproducible and right, whoever executes them.

    AlgorithmSuite("all_reduce/star").run_all()

The reference interpreter takes every freedom that plans leave and refuses what they forbid; the native executor then
runs them on worlds of this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from commrt.algorithm import Algorithm
from commrt.plan import COLLECTIVES, Plan, load, validate
from commrt.plugins import Registry, default_registry
from commrt.testing import matrix, reference
from commrt.testing._conformance import Suite, expect, run_variants
from commrt.testing.data import REDUCING, REDUCTIONS, ROOTED, Array, Case, Trial
from commrt.testing.world import World

_RANKS = (*range(1, 10), 16, 33, 64)
_DTYPES = ("float32", "int32", "uint8", "float64", "float16")
_PAIR = 2  # ranks of the lane that "send" runs on
_MARK = 77


class AlgorithmSuite(Suite):
    """Checks of the algorithm of that name, as `collective/algorithm`. `ranks`: the world sizes to try, of its own."""

    def __init__(self, name: str, *, registry: Registry | None = None, ranks: Sequence[int] = _RANKS) -> None:
        self.subject = f"algorithm {name}"
        self._name = name
        self._registry = registry or default_registry()
        self._algorithm: Algorithm = self._registry.require("algorithms", name)
        self._ranks = [one for one in ranks if self._algorithm.least_ranks <= one <= self._algorithm.most_ranks]

    def check_description(self) -> None:
        algorithm = self._algorithm
        expect(f"{algorithm.collective}/{algorithm.name}" == self._name, "it is registered under another name")
        expect(algorithm.collective in COLLECTIVES, f"there is no collective {algorithm.collective!r}")
        expect(1 <= algorithm.least_ranks <= algorithm.most_ranks, "it is offered for no number of ranks")
        expect(self._ranks, "none of the numbers of ranks that are tried is its")

    def check_plans_are_valid(self) -> None:
        for ranks in self._ranks:
            for root in self._roots(ranks):
                plan = self._algorithm.plan(ranks, root=root)
                validate(plan)
                expect(sorted(one.rank for one in plan.programs) == list(range(ranks)), "ranks have no program")

    def check_plans_are_reproducible(self) -> None:
        """All ranks must come to the same plan by themselves, each to its own slice of it."""
        for ranks in self._ranks:
            plan = self._algorithm.plan(ranks)
            expect(plan.digest == self._algorithm.plan(ranks).digest, "building a plan twice gives two plans")
            expect(load(plan.to_json()) == plan, "a plan does not survive its JSON")
            for rank in {0, ranks // 2, ranks - 1}:
                slice_of = self._algorithm.plan(ranks, only=[rank]).programs
                expect(slice_of == (plan.program(rank),), f"the slice of rank {rank} is not what the whole plan says")

    def check_reference(self) -> None:
        """Exact by the reference interpreter, in turns, in random schedules, in one window and in several."""
        for ranks in (one for one in self._ranks if one <= 9):
            for case in self._cases(ranks, (0, 1, ranks + 1, 300)):
                plan = self._algorithm.plan(ranks, root=case.root)
                for in_place in self._in_place():
                    _run_reference(plan, case, in_place, 1 << 40, None)
                    _run_reference(plan, case, in_place, 130, case.count + ranks)

    def check_reference_on_many_ranks(self) -> None:
        for ranks in (one for one in self._ranks if one > 9):
            _run_reference(self._algorithm.plan(ranks), self._case(ranks, 70), False, 1 << 40, None)

    def check_reference_of_reductions(self) -> str | None:
        if self._algorithm.collective not in REDUCING:
            return "it reduces nothing"
        for dtype in _DTYPES:
            for op in REDUCTIONS:
                ranks = min(4, self._algorithm.most_ranks)
                _run_reference(self._algorithm.plan(ranks), self._case(ranks, 100, dtype, op), False, 1 << 40, 1)
        return None

    def check_native(self) -> None:
        """Exact on the native executor, in one process, with scratch so small that messages are cut."""
        for ranks in (one for one in self._ranks if one <= 5 or one == 8):
            for scratch in (4 << 20, 64 << 10):
                with World(
                    max(ranks, _PAIR) if self._is_send else ranks,
                    registry=self._registry,
                    scratch_bytes=scratch,
                    packet_bytes=scratch,
                ) as world:
                    whole = list(self._variants(world.size, world.communicators[0].capabilities))
                    run_variants(world, whole)

    def check_native_on_many_ranks(self) -> str | None:
        many = [one for one in self._ranks if one in (16, 64)]
        if not many or self._is_send:
            return "it is for few ranks"
        for ranks in many:
            with World(ranks, registry=self._registry) as world:
                symmetric = self._needs_symmetric(world.communicators[0].capabilities)
                variant = matrix.Variant(self._case(ranks, 1021), self._algorithm.name, symmetric=symmetric)
                run_variants(world, [variant])
        return None

    @property
    def _is_send(self) -> bool:
        return self._algorithm.collective == "send"

    def _roots(self, ranks: int) -> list[int]:
        return sorted({0, ranks // 2, ranks - 1}) if self._algorithm.collective in ROOTED else [0]

    def _in_place(self) -> tuple[bool, ...]:
        fixed = ("all_to_all", "barrier", "send", "broadcast")
        return (False,) if self._algorithm.collective in fixed else (False, True)

    def _case(self, ranks: int, count: int, dtype: str = "float32", op: str = "sum", root: int = 0) -> Case:
        collective = "sendrecv" if self._is_send else self._algorithm.collective
        return Case(collective, ranks, 0 if collective == "barrier" else count, dtype, op, root)

    def _cases(self, ranks: int, counts: Sequence[int], dtypes: Sequence[str] = ("float32",)) -> Iterator[Case]:
        for count in counts:
            for dtype in dtypes:
                for root in self._roots(ranks):
                    yield self._case(ranks, count, dtype, root=root)

    def _variants(self, ranks: int, offered: frozenset[str]) -> Iterator[matrix.Variant]:
        symmetric = self._needs_symmetric(offered)
        for case in self._cases(ranks, (0, 1, ranks - 1, ranks + 1, 1021, 65539), ("float32", "uint8")):
            for in_place in self._in_place():
                yield matrix.Variant(case, self._algorithm.name, in_place, symmetric)

    def _needs_symmetric(self, offered: frozenset[str]) -> bool:
        return not set(self._algorithm.requires) <= offered


def _run_reference(plan: Plan, case: Case, in_place: bool, window: int, seed: int | None) -> None:
    if case.collective == "sendrecv":
        return _run_send(plan, case, window, seed)
    trials = [Trial(case, rank, in_place) for rank in range(case.size)]
    for trial in trials:
        trial.fill()
    reference.run(plan, [one.x for one in trials], [one.out for one in trials], case.op, window, seed)
    for rank, trial in enumerate(trials):
        wrong = trial.wrong()
        where = f"{case}, {'in' if in_place else 'out of'} place, windows of {window}, schedule {seed}"
        expect(not wrong, f"{wrong} elements are wrong on rank {rank} of {where}")


def _run_send(plan: Plan, case: Case, window: int, seed: int | None) -> None:
    sent: Array = case.stream(0).read(0, case.count)
    received = np.full(case.count, _MARK, sent.dtype)
    reference.run(plan, [sent, None], [None, received], "sum", window, seed)
    expect(not case.stream(0).count_wrong(0, received), f"what was received is not what was sent, of {case}")
