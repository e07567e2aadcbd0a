"""Symmetric memory: segments that every rank has, and every rank can reach."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from commrt.backend import Memory
from commrt.dtypes import DType
from commrt.errors import CommrtError, InvalidArgument
from commrt.group import Group
from commrt.native import lib

MAX_SEGMENTS = 1024  # of a communicator, alive at once


class _Turn(msgspec.Struct, frozen=True):
    """What a rank says when allocating: how much, what its program has let go of since, and its segment's key."""

    nbytes: int
    released: tuple[int, ...]
    key: bytes = b""
    error: str = ""


@dataclass
class _Segment:
    memory: Memory
    peers: dict[int, Memory]


class SymmetricMemory:
    """One communicator's symmetric segments. `empty` is collective; letting go is local and takes effect later."""

    def __init__(self, group: Group, exchange: Callable[[bytes], list[bytes]]) -> None:
        self._group, self._exchange = group, exchange
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._free: list[int] = []  # released by all ranks: the same list on each
        self._released: set[int] = set()  # by this rank alone
        self._numbers = itertools.count()

    def empty(self, shape: int | tuple[int, ...], dtype: DType) -> Any:
        """A new array, or all ranks raise: MemoryError where one has none, InvalidArgument where sizes differ."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(extent < 0 for extent in shape):
            raise InvalidArgument(f"shape {shape} is negative", rank=self._group.rank)
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            return self._array(self._settle(nbytes), shape, dtype)

    def covers(self, address: int) -> bool:
        """Whether the address lies in this rank's symmetric memory."""
        return any(
            segment.memory.address <= address < segment.memory.address + segment.memory.nbytes
            for segment in self._segments.values()
        )

    def close(self) -> None:
        """Unmap what the program holds no array of; the rest goes with its last array."""
        for number, segment in list(self._segments.items()):
            if number in self._released or number in self._free:
                segment.memory.close()

    def _settle(self, nbytes: int) -> int:
        """One step of all ranks: what is free, who can allocate, where it lies. The number of the segment."""
        mine = _Turn(nbytes, tuple(sorted(self._released)))
        turns = self._say(mine)
        if len({turn.nbytes for turn in turns}) > 1:
            sizes = ", ".join(f"{turn.nbytes} (rank {rank})" for rank, turn in enumerate(turns))
            raise InvalidArgument(
                f"ranks asked for different sizes of symmetric memory: {sizes}", rank=self._group.rank
            )
        common = set.intersection(*(set(turn.released) for turn in turns))
        self._released -= common
        self._free += sorted(common)
        for number in self._free:
            if self._segments[number].memory.nbytes >= nbytes:
                self._free.remove(number)
                return number
        return self._grow(nbytes)

    def _grow(self, nbytes: int) -> int:
        memory: Memory | None = None
        try:
            memory, turn = self._allocate(nbytes)
        except (MemoryError, OSError, CommrtError) as error:
            turn = _Turn(nbytes, (), error=f"{type(error).__name__}: {error}")
        turns = self._say(turn)
        failed = {rank: turn.error for rank, turn in enumerate(turns) if turn.error}
        if failed or memory is None:
            if memory is not None:
                memory.close()
            raise MemoryError(
                "no symmetric memory: " + "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
            )
        return self._publish(memory, turns)

    def _allocate(self, nbytes: int) -> tuple[Memory, _Turn]:
        if len(self._segments) >= MAX_SEGMENTS:
            raise InvalidArgument(f"a communicator has at most {MAX_SEGMENTS} symmetric segments")
        memory = self._group.backend.allocate(max(1, nbytes), reserve=True)
        keys = {name: self._group.endpoints[name].register(memory) for name in sorted(set(self._group.links.values()))}
        return memory, _Turn(nbytes, (), key=msgspec.msgpack.encode(keys))

    def _publish(self, memory: Memory, turns: list[_Turn]) -> int:
        number = next(self._numbers)
        segment = _Segment(memory, {})
        for rank, turn in enumerate(turns):
            there = memory
            if rank != self._group.rank and self._group.connections[rank].mapped is not None:
                key = msgspec.msgpack.decode(turn.key, type=dict[str, bytes])[self._group.links[rank]]
                there = segment.peers[rank] = self._group.connections[rank].open(key)
            lib.cr_comm_window(self._group.native, rank, number, there.address, there.nbytes)
        self._segments[number] = segment
        return number

    def _array(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """An array whose memory, once nothing refers to it, is reported at the next turn."""
        import ctypes

        import numpy

        memory = self._segments[number].memory
        nbytes = math.prod(shape) * dtype.itemsize
        raw = (ctypes.c_char * max(1, nbytes)).from_address(memory.address)
        weakref.finalize(raw, self._released.add, number).atexit = False
        flat: Any = numpy.frombuffer(memoryview(raw), dtype=numpy.uint8)[:nbytes]
        return flat.view(dtype.to_numpy()).reshape(shape)

    def _say(self, turn: _Turn) -> list[_Turn]:
        return [msgspec.msgpack.decode(reply, type=_Turn) for reply in self._exchange(msgspec.msgpack.encode(turn))]
