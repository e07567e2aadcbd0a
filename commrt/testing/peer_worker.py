"""A rank of a side-by-side benchmark that drives its contestants over standard input and output.

Started once a rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and BENCH_CPU if the rank shall pin itself.
Each line of input asks for one measurement:

    {"cmd": "run", "op": "all_reduce", "bytes": 1024, "warmup": 8, "iters": 500, "inplace": 0, "check": 1}

and rank 0 answers with one line, in which `times_us` has the slowest rank's time of each iteration:

    {"op": "all_reduce", "bytes": 1024, "actual_bytes": 1024, "ok": true, "times_us": [...]}

Arrays are ordinary numpy arrays of float32, allocated before the loop; the loop is direct calls of the public methods.
The end of the input ends the rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from commrt.testing.calls import bind
from commrt.testing.data import Case, Trial

Call = Callable[[], Any]
Hook = Callable[[str, NDArray[Any]], None]

_ITEMSIZE = 4
_MOST_BYTES = 1 << 34
_MOST_ITERATIONS = 1 << 24
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
_SHARED_OUT = ("all_gather", "reduce_scatter", "all_to_all")


def serve(comm: Any, requests: Iterable[str], answers: TextIO, hook: Hook | None = None) -> None:
    """Answer every request; rank 0 writes. Collective: all ranks get the same requests.

    `hook(op, output)` is called after each checked call that has an output, before the check, on every rank: what it
    does to the output the check must find. Raises ValueError for a request that is malformed.
    """
    for line in requests:
        answer = _answer(comm, json.loads(line), hook)
        if comm.rank == 0:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _answer(comm: Any, request: dict[str, Any], hook: Hook | None) -> dict[str, Any]:
    op, nbytes = str(request["op"]), _bounded(request, "bytes", _MOST_BYTES)
    head: dict[str, Any] = {"op": op, "bytes": nbytes}
    if op not in (*_COLLECTIVES, "pingpong"):
        return {**head, "unsupported": f"no operation {op!r}"}
    count = max(1, nbytes // _ITEMSIZE // (comm.size if op in _SHARED_OUT else 1))
    contest = _pingpong(comm, count) if op == "pingpong" else _collective(comm, op, count, bool(request.get("inplace")))
    halves = 2 if op == "pingpong" else 1
    warmup, iters = (_bounded(request, name, _MOST_ITERATIONS) for name in ("warmup", "iters"))
    times = _slowest(comm, _timed(comm, contest.call, warmup, iters) / halves)
    ok = contest.check(comm, hook) if request.get("check") else None
    actual = 0 if op == "barrier" else count * _ITEMSIZE * (comm.size if op in _SHARED_OUT else 1)
    return {**head, "actual_bytes": actual, "ok": ok, "times_us": times.tolist()}


def _bounded(request: dict[str, Any], name: str, most: int) -> int:
    value = request[name]
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r}, and must be a whole number up to {most}")
    return value


class _Contest:
    """One operation on its buffers: the call to time, and the check of what it computes."""

    def __init__(self, op: str, trial: Trial, call: Call, checked: bool = True) -> None:
        self.call, self._op, self._trial, self._checked = call, op, trial, checked

    def check(self, comm: Any, hook: Hook | None) -> bool:
        """One more call on fresh data; whether every element is exact on every rank."""
        self._trial.fill(seed=1)
        self.call()
        if hook is not None and self._trial.out is not None and self._trial.out.size:
            hook(self._op, self._trial.out)
        wrong = self._trial.wrong() if self._checked else 0
        everyones = np.empty(comm.size, np.int64)
        comm.all_gather(np.array([wrong]), everyones)
        return max(wrong, int(everyones.sum())) == 0


def _collective(comm: Any, op: str, count: int, in_place: bool) -> _Contest:
    case = Case(op, comm.size, 0 if op == "barrier" else count)
    trial = Trial(case, comm.rank, in_place and op == "all_reduce")
    trial.fill()
    return _Contest(op, trial, bind(comm, trial))


def _pingpong(comm: Any, count: int) -> _Contest:
    """Ranks 0 and 1 send each other their data in turn; the others only take part in the checks."""
    trial = Trial(Case("sendrecv", 2, count), comm.rank % 2)
    trial.fill()
    x, out = trial.x, trial.out

    def send_first() -> None:
        comm.send(x, 1)
        comm.recv(out, 1)

    def receive_first() -> None:
        comm.recv(out, 0)
        comm.send(x, 0)

    calls: tuple[Call, ...] = (send_first, receive_first) if comm.size > 1 else ()
    takes_part = comm.rank < len(calls)
    return _Contest("pingpong", trial, calls[comm.rank] if takes_part else _nothing, takes_part)


def _nothing() -> None:
    """The part of a rank that has none."""


def _timed(comm: Any, call: Call, warmup: int, iters: int) -> NDArray[np.float64]:
    """Microseconds of each iteration."""
    now = time.perf_counter_ns
    comm.barrier()
    for _ in range(warmup):
        call()
    stamps = [now()]
    append = stamps.append
    for _ in range(iters):
        call()
        append(now())
    return np.diff(np.array(stamps, np.float64)) / 1e3


def _slowest(comm: Any, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each iteration, the longest time of any rank."""
    everyones = np.empty((comm.size, len(times)))
    comm.all_gather(times, everyones)
    slowest: NDArray[np.float64] = everyones.max(axis=0)
    return slowest


def main(hook: Hook | None = None) -> None:
    """Be one rank, until the end of the input. `hook` as in `serve`."""
    import commrt

    if cpu := os.environ.get("BENCH_CPU"):
        os.sched_setaffinity(0, {int(cpu)})
    with commrt.init() as comm:
        serve(comm, sys.stdin, sys.stdout, hook)


if __name__ == "__main__":
    main()
