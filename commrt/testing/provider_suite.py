"""Conformance of a provider: what it carries is right, in order, and ends when it must.

    ProviderSuite("gloo").run_all()

The library is joined by worlds of this process, in which ranks are threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from commrt.backend import Probe
from commrt.collectives import REDUCING
from commrt.dtypes import DTYPES, REDUCE_OPS, by_name, supported_ops
from commrt.errors import Aborted, CommunicatorBroken, Mismatch, UnsupportedType
from commrt.plugins import Registry, default_registry
from commrt.provider import JoiningProvider, Provider
from commrt.selection import NATIVE
from commrt.testing._conformance import Suite, expect, expect_raises, run_variants, until
from commrt.testing.data import COLLECTIVES, ROOTED, Case, numpy_dtype
from commrt.testing.matrix import Variant
from commrt.testing.world import World

_PATIENCE_S, _SOON_S = 30.0, 5.0
_CARRIED = tuple(name for name in COLLECTIVES if name != "sendrecv")
_IN_PLACE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "reduce", "gather", "scatter"})


class ProviderSuite(Suite):
    """Checks of the provider of that name, be it `native`, on worlds of these sizes."""

    def __init__(self, name: str, *, registry: Registry | None = None, ranks: Sequence[int] = (1, 2, 3)) -> None:
        self.subject = f"provider {name}"
        self._name, self._ranks = name, ranks
        self._registry = registry or default_registry()
        self._provider: Provider = self._registry.require("providers", name)

    def check_probe(self) -> None:
        for _ in range(2):
            found = self._provider.probe()
            expect(isinstance(found, Probe), f"probe answered {found!r}")
            expect(bool(found.devices) != bool(found.reason), "a probe has devices, or a reason why not")
        expect(self._provider.name == self._name, f"it calls itself {self._provider.name!r}")

    def check_supports(self) -> None:
        """The answer is the same each time, no more than commrt itself has, and it is for something."""
        offered = self._supported()
        expect(offered and offered == self._supported(), "supports has no answer that stays")
        for collective, dtype, op in offered:
            reduced = collective not in REDUCING or op in [one.name for one in supported_ops(by_name(dtype))]
            expect(reduced, f"commrt has no {collective} of {dtype} with {op}")
        expect(not self._provider.supports("no such collective", "float32", "sum"), "it supports anything")

    def check_values(self) -> None:
        """Every collective, dtype and op that it supports, bit for bit: empty, small, odd and large; also in place."""
        for size in self._ranks:
            with self._world(size) as world:
                run_variants(world, list(self._variants(size)))

    def check_unsupported(self) -> str | None:
        """An error that says what there is; the communicator is unharmed."""
        offered = set(self._supported())
        wanted = [("all_reduce", dtype.name, op.name) for dtype in DTYPES for op in supported_ops(dtype)]
        missing = [one for one in wanted if one not in offered]
        if not missing:
            return "it supports everything"
        _, dtype, op = missing[0]
        with self._world(2) as world:

            def refused(comm: Any) -> None:
                x = np.ones(4, by_name(dtype).to_numpy())
                expect_raises(UnsupportedType, lambda: comm.all_reduce(x, op=op, algorithm=self._name))
                comm.barrier()

            world.run(refused)
        return None

    def check_order(self) -> None:
        """Asynchronous operations on the same memory, by turns native, are done one after the other."""

        def chained(comm: Any) -> None:
            x = np.full(5000, 1, np.int64)
            turns = [self._name, NATIVE, self._name, self._name, NATIVE] * 3
            works = [comm.all_reduce(x, async_op=True, algorithm=name) for name in turns]
            for work in works:
                expect(work.wait(_PATIENCE_S), "an operation does not end")
            expect((x == comm.size ** len(turns)).all(), "operations on the same memory were not done in order")

        if self._supports("all_reduce", "int64", "sum"):
            with self._world(3) as world:
                world.run(chained)

    def check_mismatch(self) -> str | None:
        """Ranks that force different providers all raise Mismatch."""
        if self._name == NATIVE:
            return "it takes two providers"

        def different(comm: Any) -> None:
            self._prepare(comm, 6, NATIVE if comm.rank == 1 else self._name).run()

        with self._world(3) as world:
            outcomes = world.outcomes(different)
            expect(all(isinstance(one, Mismatch) for one in outcomes), f"ranks disagree, and it ends as {outcomes}")
        return None

    def check_abort(self) -> None:
        """An operation that not all ranks come to ends on those that have."""

        def alone(comm: Any) -> None:
            prepared = self._prepare(comm, 4)
            if comm.rank:
                comm.abort()
            expect_raises((Aborted, CommunicatorBroken), lambda: prepared.start().wait(_PATIENCE_S))

        with self._world(2) as world:
            world.run(alone)

    def check_abort_under_way(self) -> None:
        """What is under way ends at once on all ranks, well or not."""

        def interrupted(comm: Any) -> None:
            self._prepare(comm, 1 << 20).run()
            works = []
            with contextlib.suppress(Aborted, CommunicatorBroken):
                for _ in range(20):
                    works.append(self._prepare(comm, 1 << 20).start())
            if comm.rank:
                comm.abort()
            for work in works:
                with contextlib.suppress(Aborted):
                    expect(work.wait(_SOON_S), "an operation does not end as the communicator is aborted")
            expect_raises((Aborted, CommunicatorBroken), comm.barrier)

        with self._world(2) as world:
            world.run(interrupted)

    def check_close(self) -> None:
        """Nothing is left: no thread, no file, no socket."""
        with self._world(2) as world:  # what stays for good comes with the first
            world.run(lambda comm: comm.barrier())
        before, threads = _open_files(), threading.active_count()
        with self._world(2) as world:
            world.run(lambda comm: self._prepare(comm, 4).run())
        until(lambda: threading.active_count() <= threads, "its threads end", _PATIENCE_S)
        until(lambda: _open_files() <= before, f"{_open_files()} files are open, where {before} were", _PATIENCE_S)

    def check_unknown_collective(self) -> str | None:
        missing = [name for name in _CARRIED if not any(one[0] == name for one in self._supported())]
        if not missing:
            return "it carries all collectives"

        with self._world(2) as world:
            explain = world.communicators[0].explain
            expect_raises(UnsupportedType, lambda: explain(missing[0], 100, algorithm=self._name))
        return None

    def _world(self, size: int) -> World:
        joined: dict[str, Any] = {"providers": self._name} if isinstance(self._provider, JoiningProvider) else {}
        return World(size, registry=self._registry, timeout_s=_PATIENCE_S, **joined)

    def _supports(self, collective: str, dtype: str, op: str) -> bool:
        return self._provider.supports(collective, dtype, op)

    def _supported(self) -> list[tuple[str, str, str]]:
        ops = {name: REDUCE_OPS if name in REDUCING else REDUCE_OPS[:1] for name in _CARRIED}
        whole = [(name, dtype.name, op.name) for name in _CARRIED for dtype in DTYPES for op in ops[name]]
        return [one for one in whole if self._supports(*one)]

    def _prepare(self, comm: Any, count: int, name: str | None = None) -> Any:
        """The first simple thing that it carries."""
        simple = [one for one in self._supported() if one[0] in ("all_reduce", "all_gather", "broadcast")]
        expect(simple, "it carries neither all_reduce nor all_gather nor broadcast")
        collective, dtype, op = simple[0]
        x = np.ones(count, numpy_dtype(dtype))
        out = np.ones(count * comm.size, numpy_dtype(dtype)) if collective == "all_gather" else x
        return comm.prepare(collective, x, out, op=op, algorithm=name or self._name)

    def _variants(self, size: int) -> Iterator[Variant]:
        for collective, dtype, op in self._supported():
            if collective == "barrier" and dtype != "float32":
                continue
            for count in (0,) if collective == "barrier" else (0, 1, size + 1, 1021):
                for root in sorted({0, size - 1}) if collective in ROOTED else (0,):
                    for in_place in (False, True) if collective in _IN_PLACE else (False,):
                        yield Variant(Case(collective, size, count, dtype, op, root), self._name, in_place)
        if self._supports("all_reduce", "float32", "sum"):
            yield Variant(Case("all_reduce", size, 1_000_003, "float32", "sum", 0), self._name)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
