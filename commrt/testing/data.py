"""Inputs whose results are known exactly, and what each collective must make of them.

A rank's input is an endless stream of small whole numbers that differs per rank and per index; a collective's result
is a list of pieces of such streams. Sums, products and averages of the streams of up to 64 ranks are exact in every
dtype whatever the order of summation, so a result is right only if every bit is. Streams repeat after a prime number
of elements: a piece that lands a chunk too early or too late does not look right. Plain numpy, and nothing of what it
tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commrt.errors import UnsupportedType

Array = NDArray[Any]
Allocate = Callable[[int], Array]

REDUCTIONS = ("sum", "prod", "min", "max", "avg")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
    *("sendrecv", "barrier"),
)
ARITHMETIC = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
PERIOD = 65521

_EXACT = {"float16": 1 << 11, "bfloat16": 1 << 8, "float32": 1 << 24, "float64": 1 << 31}
_WIDE_SCALE = (1 << 15) + 1
_SEED_STEP = 10007
_MOST_TWOS = 6
_GUARD = 128
_GUARD_BYTE = 0xA5
_CLOBBER_BYTE = 0x5B


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of one of commrt's. Raises UnsupportedType if numpy lacks it and ml_dtypes is not installed."""
    with contextlib.suppress(TypeError):
        return np.dtype(name)
    try:
        extended: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError) as error:
        raise UnsupportedType(f"numpy has no {name}: install the package ml_dtypes") from error
    return extended


@dataclass(frozen=True)
class Stream:
    """Endless elements: those that `rank` passes in, or, with rank None, what the reduction makes of all ranks'.

    `op` None is for collectives that only move: any bits. The seed says where in its period the stream starts.
    """

    dtype: str
    op: str | None
    size: int
    rank: int | None
    seed: int = 0

    def read(self, start: int, count: int) -> Array:
        """Elements start to start + count, as a new array of the dtype."""
        out = np.empty(count, numpy_dtype(self.dtype))
        self.write(start, out)
        return out

    def write(self, start: int, out: Array) -> None:
        """The same, into a flat array."""
        for done, table in self._parts(start, len(out)):
            out[done : done + len(table)] = table

    def count_wrong(self, start: int, actual: Array) -> int:
        """How many elements of a flat array differ in any bit from the stream's, from `start` on."""
        return sum(
            int(np.count_nonzero(_as_bits(actual[done : done + len(table)]) != _as_bits(table)))
            for done, table in self._parts(start, len(actual))
        )

    def _parts(self, start: int, count: int) -> Iterator[tuple[int, Array]]:
        table = _table(self.dtype, self.op, self.size, self.rank)
        at, done = (start + self.seed * _SEED_STEP) % PERIOD, 0
        while done < count:
            part = table[at : at + count - done]
            yield done, part
            done += len(part)
            at = 0


def _as_bits(array: Array) -> Array:
    size = array.dtype.itemsize
    return array.view(np.dtype(f"u{size}")) if size <= 8 else array.view(np.dtype((np.void, size)))


_making = threading.Lock()  # ranks that are threads want the same tables at the same time


def _table(dtype: str, op: str | None, size: int, rank: int | None) -> Array:
    """One period of a stream."""
    with _making:
        return _made_table(dtype, op, size, rank)


@functools.lru_cache(maxsize=256)
def _made_table(dtype: str, op: str | None, size: int, rank: int | None) -> Array:
    if op is None:
        return _movement_table(numpy_dtype(dtype), rank or 0)
    if rank is not None:
        return _numbers(dtype, op, size, rank).astype(numpy_dtype(dtype))
    return _reduced_table(dtype, op, size)


def _movement_table(dtype: np.dtype[Any], rank: int) -> Array:
    if dtype == np.bool_:
        return (_hashes(rank) & 1).astype(np.bool_)
    words = -(-dtype.itemsize // 4)
    mixed = np.stack([_hashes(rank, 100 + word) for word in range(words)], axis=1)
    raw = mixed.view(np.uint8).reshape(PERIOD, 4 * words)[:, : dtype.itemsize]
    return np.ascontiguousarray(raw).view(dtype).reshape(PERIOD)


def _reduced_table(dtype: str, op: str, size: int) -> Array:
    """All in 64-bit integers, which wrap like every narrower type once cut down to it."""
    total = _numbers(dtype, op, size, 0)
    combine: Any = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    for rank in range(1, size):
        combine(total, _numbers(dtype, op, size, rank), out=total)
    wrapped = total.astype(numpy_dtype(dtype))
    if op != "avg":
        return wrapped
    total = wrapped.astype(np.int64)
    average: Array = (np.sign(total) * (np.abs(total) // size)).astype(wrapped.dtype)
    return average


def _numbers(dtype: str, op: str, size: int, rank: int) -> NDArray[np.int64]:
    """What a rank contributes, as integers that the dtype holds exactly."""
    signed = not dtype.startswith("u")
    if op == "prod":
        return _factors(size, rank, signed)
    is_float = dtype in _EXACT
    scale = _WIDE_SCALE if numpy_dtype(dtype).itemsize == 8 else 1
    limit = _limit(dtype)
    if op == "avg" and is_float:
        return scale * _averaged(size, rank, 2 * limit // (3 * size))
    bounded = op == "sum" and is_float
    return scale * _within(_hashes(rank), limit // size if bounded else limit, signed)


def _limit(dtype: str) -> int:
    """Whole numbers up to this are exact."""
    if dtype in _EXACT:
        return _EXACT[dtype]
    unused = 0 if dtype.startswith("u") else 1
    return min((1 << (8 * numpy_dtype(dtype).itemsize - unused)) - 1, 1 << 31)


def _within(hashes: NDArray[np.uint32], most: int, signed: bool) -> NDArray[np.int64]:
    """Numbers within 0..most, or -most..most."""
    span = 2 * most + 1 if signed else most + 1
    numbers: NDArray[np.int64] = ((hashes.astype(np.uint64) * np.uint64(span)) >> np.uint64(32)).astype(np.int64)
    numbers -= most if signed else 0
    return numbers


def _averaged(size: int, rank: int, most: int) -> NDArray[np.int64]:
    """Ranks in pairs lie as far above as below a whole average, so that the sum is divisible by the size."""
    average = _within(_hashes(size, 1), most, True)
    if rank == size - 1 and size % 2:
        return average
    offset = _within(_hashes(rank // 2), most, True)
    return average - offset if rank % 2 else average + offset


def _factors(size: int, rank: int, signed: bool) -> NDArray[np.int64]:
    """Signs, a few twos and one small odd factor: exact in a float with 8 bits, below the largest float16."""
    turn = (_hashes(0, 2) + np.uint32(rank)) % np.uint32(max(size, _MOST_TWOS + 1))
    own = _hashes(rank)
    factors = np.where(turn < _MOST_TWOS, 1 + (own & 1), 1).astype(np.int64)
    factors[turn == 0] *= (3 + 2 * ((own[turn == 0] >> 8) % 30)).astype(np.int64)
    return factors * np.where(own & 2, -1, 1) if signed else factors


def _hashes(rank: int, salt: int = 0) -> NDArray[np.uint32]:
    """32 well-mixed bits for each index of a period."""
    key = (rank * 0x85EBCA77 + salt * 0xC2B2AE3D + 0x27D4EB2F) & 0xFFFFFFFF
    mixed: NDArray[np.uint32] = np.arange(PERIOD, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return mixed


@dataclass(frozen=True)
class Piece:
    """`count` elements of a stream from `start` on, at `at` in the output."""

    at: int
    count: int
    stream: Stream
    start: int


@dataclass(frozen=True)
class Case:
    """One collective with its arguments.

    `count` is in elements, as nccl-tests counts them: of the smaller of a rank's two buffers. `op` is ignored by
    collectives that only move, `root` by those without one. Cases of different seeds have different data.
    """

    collective: str
    size: int
    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    seed: int = 0

    @property
    def input_count(self) -> int:
        """Elements that a rank with an input passes in."""
        return self.count * (self.size if self.collective in ("reduce_scatter", "scatter", "all_to_all") else 1)

    @property
    def output_count(self) -> int:
        """Elements that a rank with an output gets."""
        return self.count * (self.size if self.collective in ("all_gather", "gather", "all_to_all") else 1)

    def has_input(self, rank: int) -> bool:
        """Whether this rank's data goes anywhere."""
        return rank == self.root or self.collective not in ("broadcast", "scatter")

    def has_output(self, rank: int) -> bool:
        """Whether this rank gets a result."""
        return rank == self.root or self.collective not in ("reduce", "gather")

    def stream(self, rank: int | None) -> Stream:
        """The stream that a rank's input is the start of; None: of the reduction."""
        op = self.op if self.collective in REDUCING else None
        return Stream(self.dtype, op, self.size, rank, self.seed)

    def pieces(self, rank: int) -> list[Piece]:
        """What this rank's output must hold; none if it has no output."""
        if not self.has_output(rank):
            return []
        n, streams = self.count, [self.stream(source) for source in range(self.size)]
        match self.collective:
            case "all_reduce" | "reduce":
                return [Piece(0, n, self.stream(None), 0)]
            case "reduce_scatter":
                return [Piece(0, n, self.stream(None), rank * n)]
            case "broadcast":
                return [Piece(0, n, streams[self.root], 0)]
            case "scatter":
                return [Piece(0, n, streams[self.root], rank * n)]
            case "all_gather" | "gather":
                return [Piece(source * n, n, stream, 0) for source, stream in enumerate(streams)]
            case "all_to_all":
                return [Piece(source * n, n, stream, rank * n) for source, stream in enumerate(streams)]
            case "sendrecv":
                return [Piece(0, n, streams[(rank - 1) % self.size], 0)]
            case _:
                return []

    def inputs(self) -> list[Array]:
        """Every rank's input, for rank 0 first."""
        return [self.stream(rank).read(0, self.input_count) for rank in range(self.size)]

    def expected(self, rank: int) -> Array | None:
        """What this rank must get; None if it gets nothing."""
        if not self.has_output(rank):
            return None
        out = np.empty(self.output_count, numpy_dtype(self.dtype))
        for piece in self.pieces(rank):
            piece.stream.write(piece.start, out[piece.at : piece.at + piece.count])
        return out


def _new(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


class Guarded:
    """A flat array between two zones that nobody may write, `misalign` bytes off a multiple of 64.

    `memory(nbytes)` gives the bytes that all of it lies in; without it they are new.
    """

    def __init__(self, dtype: str, count: int, misalign: int = 0, memory: Allocate | None = None) -> None:
        kind = numpy_dtype(dtype)
        nbytes = count * kind.itemsize
        self.raw = (memory or _new)(nbytes + misalign + 2 * _GUARD + 64)
        self.raw[:] = _GUARD_BYTE
        self._start = -self.raw.ctypes.data % 64 + _GUARD + misalign
        self._stop = self._start + nbytes
        self.array: Array = self.raw[self._start : self._stop].view(kind)

    def clobber(self) -> None:
        """Overwrite the array with what no stream holds for long."""
        self.raw[self._start : self._stop] = _CLOBBER_BYTE

    def broken(self) -> int:
        """How many guard bytes were overwritten."""
        zones = self.raw[: self._start], self.raw[self._stop :]
        return sum(int(np.count_nonzero(zone != _GUARD_BYTE)) for zone in zones)


class Trial:
    """One rank's buffers for one case: `x` and `out` are what to pass, None where this rank has none.

    In place, they share memory the way nccl-tests has it: `x` is this rank's part of `out` for all_gather and gather,
    `out` is this rank's part of `x` for reduce_scatter and scatter; elsewhere both are the same array. Broadcast always
    has the one array.
    """

    def __init__(
        self, case: Case, rank: int, in_place: bool = False, misalign: int = 0, memory: Allocate | None = None
    ) -> None:
        self.case, self.rank = case, rank
        shared = in_place or case.collective == "broadcast"
        sizes = [max(case.input_count, case.output_count)] if shared else [case.input_count, case.output_count]
        self._guarded = [Guarded(case.dtype, count, misalign, memory) for count in sizes]
        x, out = self._guarded[0].array, self._guarded[-1].array
        if shared:
            x, out = self._part(x, case.input_count), self._part(out, case.output_count)
        self._x, self._out, self._shared = x, out, shared
        self.x: Array | None = x if case.collective != "scatter" or rank == case.root else None
        self.out: Array | None = out if case.has_output(rank) else None

    def _part(self, array: Array, count: int) -> Array:
        return array if len(array) == count else array[self.rank * count : (self.rank + 1) * count]

    @property
    def raw(self) -> list[Array]:
        """The bytes of its buffers, guards and all."""
        return [guarded.raw for guarded in self._guarded]

    def fill(self, seed: int | None = None) -> None:
        """Write the input, with a new seed if given, over clobbered buffers."""
        if seed is not None:
            self.case = replace(self.case, seed=seed)
        for guarded in self._guarded:
            guarded.clobber()
        if self.case.has_input(self.rank):
            self.case.stream(self.rank).write(0, self._x)

    def wrong(self, result: Array | None = None) -> int:
        """How many elements are not as they must be: of the output (or `result`, where the call returned it), of an
        input that must not change, of buffers that this rank's call must not touch, and guard bytes.
        """
        return self._wrong_output(result) + self._wrong_input() + sum(one.broken() for one in self._guarded)

    def _wrong_output(self, result: Array | None) -> int:
        if self.out is None:
            return 0 if self._shared else int(np.count_nonzero(self._out.view(np.uint8) != _CLOBBER_BYTE))
        out = (self._out if result is None else result).reshape(-1)
        if len(out) != self.case.output_count:
            return max(self.case.output_count, 1)
        pieces = self.case.pieces(self.rank)
        return sum(one.stream.count_wrong(one.start, out[one.at : one.at + one.count]) for one in pieces)

    def _wrong_input(self) -> int:
        overwritten = self._shared and self.out is not None
        if overwritten or not self.case.has_input(self.rank):
            return 0
        return self.case.stream(self.rank).count_wrong(0, self._x)
