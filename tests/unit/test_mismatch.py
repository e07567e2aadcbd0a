"""Ranks that call different things: all raise, with both sides in the message, and none returns wrong data."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from commrt.collectives import ROOTED, has_input, has_output
from commrt.errors import CommrtError, Mismatch, PeerLost
from commrt.group import Options
from commrt.plan import groups
from commrt.plugins import default_registry
from commrt.testing.world import World

ONE_WAY = frozenset({"broadcast", "scatter", "reduce", "gather"})
LARGE = 70_001  # more than any window of packets, and more than one of scratch for some
WORLDS = {
    "loopback": {},
    "ports": {"options": Options(transport={"family": "port"})},
    "shm": {"transport": "shm", "shared_engine": False},
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What one rank calls."""

    collective: str
    count: int = 40
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str | None = None
    symmetric: bool = False


def make_world(kind: str, size: int, **settings: Any) -> World:
    return World(size, timeout_s=10.0, close_timeout_s=5.0, scratch_bytes=1 << 20, **{**WORLDS[kind], **settings})


def array(comm: Any, call: Call, parts: int, first: int) -> Any:
    """Elements differ by rank and place, and a sum over few ranks is exact in every dtype used."""
    count = call.count * parts
    made = comm.empty(count, call.dtype) if call.symmetric else np.empty(count, call.dtype)
    made[:] = (np.arange(count) + first) % 16
    return made


def arrays(comm: Any, call: Call) -> tuple[Any, Any]:
    if call.collective == "barrier":
        return None, None
    parts_in, parts_out = groups(call.collective, comm.size)
    x = array(comm, call, parts_in, comm.rank) if has_input(call.collective, comm.rank, call.root) else None
    if call.collective == "broadcast" or not has_output(call.collective, comm.rank, call.root):
        return x, None
    return x, array(comm, call, parts_out, 5)


def issue(comm: Any, call: Call, x: Any, out: Any, **more: Any) -> Any:
    keywords: dict[str, Any] = {"algorithm": call.algorithm, **more}
    if call.collective == "barrier":
        return comm.barrier(**keywords)
    if call.collective in ("all_reduce", "reduce", "reduce_scatter"):
        keywords["op"] = call.op
    if call.collective in ROOTED:
        keywords["root"] = call.root
    if call.collective != "broadcast":
        keywords["out"] = out
    return getattr(comm, call.collective)(x, **keywords)


def is_right(comm: Any, call: Call, x: Any, out: Any) -> bool:
    """What a rank may have got from an operation in which others differ: what its own root sent it, or nothing."""
    if call.collective == "broadcast":
        return bool((x == (np.arange(call.count) + call.root) % 16).all())
    if call.collective == "scatter":
        mine = np.arange(call.count * comm.size)[comm.rank * call.count :][: call.count]
        return bool((out == (mine + call.root) % 16).all())
    return call.collective in ("reduce", "gather") and comm.rank != call.root


def attempt(comm: Any, call: Call, x: Any, out: Any) -> CommrtError:
    """The error that the rank meets: in the operation, or, if it could return, by its next one or at close."""
    try:
        issue(comm, call, x, out)
    except CommrtError as error:
        return error
    assert call.collective in ONE_WAY, f"{call} returned on rank {comm.rank}"
    assert is_right(comm, call, x, out), f"{call} returned wrong data on rank {comm.rank}"
    for last in (comm.barrier, comm.close):
        try:
            last()
        except CommrtError as error:
            return error
    raise AssertionError(f"{call} never raised on rank {comm.rank}")


def check(kind: str, calls: list[Call], expected: list[str]) -> None:
    """Every rank raises Mismatch, and says what both sides had: `expected` is part of each message."""
    world = make_world(kind, len(calls))
    try:
        most = any(call.symmetric for call in calls)
        prepared = world.run(lambda comm: arrays(comm, replace(calls[comm.rank], symmetric=most)))
        for rank, call in enumerate(calls):
            if most and not call.symmetric:
                prepared[rank] = tuple(None if one is None else one.copy() for one in prepared[rank])
        errors = world.outcomes(lambda comm: attempt(comm, calls[comm.rank], *prepared[comm.rank]))
    finally:
        world.outcomes(lambda comm: comm.close())
        world.close()
    for rank, error in enumerate(errors):
        assert type(error) is Mismatch, (rank, error)
        assert all(part in str(error) for part in expected), (rank, error)
        assert error.context.peer not in (rank, None), (rank, error)


def ways(size: int, kind: str) -> Iterator[tuple[str, str]]:
    """Every collective with every algorithm that runs there on ordinary memory."""
    offered = {"direct"} if kind == "ports" else {"mapped", "direct", *(["switch"] if kind == "loopback" else [])}
    for name, algorithm in sorted(default_registry().usable("algorithms").items()):
        served = algorithm.least_ranks <= size <= algorithm.most_ranks and offered.issuperset(algorithm.requires)
        if served and algorithm.collective != "send" and algorithm.name != "local":
            yield algorithm.collective, name.partition("/")[2]


def differences(call: Call) -> Iterator[tuple[Call, list[str]]]:
    """What an odd rank may call instead, and what must be said of it."""
    if call.collective != "barrier":
        yield replace(call, count=call.count + 1), [f"count {call.count},", f"count {call.count + 1},"]
        yield replace(call, count=LARGE), [f"count {call.count},", f"count {LARGE},"]
        yield replace(call, dtype="int64"), ["dtype float32", "dtype int64"]
    if call.collective in ("all_reduce", "reduce", "reduce_scatter"):
        yield replace(call, op="max"), ["op sum", "op max"]
    if call.collective in ROOTED:
        yield replace(call, root=1), ["root 0", "root 1"]
    other = "all_gather" if call.collective != "all_gather" else "barrier"
    yield Call(other), [f"{call.collective}(", f"{other}("]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("collective", "algorithm"), list(ways(3, "loopback")))
def test_every_algorithm_on_loopback(collective: str, algorithm: str, odd: int) -> None:
    call = Call(collective, algorithm=algorithm)
    for other, expected in differences(call):
        check("loopback", [other if rank == odd else call for rank in range(3)], expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("collective", "algorithm"), list(ways(3, "loopback")))
def test_other_sizes(collective: str, algorithm: str, size: int) -> None:
    call = Call(collective, algorithm=algorithm)
    other, expected = next(iter(differences(call)))
    check("loopback", [other if rank == size - 1 else call for rank in range(size)], expected)


@pytest.mark.parametrize(("collective", "algorithm"), list(ways(3, "shm")))
def test_every_algorithm_with_ranks_that_run_at_once(collective: str, algorithm: str) -> None:
    call = Call(collective, algorithm=algorithm)
    for other, expected in differences(call):
        check("shm", [other if rank == 1 else call for rank in range(3)], expected)


@pytest.mark.parametrize(("collective", "algorithm"), list(ways(3, "ports")))
def test_every_algorithm_on_ports(collective: str, algorithm: str) -> None:
    call = Call(collective, algorithm=algorithm)
    for other, expected in differences(call):
        check("ports", [other if rank == 1 else call for rank in range(3)], expected)


@pytest.mark.parametrize("kind", list(WORLDS))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast", "reduce", "barrier", "all_to_all"])
def test_algorithms_differ(collective: str, size: int, kind: str) -> None:
    names = [name for each, name in ways(size, kind) if each == collective]
    assert len(names) > 1
    for first, second in zip(names, names[1:] + names[:1], strict=True):
        calls = [Call(collective, algorithm=second if rank == 1 else first) for rank in range(size)]
        check(kind, calls, [f"algorithm {first}", f"algorithm {second}"])


@pytest.mark.parametrize("kind", ["loopback", "shm"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
@pytest.mark.parametrize("count", [40, LARGE])
def test_one_rank_passes_ordinary_memory(collective: str, count: int, kind: str) -> None:
    call = Call(collective, count=count, symmetric=True)
    calls = [replace(call, symmetric=rank != 1) for rank in range(3)]
    check(kind, calls, ["symmetric memory", "ordinary memory"])


def exchange(comm: Any, sent: tuple[int, str], received: tuple[int, str], algorithm: str | None) -> CommrtError | None:
    """Rank 0 sends to rank 1; what each raises, at last by its next operation or close."""
    count, dtype = received if comm.rank else sent
    x = np.full(count, 3, dtype)
    try:
        if comm.rank:
            comm.recv(x, 0, algorithm=algorithm)
            return None
        comm.send(x, 1, algorithm=algorithm)
        comm.close()
    except CommrtError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [(name, kind) for name in ("put", "direct", None) for kind in WORLDS]
    + [("packets", "loopback"), ("packets", "shm")],
)
@pytest.mark.parametrize("received", [(4, "float32"), (6, "float32"), (LARGE, "float32"), (5, "int32")])
def test_point_to_point(received: tuple[int, str], algorithm: str | None, kind: str) -> None:
    sent = (5, "float32")
    with make_world(kind, 2) as world:
        errors = world.outcomes(lambda comm: exchange(comm, sent, received, algorithm))
        for rank, error in enumerate(errors):
            assert type(error) is Mismatch, (rank, error)
            assert error.context.peer == 1 - rank
            for count, dtype in (sent, received):
                assert f"count {count}, dtype {dtype}" in str(error)
        assert world.communicators[1].close() is None


@pytest.mark.parametrize("kind", ["loopback", "shm"])
@pytest.mark.parametrize(
    "following",
    [Call("broadcast"), Call("all_reduce"), Call("barrier"), Call("reduce", root=1)],
    ids=lambda call: call.collective,
)
def test_a_sender_raises_by_its_next_operation(following: Call, kind: str) -> None:
    """Whatever it is: a root that has broadcast before anyone came is held in it until they have."""
    world = make_world(kind, 2)
    first, other = world.communicators
    with ThreadPoolExecutor() as pool:
        assert failure(first, Call("broadcast")) is None
        held = pool.submit(failure, first, following)
        time.sleep(0.1)
        for error in (failure(other, Call("all_gather", algorithm="put")), held.result(20)):
            assert isinstance(error, Mismatch), error
            assert "on operation 1: " in str(error)
            assert "broadcast(" in str(error)
            assert "all_gather(" in str(error)
    world.close()


@pytest.mark.parametrize("kind", list(WORLDS))
@pytest.mark.parametrize("algorithm", ["put", "packets", "tree", "direct"])
def test_another_root_wrote_over_what_was_sent(algorithm: str, kind: str) -> None:
    """Both roots have written into rank 2 when it comes: it must not take the one's data for the other's."""
    if (algorithm, kind) == ("packets", "ports"):
        return  # packets need mapped memory
    world = make_world(kind, 3)
    calls = [Call("broadcast", root=rank % 2, algorithm=algorithm) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        ends = []
        for comm, call in zip(world.communicators, calls, strict=True):
            ends.append(pool.submit(failure, comm, call))
            time.sleep(0.05)
        assert isinstance(ends[2].result(20), Mismatch)
        world.outcomes(lambda comm: comm.close())
        assert all(end.result(20) is None or isinstance(end.result(20), Mismatch) for end in ends)
    world.close()


def failure(comm: Any, call: Call) -> CommrtError | None:
    try:
        issue(comm, call, *arrays(comm, call))
    except CommrtError as error:
        return error
    return None


@pytest.mark.parametrize("kind", list(WORLDS))
def test_roots_differ_and_a_third_rank_is_between(kind: str) -> None:
    """Both roots send to rank 2: it returns what its own root sent, or raises, however the writes fall."""
    for turn in range(30):
        world = make_world(kind, 3)
        calls = [Call("broadcast", count=2000, root=rank % 2) for rank in range(3)]
        try:
            errors = world.outcomes(
                lambda comm, calls=calls: attempt(comm, calls[comm.rank], *arrays(comm, calls[comm.rank]))
            )
        finally:
            world.outcomes(lambda comm: comm.close())
            world.close()
        assert all(isinstance(error, Mismatch) for error in errors), (turn, errors)


@pytest.mark.parametrize("kind", list(WORLDS))
def test_a_missing_call_shows_when_its_rank_leaves(kind: str) -> None:
    """Rank 1 makes one call less: the others are told how far it came."""
    world = make_world(kind, 3)

    def run(comm: Any) -> None:
        for _ in range(3 if comm.rank == 1 else 4):
            comm.all_reduce(np.ones(10))
        if comm.rank == 1:
            comm.close()

    errors = world.outcomes(run)
    assert errors[1] is None
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLost), errors
        assert errors[rank].context.peer == 1
        assert errors[rank].context.sequence == 4
        assert "rank 1 left before its part of operation 4" in str(errors[rank])
        assert "it had begun 3 operations" in str(errors[rank])
    world.outcomes(lambda comm: comm.close())
    world.close()


def test_a_one_way_call_too_many_shows_at_close() -> None:
    world = make_world("loopback", 2)

    def run(comm: Any) -> None:
        if comm.rank == 0:
            comm.broadcast(np.ones(10))
        comm.close()

    errors = world.outcomes(run)
    assert errors[1] is None
    assert isinstance(errors[0], PeerLost)
    assert "rank 1 left before its part of operation 1, broadcast(" in str(errors[0])
    world.close()


def test_a_missing_call_is_named_when_time_is_up() -> None:
    world = make_world("shm", 3)
    done = threading.Barrier(3, timeout=30)

    def run(comm: Any) -> None:
        for _ in range(5 if comm.rank == 1 else 6):
            comm.all_reduce(np.ones(10), timeout=1.0)
        done.wait()

    def guarded(comm: Any) -> Exception | None:
        try:
            run(comm)
        except CommrtError as error:
            done.wait()
            return error
        return None

    errors = world.run(guarded)
    assert errors[1] is None
    for rank in (0, 2):
        assert "it was never called by rank 1 (begun so far: 5); ranks 0, 2 waited in it" in str(errors[rank])
    world.outcomes(lambda comm: comm.close())
    world.close()
