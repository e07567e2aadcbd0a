"""What each collective promises, in numpy, and buffers to try it on. Data differs per rank and per index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commrt.algorithm import Algorithm
from commrt.plan import groups
from commrt.plugins import default_registry
from commrt.testing.folding import fold

Array = NDArray[Any]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ALGORITHMS: dict[str, Algorithm] = default_registry().usable("algorithms")


def roots(collective: str, ranks: int) -> list[int]:
    """The roots worth trying: the ends and the middle."""
    return sorted({0, ranks // 2, ranks - 1}) if collective in ROOTED else [0]


def can_alias(collective: str) -> bool:
    """Whether output and input may be one buffer."""
    return collective not in ("all_to_all", "barrier", "send")


@dataclass
class Case:
    """The buffers of all ranks for one run of a collective, and what the outputs must hold."""

    inputs: list[Array | None]
    outputs: list[Array | None]
    kept: list[Array | None]
    expected: list[Array | None]

    def check(self, in_place: bool) -> None:
        """Outputs exact, and the same bits on all ranks; inputs untouched unless they are the outputs."""
        for rank, (got, want) in enumerate(zip(self.outputs, self.expected, strict=True)):
            if want is not None:
                assert got is not None
                np.testing.assert_array_equal(got, want, f"output of rank {rank}")
        if not in_place:
            for rank, (after, before) in enumerate(zip(self.inputs, self.kept, strict=True)):
                np.testing.assert_array_equal(after, before, f"input of rank {rank}")


def make_case(
    collective: str, ranks: int, count: int, root: int, in_place: bool, dtype: Any = np.float32, reduction: str = "sum"
) -> Case:
    """Buffers for `count` elements a group."""
    groups_in, groups_out = groups(collective, ranks)
    data = [_values(rank, groups_in * count, dtype) for rank in range(ranks)]
    expected = _expected(collective, ranks, count, root, data, reduction)
    inputs: list[Array | None] = list(data)
    if collective == "scatter":
        inputs = [array if rank == root else None for rank, array in enumerate(data)]
    if collective == "send":
        inputs[1] = None
    outputs = [None if want is None else np.full(groups_out * count, 77, dtype) for want in expected]
    if in_place:
        for rank in range(ranks):
            inputs[rank], outputs[rank] = _alias(collective, rank, root, count, inputs[rank], outputs[rank])
    kept = [None if array is None else array.copy() for array in inputs]
    return Case(inputs, outputs, kept, expected)


def _values(rank: int, size: int, dtype: Any) -> Array:
    """Small integers: sums of a few are exact in every type that reduces."""
    return ((np.arange(size) * 7 + rank * 3 + 1) % 5).astype(dtype)


def _expected(
    collective: str, ranks: int, count: int, root: int, data: list[Array], reduction: str
) -> list[Array | None]:
    everything = np.concatenate(data) if data else np.empty(0)
    total = fold(data, reduction, ranks)

    def of(rank: int) -> Array | None:
        own = slice(rank * count, (rank + 1) * count)
        results = {
            "all_reduce": total, "all_gather": everything, "reduce_scatter": total[own], "broadcast": data[root],
            "reduce": total if rank == root else None, "gather": everything if rank == root else None,
            "scatter": data[root][own], "all_to_all": np.concatenate([array[own] for array in data]),
            "send": data[0] if rank == 1 else None,
        }  # fmt: skip
        result = results.get(collective)
        return None if result is None else result.copy()

    return [of(rank) for rank in range(ranks)]


def _alias(
    collective: str, rank: int, root: int, count: int, source: Array | None, target: Array | None
) -> tuple[Array | None, Array | None]:
    """In place as the collective defines it."""
    own = slice(rank * count, (rank + 1) * count)
    if source is None or target is None:
        return source, target
    if collective in ("all_gather", "gather"):
        target[own] = source
        return target[own], target
    if collective == "reduce_scatter" or (collective == "scatter" and rank == root):
        return source, source[own]
    return (source, target) if collective == "scatter" else (source, source)
