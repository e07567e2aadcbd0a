"""Libraries beside native, shown with a toy: who joins, who is chosen, in which order, and what becomes of failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import relay

from commrt.errors import (
    Aborted,
    CommunicatorBroken,
    ConfigError,
    Mismatch,
    OperationTimeout,
    ProviderError,
    Unavailable,
    UnknownName,
    UnsupportedType,
)
from commrt.plugins import Plugin, Registry, discover
from commrt.provider import JoiningProvider, Provider, Task, launch_order
from commrt.testing import ConformanceError, ProviderSuite, World
from commrt.work import WorkGroup

SOON_S = 5.0


def registry(provider: Any = relay.plugin) -> Registry:
    return Registry([*discover(), Plugin("providers", "relay", "a test", __name__, _loaded=provider)])


def world(size: int, provider: Any = relay.plugin, **settings: Any) -> World:
    return World(size, registry=registry(provider), **{"providers": "relay", "timeout_s": 20.0, **settings})


def table(folder: Path, line: str) -> str:
    path = folder / "table.yaml"
    path.write_text(f"version: 1\nrows: {{all_reduce: [{{use: {line}}}]}}\nfallback: {{all_reduce: [ring]}}\n")
    return str(path)


def summed(comm: Any, count: int = 100, dtype: str = "float64", **options: Any) -> bool:
    x = np.full(count, comm.rank + 1, dtype)
    comm.all_reduce(x, **options)
    return bool((x == comm.size * (comm.size + 1) // 2).all())


# --- the contract ---


def test_protocols() -> None:
    assert isinstance(relay.plugin, JoiningProvider)
    native = registry().require("providers", "native")
    assert isinstance(native, Provider) and not isinstance(native, JoiningProvider)


@pytest.mark.parametrize("check", ProviderSuite.checks())
def test_the_toy_conforms(check: str) -> None:
    ProviderSuite("relay", registry=registry()).run(check)


class Wrong(relay.RelayProvider):
    """One thing is wrong with it."""

    def __init__(self, wrong: str) -> None:
        super().__init__(hook=self._garble if wrong == "values" else lambda rank, task: None)
        self.wrong = wrong

    def _garble(self, rank: int, task: Task) -> None:
        if task.count > 1 and rank == 0:
            relay._array(task, task.input)[0] += 1

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        if self.wrong == "supports":
            return True
        return super().supports(collective, dtype, op)

    def join(self, joining: Any) -> Any:
        carrier = super().join(joining)
        if self.wrong == "close":
            carrier.close = lambda: None
        if self.wrong == "order":
            carrier.start = lambda task: relay.RelayWork(carrier._pool.submit(lambda: None))
        return carrier


@pytest.mark.parametrize("wrong", ["values", "supports", "close", "order"])
def test_the_suite_finds_what_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commrt.testing.provider_suite._PATIENCE_S", 2.0)
    with pytest.raises(ConformanceError, match=f"provider relay: {wrong}"):
        ProviderSuite("relay", registry=registry(Wrong(wrong))).run(wrong)


# --- joining ---


def test_joined_by_name() -> None:
    with world(3) as ranks:
        assert ranks.communicators[0].providers == ("native", "relay")
        assert all(ranks.run(lambda comm: summed(comm, algorithm="relay")))


def test_without_any_nothing_is_joined() -> None:
    with World(2, registry=registry()) as ranks:
        assert ranks.communicators[0].providers == ("native",)
        with pytest.raises(Unavailable, match=r"not joined \(providers of commrt.init, COMMRT_PROVIDERS\)"):
            summed(ranks.communicators[0], algorithm="relay")
        with pytest.raises(UnknownName):
            summed(ranks.communicators[0], algorithm="rely")
        assert all(ranks.run(summed))


def test_one_that_a_rank_cant_join_fails_on_all(tmp_path: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match=r"'relay' can't be joined: OSError: no relay here \(rank 1\)"):
        world(3, relay.RelayProvider(fails=(1,)))
    assert before == (threading.active_count(), len(os.listdir("/proc/self/fd")))


def test_one_that_only_the_table_names_is_left_out_by_all(tmp_path: Path) -> None:
    advice = table(tmp_path, "[[max, relay, pull]]")
    with world(3, relay.RelayProvider(fails=(2,)), providers=None, table=advice) as ranks:
        choices = ranks.run(lambda comm: comm.explain("all_reduce", 800, dtype="float64").choice.name)
        assert choices == ["pull"] * 3
        assert all(ranks.run(summed))


@pytest.mark.parametrize("name", ["nobody", "relay,nobody"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(Unavailable, match="unknown provider 'nobody'"):
        world(2, providers=name)


def test_malformed_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names of providers"):
        world(2, providers=",")
    (tmp_path / "table.yaml").write_text("version: 99")
    with pytest.raises(ConfigError, match="malformed selection table"):
        world(1, table=str(tmp_path / "table.yaml"))


def test_split_joins_anew() -> None:
    def halves(comm: Any) -> bool:
        part = comm.split(comm.rank % 2)
        with part:
            assert part.providers == ("native", "relay")
            return summed(part, algorithm="relay")

    with world(4) as ranks:
        assert all(ranks.run(halves))


# --- choosing ---


def test_the_table_chooses_by_size_and_elements(tmp_path: Path) -> None:
    seen: list[int] = []
    provider = relay.RelayProvider(hook=lambda rank, task: seen.append(task.count) if rank == 0 else None)
    with world(
        2, provider, providers=None, table=table(tmp_path, "[[1K, oneshot, pull], [64K, relay, pull], [max, pull]]")
    ) as ranks:
        for count in (10, 1000, 100_000):
            assert all(ranks.run(lambda comm, count=count: summed(comm, count)))
            assert all(ranks.run(lambda comm, count=count: summed(comm, count, "float32")))
        explained = ranks.communicators[0].explain("all_reduce", 8000, dtype="float64")
        assert "runs relay all_reduce: the table's choice up to 64 KiB" in str(explained)
        assert "relay up to 64 KiB" in str(explained)
        other = ranks.communicators[0].explain("all_reduce", 8000, dtype="float32")
        assert other.choice.provider == "native"
        assert "does not support float32" in other.others["relay"]
    assert seen == [1000]


def test_forced_for_all_collectives_that_it_has() -> None:
    """Strict, but for point to point, which is no collective."""
    with world(2, providers=None, algorithm="all_reduce/relay") as ranks:
        assert all(ranks.run(summed))

        def rest(comm: Any) -> None:
            with pytest.raises(
                UnsupportedType, match=r"float32 with op max .*ops for float32: none; dtypes for max: none"
            ):
                comm.all_reduce(np.ones(3, np.float32), op="max")
            assert summed(comm, dtype="float32", algorithm="native")
            comm.barrier()
            if comm.rank:
                comm.recv(np.ones(3), 0)
            else:
                comm.send(np.ones(3), 1)

        ranks.run(rest)


# --- order ---


def test_asynchronous_operations_keep_their_order() -> None:
    rng = np.random.default_rng(5)
    late = rng.random(1000) < 0.1
    provider = relay.RelayProvider(hook=lambda rank, task: time.sleep(0.003 * float(late[task.count % 997 + rank])))

    def chain(comm: Any) -> bool:
        turns = np.random.default_rng(6).integers(0, 2, 150)
        x = np.full(64, comm.rank, np.int64)
        y = np.zeros(64 * comm.size, np.int64)
        works = [comm.all_reduce(x, async_op=True)]
        for turn in turns:
            works.append(comm.all_reduce(x, async_op=True, algorithm="relay" if turn else None))
            works.append(comm.all_gather(x, y, async_op=True))
            x_is_y = y[64 * comm.rank : 64 * (comm.rank + 1)]
            works.append(comm.all_reduce(x_is_y, x, async_op=True, algorithm=None if turn else "relay"))
        WorkGroup(works).wait(SOON_S * 4)
        expected = np.int64(sum(range(comm.size)))
        for _ in range(2 * len(turns)):
            expected = np.multiply(expected, comm.size)  # wraps, as int64 does
        return bool((x == expected).all())

    with np.errstate(over="ignore"), world(3, provider) as ranks:
        assert all(ranks.run(chain))


def test_an_asynchronous_call_never_waits_for_a_library() -> None:
    """A rank may call natively behind what is carried, and go on to what its peer waits for first."""

    def cross(comm: Any) -> bool:
        x, y, token = np.ones(3), np.ones(3), np.zeros(1)
        if comm.rank == 0:
            comm.recv(token, 1)
        works = [comm.all_reduce(x, async_op=True, algorithm="relay"), comm.all_reduce(y, async_op=True)]
        if comm.rank == 1:
            comm.send(token, 0)
        return WorkGroup(works).wait(SOON_S) and bool((x == 2).all() and (y == 2).all())

    with world(2) as ranks:
        assert all(ranks.run(cross))


def test_two_communicators_in_opposite_order() -> None:
    """Each has its own order: what one carries does not wait for what the other does."""

    def both(comm: Any) -> bool:
        first, second = comm.split(0), comm.split(0)
        with first, second:
            for turn in range(20):
                pair = (first, second) if comm.rank else (second, first)
                arrays = [np.ones(100) for _ in pair]
                names = ("relay", "relay" if turn % 2 else None)
                works = [
                    one.all_reduce(x, async_op=True, algorithm=names[one is second])
                    for one, x in zip(pair, arrays, strict=True)
                ]
                assert WorkGroup(works).wait(SOON_S)
                assert all((x == comm.size).all() for x in arrays)
        return True

    with world(2) as ranks:
        assert all(ranks.run(both))


def test_streams_and_prepared_operations() -> None:
    def use(comm: Any) -> bool:
        x = np.full(5, comm.rank, np.int64)
        prepared = comm.prepare("all_reduce", x, algorithm="relay")
        prepared.run()
        prepared.start().wait(SOON_S)
        stream = comm.backend.stream()
        work = comm.all_reduce(x, stream=stream, algorithm="relay")
        comm.all_reduce(x)
        return work.done() and bool((x == sum(range(comm.size)) * comm.size**3).all())

    with world(3) as ranks:
        assert all(ranks.run(use))


def test_empty_arrays_never_reach_a_library() -> None:
    seen: list[int] = []
    with world(2, relay.RelayProvider(hook=lambda rank, task: seen.append(task.count))) as ranks:
        assert all(ranks.run(lambda comm: summed(comm, 0, algorithm="relay")))
    assert seen == []


# --- failures ---


def outcomes(ranks: World, function: Callable[[Any], Any]) -> list[Any]:
    started = time.monotonic()
    found = ranks.outcomes(function)
    assert time.monotonic() - started < SOON_S
    return found


def test_ranks_that_differ() -> None:
    with world(3) as ranks:
        found = outcomes(ranks, lambda comm: summed(comm, 7 if comm.rank == 1 else 8, algorithm="relay"))
        assert all(isinstance(one, Mismatch) and "algorithm relay" in str(one) for one in found), found


def test_a_library_that_fails_says_why_and_fails_on_all() -> None:
    def broken(rank: int, task: Task) -> None:
        if rank == 1:
            raise OSError("the relay fell")

    with world(3, relay.RelayProvider(hook=broken)) as ranks:
        found = outcomes(ranks, lambda comm: summed(comm, algorithm="relay"))
        assert all(isinstance(one, ProviderError) for one in found), found
        assert "OSError: the relay fell" in str(found[1])
        assert isinstance(found[1].__cause__, OSError)
        assert "found by rank 1" in str(found[0])
        assert all(isinstance(one, CommunicatorBroken) for one in ranks.outcomes(summed))


def test_a_rank_that_stalls_in_a_library_is_timed_out() -> None:
    gate = threading.Event()
    provider = relay.RelayProvider(hook=lambda rank, task: rank and gate.wait(20) and None)
    with world(2, provider) as ranks:
        found = outcomes(ranks, lambda comm: summed(comm, algorithm="relay", timeout=0.5))
        assert all(isinstance(one, OperationTimeout) for one in found), found
        gate.set()


def test_abort_stops_a_library() -> None:
    entered = threading.Barrier(3)

    def hold(rank: int, task: Task) -> None:
        entered.wait(SOON_S)
        if rank:
            time.sleep(0.2)

    with world(2, relay.RelayProvider(hook=hold)) as ranks:
        aborting = threading.Thread(target=lambda: (entered.wait(SOON_S), ranks.communicators[1].abort()))
        aborting.start()
        found = outcomes(ranks, lambda comm: summed(comm, algorithm="relay"))
        aborting.join()
        assert all(isinstance(one, Aborted) for one in found), found


def test_a_library_that_does_not_stop_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commrt.carrying._STOP_S", 0.2)
    gate = threading.Event()
    with world(2, relay.RelayProvider(hook=lambda rank, task: gate.wait(20) and None)) as ranks:
        found = outcomes(ranks, lambda comm: summed(comm, algorithm="relay", timeout=0.2))
        assert all(isinstance(one, OperationTimeout) for one in found), found
        started = time.monotonic()
        ranks.outcomes(lambda comm: comm.close())
        assert time.monotonic() - started < SOON_S
    gate.set()


def test_one_launch_order_a_device() -> None:
    with launch_order("toy:0").launch() as number:
        assert not launch_order("toy:0")._lock.acquire(blocking=False)
        with launch_order("toy:1").launch() as other:
            assert (number, other) == (1, 1)
