"""Programs of one rank that only end if operations make progress by themselves, in whatever order they are waited for.

Each takes a communicator, is collective, checks its results, and raises AssertionError if they are wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from commrt.testing.data import Case, Stream, Trial

Scenario = Callable[[Any], None]

_SLEEP_S = 1.0
_AWAY_S = 0.5
_LARGE, _SMALL = 300_007, 13


def waits_in_opposite_order(comm: Any) -> None:
    """Even ranks wait for the first communicator's work first, odd ones for the second's."""
    other = comm.split(0, comm.rank)
    for turn, count in enumerate((_SMALL, _LARGE, 0, 4099)):
        trials = [_reduction(comm, count, 2 * turn + one) for one in range(2)]
        works = [
            each.all_reduce(one.x, one.out, async_op=True) for each, one in zip((comm, other), trials, strict=True)
        ]
        for index in (0, 1) if comm.rank % 2 == 0 else (1, 0):
            works[index].wait()
            _check(trials[index])
    other.close()


def starts_in_opposite_order(comm: Any) -> None:
    """Ranks start the work of two communicators in opposite order, and block in the one they started last."""
    other = comm.split(0, comm.rank)
    for turn in range(5):
        trials = [_reduction(comm, _LARGE, 2 * turn + one) for one in range(2)]
        ends = list(zip((comm, other), trials, strict=True))
        if comm.rank % 2:
            ends.reverse()
        works = [each.all_reduce(one.x, one.out, async_op=True) for each, one in ends]
        for work, (_, trial) in zip(reversed(works), reversed(ends), strict=True):
            work.wait()
            _check(trial)
    other.close()


def sleeps_after_starting(comm: Any) -> None:
    """Rank 0 starts and sleeps; the others end long before it wakes, since nothing of it needs the sleeper."""
    for count in (_SMALL, _LARGE):
        trial = _reduction(comm, count, count)
        comm.barrier()
        start = time.monotonic()
        work = comm.all_reduce(trial.x, trial.out, async_op=True)
        if comm.rank == 0:
            time.sleep(_SLEEP_S)
            assert work.done(), "the work did not end while its rank slept"
        work.wait()
        took = time.monotonic() - start
        assert comm.rank == 0 or took < _AWAY_S, f"rank {comm.rank} waited {took:.2f} s for a rank that only slept"
        _check(trial)


def receives_before_sending(comm: Any) -> None:
    """All post their receives first, then their sends, small and large, and wait in either order."""
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    for count in (_SMALL, _LARGE, 0):
        incoming = {peer: np.zeros(count, np.int64) for peer in peers}
        works = [comm.irecv(incoming[peer], peer) for peer in peers]
        outgoing = {peer: _message(comm.size, comm.rank, peer, count) for peer in peers}
        works += [comm.isend(outgoing[peer], peer) for peer in peers]
        for work in works if comm.rank % 2 else reversed(works):
            work.wait()
        for peer in peers:
            assert (incoming[peer] == _message(comm.size, peer, comm.rank, count)).all()


def blocks_in_receives_behind_a_send(comm: Any) -> None:
    """All start a send that needs the receiver, then block in the receive of the other's."""
    behind, ahead = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for count in (_SMALL, _LARGE):
        out = np.zeros(count, np.int64)
        work = comm.isend(_message(comm.size, comm.rank, ahead, count), ahead)
        comm.recv(out, behind)
        work.wait()
        assert (out == _message(comm.size, behind, comm.rank, count)).all()


def two_threads_share(comm: Any) -> None:
    """Two threads take turns at collectives, in the same order everywhere, and send to each other's peers freely."""
    turns, order = 60, threading.Condition()
    done = [0]
    errors: list[BaseException] = []

    def thread(number: int) -> None:
        try:
            for turn in range(turns):
                _exchange(comm, number, turn)
                if turn % 2 == number:
                    _in_turn(comm, turn, order, done, errors)
        except BaseException as error:
            errors.append(error)
            with order:
                order.notify_all()

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]


def _in_turn(comm: Any, turn: int, order: threading.Condition, done: list[int], errors: list[BaseException]) -> None:
    with order:
        order.wait_for(lambda: done[0] == turn or errors)
        if errors:
            return
        trial = _reduction(comm, 1 + 997 * (turn % 7), turn)
        work = comm.all_reduce(trial.x, trial.out, async_op=True) if turn % 3 else None
        if work is None:
            comm.all_reduce(trial.x, trial.out)
        done[0] = turn + 1
        order.notify_all()
    if work is not None:
        work.wait()
    _check(trial)


def _exchange(comm: Any, number: int, turn: int) -> None:
    """Thread 0 sends up, thread 1 down, so that each ordered pair of ranks belongs to one thread where size > 2."""
    step = 1 if number == 0 else -1
    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    if comm.size == 2 and number == 1:
        to = source = comm.rank  # the other thread has the only pair
    count = 1 + 331 * (turn % 11)
    out = np.zeros(count, np.int64)
    incoming = comm.irecv(out, source)
    outgoing = comm.isend(_message(comm.size, comm.rank, to, count), to)
    incoming.wait()
    outgoing.wait()
    assert (out == _message(comm.size, source, comm.rank, count)).all()


def _reduction(comm: Any, count: int, seed: int) -> Trial:
    trial = Trial(Case("all_reduce", comm.size, count, "int64"), comm.rank)
    trial.fill(seed)
    return trial


def _check(trial: Trial) -> None:
    wrong = trial.wrong()
    assert not wrong, f"{wrong} elements are wrong on rank {trial.rank} of {trial.case}"


def _message(size: int, source: int, target: int, count: int) -> Any:
    return Stream("int64", None, size, source, seed=target).read(0, count)


ASYNCHRONY: tuple[Scenario, ...] = (
    waits_in_opposite_order,
    starts_in_opposite_order,
    sleeps_after_starting,
    receives_before_sending,
    blocks_in_receives_behind_a_send,
    two_threads_share,
)
