"""A collective as a call without arguments, for loops that time or check it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from commrt.testing.data import REDUCING, ROOTED, Trial
from commrt.testing.mirror import Mirror
from commrt.work import WorkGroup


def bind(comm: Any, trial: Trial | Mirror, algorithm: str | None = None, **more: Any) -> Callable[[], Any]:
    """The trial's collective on its buffers, one direct method call each time. `more` is passed on, as is `algorithm`
    unless None.
    """
    case, x, out = trial.case, trial.x, trial.out
    collective = case.collective
    keywords = dict(more) if algorithm is None else {**more, "algorithm": algorithm}
    if collective == "barrier":
        return functools.partial(comm.barrier, **keywords)
    if collective == "sendrecv":
        return functools.partial(_exchange, comm, x, out, **keywords)
    # What is the default anyway is left out: a keyword costs a call of a microsecond a twentieth.
    if collective in REDUCING and case.op != "sum":
        keywords["op"] = case.op
    if collective in ROOTED and case.root:
        keywords["root"] = case.root
    arrays = (x,) if x is out or out is None or collective == "broadcast" else (x, out)
    return functools.partial(getattr(comm, collective), *arrays, **keywords)


def _exchange(comm: Any, x: Any, out: Any, async_op: bool = False, **keywords: Any) -> Any:
    """Each rank to the next one."""
    incoming = comm.irecv(out, (comm.rank - 1) % comm.size, **keywords)
    works = WorkGroup([incoming, comm.isend(x, (comm.rank + 1) % comm.size, **keywords)])
    return works if async_op else works.wait()
