"""Every collective by every algorithm that claims to carry it: the list of such calls, and running it with all checks.

The list is the same on all ranks, so each can make it by itself. Data, guards and results are those of `data`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.algorithm import Algorithm
from commrt.backend import DeviceBackend
from commrt.plugins import default_registry
from commrt.testing.calls import bind
from commrt.testing.data import COLLECTIVES, REDUCING, REDUCTIONS, ROOTED, Array, Case, Trial, numpy_dtype
from commrt.testing.mirror import Mirror, Pieces

DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "float64")
_IN_PLACE = tuple(name for name in COLLECTIVES if name not in ("all_to_all", "sendrecv", "barrier", "broadcast"))
_MISALIGNED = (0, 8, 1)
_SLACK = 1 << 10


@dataclass(frozen=True)
class Variant:
    """One call. `algorithm` None: what selection chooses. `symmetric`: on memory of `Communicator.empty`."""

    case: Case
    algorithm: str | None = None
    in_place: bool = False
    symmetric: bool = False
    misalign: int = 0


def counts(size: int) -> tuple[int, ...]:
    """Nothing, one, around the number of ranks, a prime, and more than any one window of packets."""
    return tuple(sorted({0, 1, size - 1, size + 1, 1021, 65539}))


def variants(
    size: int, capabilities: Iterable[str], *, dtypes: Sequence[str] = DTYPES, only: Sequence[int] | None = None
) -> list[Variant]:
    """The whole list for a world of `size` ranks whose links offer `capabilities`. `only`: other counts."""
    offered = frozenset(capabilities)
    found: list[Variant] = []
    for collective in COLLECTIVES:
        ways = list(_ways(collective, size, offered))
        for case in _cases(collective, size, dtypes, counts(size) if only is None else only):
            for algorithm, symmetric in ways:
                for in_place in (False, True) if collective in _IN_PLACE else (False,):
                    misalign = _MISALIGNED[len(found) % len(_MISALIGNED)]
                    found.append(Variant(case, algorithm, in_place, symmetric, misalign))
    return found


def sample(whole: Sequence[Variant], most: int, seed: int) -> list[Variant]:
    """`most` of them, in random order, but equal dtypes and operators together, whose data is costly to make."""
    rng = random.Random(seed)
    chosen = rng.sample(whole, min(most, len(whole)))
    rng.shuffle(chosen)
    return sorted(chosen, key=lambda one: (one.case.dtype, one.case.op, one.case.collective not in REDUCING))


class Pool:
    """Two pieces of symmetric memory, used again for each call: one for inputs, one for outputs."""

    def __init__(self, comm: Any, whole: Iterable[Variant]) -> None:
        needed = [_nbytes(one) for one in whole if one.symmetric]
        self._parts: list[Array] = [comm.empty(max(needed) + _SLACK, "uint8") for _ in range(2)] if needed else []
        self._next = 0

    def take(self, nbytes: int) -> Array:
        """That many bytes of the piece that was not used last."""
        self._next = 1 - self._next
        return self._parts[self._next][:nbytes]


def run(comm: Any, whole: Sequence[Variant]) -> int:
    """Run the whole list, and check each call. Collective. Their number; raises AssertionError at a wrong one."""
    pool = Pool(comm, whole)
    pieces = _pieces(comm, whole)
    for number, one in enumerate(whole):
        trial = Trial(one.case, comm.rank, one.in_place, one.misalign, pool.take if one.symmetric else None)
        trial.fill()
        result = _call(comm, trial, one, pieces)
        wrong = trial.wrong(result if isinstance(result, np.ndarray) and trial.out is not None else None)
        if wrong:
            raise AssertionError(f"{wrong} elements are wrong on rank {comm.rank} of call {number}, {one}")
    if pieces is not None:
        comm.barrier()
        pieces.close()
    return len(whole)


def _pieces(comm: Any, whole: Iterable[Variant]) -> Pieces | None:
    """Memory for all calls, where arrays are on a device."""
    if not isinstance(comm.backend, DeviceBackend):
        return None
    return Pieces(comm.backend, max(map(_nbytes, whole), default=0) + _SLACK)


def _call(comm: Any, trial: Trial, one: Variant, pieces: Pieces | None) -> Any:
    """What the call returned, on the host."""
    if pieces is None:
        return bind(comm, trial, one.algorithm)()
    mirror = Mirror(trial, comm.backend, pieces.take)
    mirror.send()
    bind(comm, mirror, one.algorithm)()
    mirror.fetch()
    mirror.close()
    return None


def _cases(collective: str, size: int, dtypes: Sequence[str], sizes: Sequence[int]) -> Iterator[Case]:
    if collective == "barrier":
        yield Case(collective, size, 0)
        return
    for dtype in dtypes:
        for op in REDUCTIONS if collective in REDUCING else ("sum",):
            for count in sizes:
                for root in sorted({0, size - 1}) if collective in ROOTED else (0,):
                    yield Case(collective, size, count, dtype, op, root)


def _ways(collective: str, size: int, offered: frozenset[str]) -> Iterator[tuple[str | None, bool]]:
    """(algorithm, symmetric): selection's choice for both kinds of memory, and all that can run, forced."""
    kinds = (False, True) if "mapped" in offered and collective != "barrier" else (False,)
    yield from ((None, symmetric) for symmetric in kinds)
    for algorithm in _algorithms("send" if collective == "sendrecv" else collective):
        ranks = 2 if algorithm.collective == "send" else size
        if algorithm.least_ranks <= ranks <= algorithm.most_ranks:
            yield from ((algorithm.name, symmetric) for symmetric in kinds if _serves(algorithm, offered, symmetric))


def _serves(algorithm: Algorithm, offered: frozenset[str], symmetric: bool) -> bool:
    """As selection has it; symmetric memory is tried where an algorithm looks at it."""
    needs = set(algorithm.requires)
    if symmetric:
        return bool(needs & {"symmetric", "direct"}) and needs - {"symmetric", "direct"} <= offered
    return needs <= offered


def _algorithms(collective: str) -> list[Algorithm]:
    return [one for one in default_registry().usable("algorithms").values() if one.collective == collective]


def _nbytes(one: Variant) -> int:
    return max(one.case.input_count, one.case.output_count) * int(numpy_dtype(one.case.dtype).itemsize)
