"""Every collective by every algorithm on every type, exact, with all ranks in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt.communicator import Communicator
from commrt.group import Options
from commrt.plugins import default_registry
from commrt.testing import matrix
from commrt.testing.world import World

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

SIZES = (1, 2, 3, 4, 5, 8)
LAP = Options().lap
WRAPS = {
    "flag": Options(epoch=LAP - 100),
    "word": Options(epoch=(1 << 32) - 100),
    "both": Options(epoch=(1 << 32) - 100, lap=1 << 31),
    "tiny": Options(epoch=94, lap=6),
    "tiniest": Options(lap=4),
}


def run_list(size: int, options: Options, most: int | None, seed: int, only: tuple[int, ...] | None = None) -> None:
    """`most` of the list, all of it if None, on one world."""
    with World(size, options=options) as world:
        whole = matrix.variants(size, world.communicators[0].capabilities, only=only)
        chosen = matrix.sample(whole, len(whole) if most is None else most, seed)
        assert world.run(lambda comm: matrix.run(comm, chosen)) == [len(chosen)] * size


def run_around(size: int, options: Options, most: int, seed: int) -> None:
    """All of the list in pieces, each on a world that starts where `options` say."""
    with World(size) as world:
        whole = matrix.variants(size, world.communicators[0].capabilities)
    chosen = matrix.sample(whole, len(whole), seed)
    for first in range(0, len(chosen), most):
        with World(size, options=options) as world:
            world.run(lambda comm, first=first: matrix.run(comm, chosen[first : first + most]))  # type: ignore[misc]


@pytest.mark.parametrize("size", SIZES)
def test_sample(size: int) -> None:
    run_list(size, Options(), 1000, seed=size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
def test_whole(size: int) -> None:
    run_list(size, Options(), None, seed=size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_sample_around_wraps(wrap: str, size: int) -> None:
    run_list(size, WRAPS[wrap], 300, seed=size)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_whole_around_wraps(wrap: str, size: int) -> None:
    """With a tiny lap everything wraps all the time; elsewhere each piece crosses the wrap."""
    if wrap.startswith("tin"):
        run_list(size, WRAPS[wrap], None, seed=size)
    else:
        run_around(size, WRAPS[wrap], 300, seed=size)


@pytest.mark.parametrize("size", SIZES)
def test_sample_on_ports(size: int) -> None:
    run_list(size, Options({"family": "port"}), 500, seed=size)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
def test_whole_on_ports(size: int) -> None:
    run_list(size, Options({"family": "port"}), None, seed=size)


def test_sample_on_ports_with_a_tiny_lap() -> None:
    run_list(3, Options({"family": "port"}, epoch=4, lap=6), 300, seed=1)


def test_sixty_four_ranks() -> None:
    run_list(64, Options(), 150, seed=64, only=(0, 1, 63, 65, 1021))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_four_ranks_whole() -> None:
    run_list(64, Options(), None, seed=64, only=(0, 1, 63, 65, 1021))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_four_ranks_with_many_elements() -> None:
    """A sample: every rank makes and checks each call's data, some GB where all ranks' parts are gathered."""
    run_list(64, Options(), 200, seed=65, only=(65539,))


def test_the_list_has_every_algorithm() -> None:
    """Whatever is offered for some number of ranks is forced by some call of the list."""
    offered = {
        (one.collective, name)
        for name, one in default_registry().usable("algorithms").items()
        if any(one.least_ranks <= size <= one.most_ranks for size in SIZES)
    }
    everything = ("mapped", "direct", "switch")
    listed = {
        ("send" if one.case.collective == "sendrecv" else one.case.collective, one.algorithm)
        for size in SIZES
        for one in matrix.variants(size, everything, dtypes=("float32",), only=(1,))
        if one.algorithm
    }
    assert {(collective, f"{collective}/{name}") for collective, name in listed} == offered


def values(dtype: str, rank: int, count: int) -> Any:
    """What does not sum exactly, with every special value in each rank's own places."""
    rng = np.random.default_rng(rank)
    made = (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 4, count)).astype(np.float64)
    for special in (np.nan, np.inf, -np.inf, -0.0):
        made[rng.integers(0, count, count // 50)] = special
    with np.errstate(over="ignore"):
        return made.astype(matrix.numpy_dtype(dtype))


def reductions(size: int) -> Iterator[tuple[str, str]]:
    for algorithm in default_registry().usable("algorithms").values():
        fits = algorithm.collective == "all_reduce" and algorithm.least_ranks <= size <= algorithm.most_ranks
        if fits and "symmetric" not in algorithm.requires:
            for op in ("sum", "prod", "min", "max", "avg"):
                yield algorithm.name, op


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_all_ranks_get_the_same_bits_of_inexact_sums(dtype: str) -> None:
    size, count = 5, 3001

    def reduce_all(comm: Communicator) -> list[bytes]:
        x = values(dtype, comm.rank, count)
        out = np.empty_like(x)
        return [comm.all_reduce(x, out, op, algorithm=algorithm).tobytes() for algorithm, op in reductions(size)]

    with World(size) as world:
        results = world.run(reduce_all)
    assert all(result == results[0] for result in results)
    assert len(results[0]) >= 5 * 7


@pytest.mark.parametrize("op", ["min", "max", "sum", "avg", "prod"])
def test_nan_propagates(op: str) -> None:
    def reduce_all(comm: Communicator) -> Any:
        x = np.arange(100, dtype=np.float32)
        x[comm.rank * 7] = np.nan
        return comm.all_reduce(x, op=op)

    with World(3) as world:
        for result in world.run(reduce_all):
            assert np.flatnonzero(np.isnan(result)).tolist() == [0, 7, 14]
