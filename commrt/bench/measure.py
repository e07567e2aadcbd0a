"""The measurement of one rank: time the calls, then check what they compute, in and out of place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from commrt.backend import DeviceBackend
from commrt.bench.options import AVERAGES, Cell, Options, bus_factor, cells
from commrt.dtypes import by_name
from commrt.testing.calls import bind
from commrt.testing.data import Case, Trial
from commrt.testing.mirror import Mirror

Times = NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True):
    """Over the iterations: microseconds, and the coefficient of variation in percent."""

    min: float
    max: float
    p99: float
    cv: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds a call, bandwidths in GB/s (1e9 bytes), wrong elements over all ranks (None: not checked)."""

    time: float
    alg_bw: float
    bus_bw: float
    nwrong: int | None
    iterations: Spread | None = None


class Row(msgspec.Struct, frozen=True):
    """One row of the table. `in_place` is None where the collective has no such form."""

    cell: Cell
    out_of_place: Measured
    in_place: Measured | None
    stamp: float


def measure(comm: Any, options: Options) -> Iterator[Row]:
    """All rows, one after the other, the same on every rank. Collective: every rank takes every row."""
    for cell in cells(options, comm.size):
        has_in_place = options.collective not in ("all_to_all", "barrier", "sendrecv")
        out_of_place = _measure_form(comm, options, cell, False)
        in_place = _measure_form(comm, options, cell, True) if has_in_place else None
        yield Row(cell, out_of_place, in_place, time.time())


def _measure_form(comm: Any, options: Options, cell: Cell, in_place: bool) -> Measured:
    case = Case(options.collective, comm.size, cell.count, cell.dtype, cell.op, max(cell.root, 0))
    trial = Trial(case, comm.rank, in_place, options.misalign * by_name(cell.dtype).itemsize)
    trial.fill()
    mirror = Mirror(trial, comm.backend) if isinstance(comm.backend, DeviceBackend) else None
    try:
        call = bind(comm, mirror or trial, options.algorithm)
        group = call if options.aggregate == 1 else _aggregated(comm, mirror or trial, options)
        with np.errstate(all="ignore"):
            times = _timed(comm, group, options)
        wrong = _wrong(call, trial, mirror, options)
    finally:
        if mirror is not None:
            mirror.close()
    return _shared(comm, options, cell, times / options.aggregate, wrong)


def _aggregated(comm: Any, trial: Trial | Mirror, options: Options) -> Callable[[], None]:
    """`aggregate` calls in flight at once."""
    start = bind(comm, trial, options.algorithm, async_op=True)

    def group() -> None:
        for work in [start() for _ in range(options.aggregate)]:
            work.wait()

    return group


def _timed(comm: Any, call: Callable[[], Any], options: Options) -> Times:
    """Microseconds: of each iteration if asked, else the mean alone."""
    now = time.perf_counter_ns
    for _ in range(options.warmup):
        call()
    comm.barrier()
    if not options.per_iteration:
        began = now()
        for _ in range(options.iters):
            call()
        return np.array([(now() - began) / 1e3 / options.iters])
    stamps = [now()]
    for _ in range(options.iters):
        call()
        stamps.append(now())
    return np.diff(np.array(stamps, np.float64)) / 1e3


def _wrong(call: Callable[[], Any], trial: Trial, mirror: Mirror | None, options: Options) -> int:
    """Wrong elements of this rank over the checked calls, each on fresh data and clobbered outputs."""
    wrong = 0
    for seed in range(1, options.check + 1):
        trial.fill(seed)
        if mirror is not None:
            mirror.send()
        call()
        if mirror is not None:
            mirror.fetch()
        wrong += trial.wrong()
    return wrong


def _shared(comm: Any, options: Options, cell: Cell, times: Times, wrong: int) -> Measured:
    """One answer for all ranks, from every rank's times and wrong elements.

    The gathering may be what is broken, so a rank never forgets its own wrong elements.
    """
    mine = np.array([*times, wrong], np.float64)
    table = np.array([np.frombuffer(one, np.float64) for one in comm.exchange(mine.tobytes())])
    over_ranks = cast(Times, _over_ranks(AVERAGES[options.average], table[:, :-1]))
    mean = float(over_ranks.mean())
    alg_bw = cell.nbytes / mean / 1e3 if mean else 0.0
    return Measured(
        time=mean,
        alg_bw=alg_bw,
        bus_bw=alg_bw * bus_factor(options.collective, comm.size),
        nwrong=max(wrong, int(table[:, -1].sum())) if options.check else None,
        iterations=_spread(over_ranks) if options.per_iteration else None,
    )


def _over_ranks(average: str, table: Times) -> Any:
    return {"rank0": table[0], "avg": table.mean(axis=0), "min": table.min(axis=0), "max": table.max(axis=0)}[average]


def _spread(times: Times) -> Spread:
    mean = float(times.mean())
    cv = 100 * float(times.std()) / mean if mean else 0.0
    return Spread(float(times.min()), float(times.max()), float(np.percentile(times, 99)), cv)
