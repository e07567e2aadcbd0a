"""Uses that once went wrong: each found by trying to break a communicator, and each with the right value."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from commrt.communicator import Communicator, Recv, Send
from commrt.errors import InvalidArgument, OperationTimeout, PlanError
from commrt.plan import load
from commrt.plugins import default_registry
from commrt.testing.world import World


def test_two_threads_may_wait_for_one_work() -> None:
    def ranks(comm: Communicator) -> None:
        x = np.zeros(2, np.float32)
        with ThreadPoolExecutor(2) as pool:
            for turn in range(400):
                x[:] = turn
                work = comm.all_reduce(x, async_op=True)
                others = [pool.submit(work.wait) for _ in range(2)]
                assert work.wait()
                assert x.tolist() == [2.0 * turn] * 2, turn
                assert all(other.result() for other in others)

    with World(2) as world:
        world.run(ranks)


def ring(ranks: int) -> Any:
    """The plan of a ring, as plain data."""
    return msgspec.json.decode(default_registry().require("algorithms", "all_reduce/ring").plan(ranks).to_json())


def test_a_plan_whose_length_is_of_another_part_is_refused() -> None:
    plan = ring(2)
    copies = [op for op in plan["programs"][1]["blocks"][0] if op["name"] == "copy" and op["size"].get("part")]
    del copies[-1]["size"]["part"]
    with pytest.raises(PlanError, match="as long as part 0, but acts on part 1"):
        load(msgspec.json.encode(plan))


@pytest.mark.parametrize(("field", "value"), [("channel", 256), ("peers", [2**32])])
def test_what_an_operation_does_not_use_is_refused(field: str, value: object) -> None:
    plan = ring(2)
    plan["programs"][0]["blocks"][0][0][field] = value
    with pytest.raises(PlanError, match="only signal and wait have a channel and peers"):
        load(msgspec.json.encode(plan))


@pytest.mark.parametrize("bad", [5, Send(np.ones(8, np.float32)[::2], 1), Recv(np.ones(2, np.float32), 9)])
def test_a_refused_batch_has_started_nothing(bad: Any) -> None:
    def ranks(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            with pytest.raises(InvalidArgument):
                comm.batch([Send(np.full(4, 7, np.float32), 1), bad])
            comm.send(np.arange(4, dtype=np.float32), 1)
            return []
        received: list[float] = comm.recv(np.zeros(4, np.float32), 0).tolist()
        return received

    with World(2) as world:
        assert world.run(ranks)[1] == [0, 1, 2, 3]


@pytest.mark.parametrize("collective", ["all_reduce", "barrier"])
def test_a_timeout_of_zero_is_one(collective: str) -> None:
    late = threading.Event()

    def ranks(comm: Communicator) -> float:
        x = np.ones(4, np.float32)
        for _ in range(3):
            comm.all_reduce(x)
        if comm.rank == 1:
            late.wait(20)
            return 0.0
        started = time.monotonic()
        with pytest.raises(OperationTimeout):
            comm.all_reduce(x, timeout=0) if collective == "all_reduce" else comm.barrier(timeout=0)
        late.set()
        return time.monotonic() - started

    world = World(2)
    assert world.run(ranks)[0] < 5
    world.outcomes(lambda comm: comm.close())
    world.close()


@pytest.mark.parametrize("nbytes", [32, 1 << 20])
def test_symmetric_inputs_are_gathered_and_reduced_into_ordinary_memory(nbytes: int) -> None:
    def ranks(comm: Communicator) -> None:
        x = comm.empty(nbytes // 4)
        index = np.arange(x.size) % 61
        x[:] = index + comm.rank
        gathered = comm.gather(x, root=1)
        total = np.empty(x.size, np.float32) if comm.rank == 2 else None
        comm.reduce(x, total, root=2)
        if comm.rank == 1:
            assert all((gathered[rank] == index + rank).all() for rank in range(comm.size))
        if total is not None:
            assert (total == index * comm.size + sum(range(comm.size))).all()
        assert (x == index + comm.rank).all()

    with World(3) as world:
        world.run(ranks)


@pytest.mark.parametrize(
    "call", [{"timeout": "3"}, {"algorithm": 3}, {"stream": 3}, {"op": ["sum"]}, {"timeout": float("nan")}]
)
def test_arguments_of_a_wrong_type(call: dict[str, Any]) -> None:
    def ranks(comm: Communicator) -> None:
        x = np.ones(4, np.float32)
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                comm.all_reduce(x, **call)
            comm.all_reduce(x)
        assert x.tolist() == [4.0] * 4

    with World(2) as world:
        world.run(ranks)
