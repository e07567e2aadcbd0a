"""Symmetric memory: segments that every rank has, and every rank can reach."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from commrt.backend import Memory, MemoryKind
from commrt.dtypes import DType
from commrt.errors import CommrtError, InvalidArgument
from commrt.group import Group
from commrt.native import lib

MAX_SEGMENTS = 1024  # of a communicator, alive at once


class _Turn(msgspec.Struct, frozen=True):
    """What a rank says when allocating: how much, what its program has let go of since, and its segment's key."""

    nbytes: int
    released: tuple[int, ...] = ()
    kind: str = ""
    key: bytes = b""
    error: str = ""


@dataclass
class Segment:
    """Symmetric memory: this rank's, and where each peer's is: its address here, or its place in a port's offsets."""

    number: int
    memory: Memory
    mapped: dict[int, int]
    located: dict[int, int]


class SymmetricMemory:
    """One communicator's symmetric segments. `empty` is collective; letting go is local and takes effect later."""

    def __init__(self, group: Group, exchange: Callable[[bytes], list[bytes]]) -> None:
        self._group, self._exchange = group, exchange
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._free: list[int] = []  # released by all ranks: the same list on each
        self._released: set[int] = set()  # by this rank alone
        self._numbers = itertools.count()
        self._closed = False

    def empty(self, shape: int | tuple[int, ...], dtype: DType, kind: str | None = None) -> Any:
        """A new array, or all ranks raise: MemoryError where one has none, InvalidArgument where calls differ.

        An array of a launch-coherent kind is the caller's alone: peers can't use it, so operations stage it.
        """
        shape = self._checked(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= 1 << 63:
            raise MemoryError(f"no memory for an array of shape {shape}")
        found = self._group.allocator.kind(kind)
        with self._lock:
            memory, drop = self._settle(nbytes, found)
        return _array(memory, drop, shape, dtype)

    def _checked(self, shape: Any) -> tuple[int, ...]:
        try:
            extents = tuple(operator.index(extent) for extent in (shape if isinstance(shape, Sequence) else (shape,)))
        except TypeError:
            raise InvalidArgument(f"a shape is of integers, not {shape!r}", rank=self._group.rank) from None
        if any(extent < 0 for extent in extents):
            raise InvalidArgument(f"shape {shape} is negative", rank=self._group.rank)
        return extents

    def lookup(self, address: int, nbytes: int) -> Segment | None:
        """The segment in which all these bytes of this rank lie."""
        for segment in self._segments.values():
            offset = address - segment.memory.address
            if 0 <= offset <= segment.memory.nbytes - nbytes:
                return segment
        return None

    def segment(self, number: int) -> Segment:
        """By its number, which is the same on all ranks."""
        return self._segments[number]

    def covers(self, address: int) -> bool:
        """Whether the address lies in this rank's symmetric memory."""
        return any(
            segment.memory.address <= address < segment.memory.address + segment.memory.nbytes
            for segment in self._segments.values()
        )

    def close(self) -> None:
        """Unmap what the program holds no array of; the rest goes with its last array."""
        self._closed = True
        for number, segment in list(self._segments.items()):
            if number in self._released or number in self._free:
                segment.memory.close()

    def _let_go(self, number: int) -> None:
        self._released.add(number)
        if self._closed:
            self._segments[number].memory.close()

    def _settle(self, nbytes: int, kind: MemoryKind) -> tuple[Memory, Callable[[], object]]:
        """One step of all ranks: what is free, who can allocate, where it lies. The memory, and how to let go of it."""
        turns = self._say(_Turn(nbytes, tuple(sorted(self._released)), kind.name))
        if len({(turn.nbytes, turn.kind) for turn in turns}) > 1:
            calls = ", ".join(f"{turn.nbytes} of {turn.kind} (rank {rank})" for rank, turn in enumerate(turns))
            raise InvalidArgument(f"ranks asked for different symmetric memory: {calls}", rank=self._group.rank)
        common = set.intersection(*(set(turn.released) for turn in turns))
        self._released -= common
        self._free += sorted(common)
        for number in self._free:
            memory = self._segments[number].memory
            if memory.nbytes >= nbytes and memory.kind == kind:
                self._free.remove(number)
                return memory, functools.partial(self._let_go, number)
        return self._grow(nbytes, kind)

    def _grow(self, nbytes: int, kind: MemoryKind) -> tuple[Memory, Callable[[], object]]:
        memory: Memory | None = None
        try:
            memory, turn = self._allocate(nbytes, kind)
        except (MemoryError, OSError, CommrtError) as error:
            turn = _Turn(nbytes, error=f"{type(error).__name__}: {error}")
        turns = self._say(turn)
        failed = {rank: turn.error for rank, turn in enumerate(turns) if turn.error}
        if failed or memory is None:
            if memory is not None:
                memory.close()
            raise MemoryError(
                "no symmetric memory: " + "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
            )
        if kind.coherence == "launch":
            return memory, memory.close
        return memory, functools.partial(self._let_go, self._publish(memory, turns))

    def _allocate(self, nbytes: int, kind: MemoryKind) -> tuple[Memory, _Turn]:
        if len(self._segments) >= MAX_SEGMENTS:
            raise InvalidArgument(f"a communicator has at most {MAX_SEGMENTS} symmetric segments")
        memory = self._group.allocator.allocate(max(1, nbytes), kind, reserve=True)
        if kind.coherence == "launch":
            return memory, _Turn(nbytes)
        keys = {name: self._group.endpoints[name].register(memory) for name in sorted(set(self._group.links.values()))}
        return memory, _Turn(nbytes, key=msgspec.msgpack.encode(keys))

    def _publish(self, memory: Memory, turns: list[_Turn]) -> int:
        segment = Segment(next(self._numbers), memory, {self._group.rank: memory.address}, {})
        for rank, turn in enumerate(turns):
            if rank == self._group.rank:
                continue
            connection = self._group.connections[rank]
            key = msgspec.msgpack.decode(turn.key, type=dict[str, bytes])[self._group.links[rank]]
            if connection.mapped is None:
                segment.located[rank] = connection.locate(key)
            else:
                segment.mapped[rank] = connection.open(key).address
        for rank in range(self._group.size):
            there = segment.mapped.get(rank, memory.address)
            lib.cr_comm_window(self._group.native, rank, segment.number, there, memory.nbytes)
        self._segments[segment.number] = segment
        return segment.number

    def _say(self, turn: _Turn) -> list[_Turn]:
        return [msgspec.msgpack.decode(reply, type=_Turn) for reply in self._exchange(msgspec.msgpack.encode(turn))]


def _array(memory: Memory, drop: Callable[[], object], shape: tuple[int, ...], dtype: DType) -> Any:
    """An array that calls `drop` once nothing refers to its memory."""
    import ctypes

    import numpy

    nbytes = math.prod(shape) * dtype.itemsize
    raw: Any = (ctypes.c_char * max(1, nbytes)).from_address(memory.address)
    weakref.finalize(raw, drop).atexit = False
    flat = numpy.frombuffer(raw, dtype=numpy.uint8)[:nbytes]
    return flat.view(dtype.to_numpy()).reshape(shape)
