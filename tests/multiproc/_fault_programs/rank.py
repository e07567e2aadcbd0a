"""A rank that obeys: commands come in as lines of JSON, and what happened goes out as lines of JSON.

Arguments: rank, size, rendezvous, timeout of operations. Times are those of the system's monotonic clock.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.errors import CommrtError, CommunicatorClosed


def say(event: str, **facts: Any) -> None:
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())


def summed(comm: Any, count: int) -> Any:
    return np.arange(count) * comm.size + sum(range(comm.size))


def all_reduce(comm: Any, count: int, **options: Any) -> bool:
    out = np.empty(count, np.int64)
    comm.all_reduce(np.arange(count) + comm.rank, out, **options)
    return bool((out == summed(comm, count)).all())


def broadcast(comm: Any, count: int, root: int = 0, **options: Any) -> bool:
    x = np.arange(count) + (1000 if comm.rank == root else 0)
    comm.broadcast(x, root, **options)
    return bool((x == np.arange(count) + 1000).all())


def all_to_all(comm: Any, count: int, **options: Any) -> bool:
    x = np.arange(comm.size).repeat(count) * 100 + comm.rank
    out = np.empty_like(x)
    comm.all_to_all(x, out, **options)
    return bool((out == comm.rank * 100 + np.arange(comm.size).repeat(count)).all())


def send(comm: Any, count: int, peer: int) -> bool:
    comm.send(np.arange(count) + 7, peer)
    return True


def recv(comm: Any, count: int, peer: int) -> bool:
    x = np.zeros(count, np.int64)
    comm.recv(x, peer)
    return bool((x == np.arange(count) + 7).all())


def wait_async(comm: Any, count: int) -> bool:
    x = np.arange(count) + comm.rank
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    return bool((x == summed(comm, count)).all())


def wait_irecv(comm: Any, count: int, peer: int) -> bool:
    x = np.zeros(count, np.int64)
    comm.irecv(x, peer).wait()
    return bool((x == np.arange(count) + 7).all())


def leave_pending(comm: Any, count: int) -> bool:
    """Async work that nobody ever waits for."""
    comm.all_reduce(np.zeros(count), async_op=True)
    return True


def isend(comm: Any, count: int, peer: int) -> bool:
    comm.isend(np.arange(count) + 7, peer)
    return True


def barrier(comm: Any) -> bool:
    comm.barrier()
    return True


def close(comm: Any) -> bool:
    comm.close()
    return True


def abort(comm: Any) -> bool:
    comm.abort()
    return True


def stream(comm: Any, count: int) -> bool:
    """All-reduces without an end, but for an error."""
    turns = 0
    while all_reduce(comm, count):
        turns += 1
        if turns == 20:
            say("flows")
    return False


def stall(comm: Any, provider: str) -> bool:
    """From now on this rank comes to what another library carries, but does nothing of it."""

    class Idle:
        def wait(self, timeout: float) -> bool:
            time.sleep(timeout)
            return False

    comm._issuer._carriage._joined[provider].carrier.start = lambda task: Idle()
    return True


def fail(comm: Any) -> bool:
    raise SystemError("as told")


def leave(comm: Any) -> bool:
    sys.exit(0)


def use_of_the_parents(comm: Any, work: Any) -> None:
    """In a forked child: all of it raises at once, harmless calls do nothing, and a world of one's own works."""
    calls: list[Callable[[], Any]] = [
        comm.barrier, lambda: all_reduce(comm, 3), lambda: send(comm, 3, 0), lambda: comm.irecv(np.ones(3), 0),
        lambda: comm.split(0), lambda: comm.empty(3), lambda: comm.prepare("barrier"), work.wait,
    ]  # fmt: skip
    for call in calls:
        start = time.monotonic()
        message = ""
        try:
            call()
        except CommunicatorClosed as error:
            message = str(error)
        assert "forked" in message
        assert time.monotonic() - start < 1
    assert work.done()
    comm.abort()
    comm.close()
    with commrt.init(0, 1) as own:
        assert all_reduce(own, 3)
        assert own.all_reduce(np.ones(3), async_op=True).wait()


def fork(comm: Any, how: str) -> bool:
    """Fork with work in flight, use what is the parent's in the child, and see how the child ends."""
    work = comm.irecv(np.zeros(3, np.int64), 1 - comm.rank)
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=use_of_the_parents, args=(comm, work))
        child.start()
        child.join(30)
        return child.exitcode == 0 and not work.done()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and not work.done()
    use_of_the_parents(comm, work)
    if how == "os._exit":
        os._exit(0)
    sys.exit(0)


OPERATIONS: dict[str, Callable[..., bool]] = {
    each.__name__: each
    for each in (
        all_reduce, broadcast, all_to_all, send, recv, wait_async, wait_irecv, leave_pending, isend, barrier, close,
        abort, stream, stall, fail, leave, fork,
    )
}  # fmt: skip


def obey(comm: Any, command: dict[str, Any]) -> None:
    """Run one command and say how it ended. Errors of commrt end there; all others are the program's."""
    operation = OPERATIONS[command.pop("do")]
    say("calling")
    ended = threading.Event()
    threading.Thread(target=watch, args=(threading.get_ident(), ended), daemon=True).start()
    start = time.monotonic()
    try:
        right = operation(comm, **command)
    except CommrtError as error:
        ended.set()
        context = error.context
        say(
            "ended", error=type(error).__name__, message=str(error), peer=context.peer, sequence=context.sequence,
            took=time.monotonic() - start,
        )  # fmt: skip
    else:
        ended.set()
        say("ended", error=None, right=right, took=time.monotonic() - start)


def watch(thread: int, ended: threading.Event) -> None:
    """Say so once the thread stays where native code is called."""
    seen = 0
    while not ended.wait(0.02):
        place = Path(sys._current_frames()[thread].f_code.co_filename).name
        seen = seen + 1 if place in ("issuing.py", "work.py") else 0
        if seen == 3:
            return say("blocked")


def serve(comm: Any) -> None:
    say("ready")
    for line in sys.stdin:
        obey(comm, json.loads(line))


def main() -> None:
    rank, size, rendezvous, timeout, style = sys.argv[1:]
    try:
        comm = commrt.init(
            int(rank), int(size), rendezvous, timeout=float(timeout), init_timeout=float(os.environ.get("INIT_S", "30"))
        )
    except CommrtError as error:
        say("ended", error=type(error).__name__, message=str(error))
        return
    if style == "with":
        with comm:
            serve(comm)
    else:
        serve(comm)


main()
