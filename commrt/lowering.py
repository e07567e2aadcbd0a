"""Lowering for devices whose thread blocks have many threads.

A plan orders the operations of a block as if one thread did them. On a device each operation is shared among threads,
by rules of its own, and threads meet in some operations only. So where an operation touches what another one before it
has written, or writes what that one has read, a `sync` goes between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from commrt.plan import Operation, RankProgram, Ref

# At the end of a wait, at the beginning of the others. `meet_before` and `meet_after` in executor.h say so.
_MEETINGS = frozenset({"signal", "wait", "barrier", "sync", "reduce", "switch_reduce", "switch_broadcast"})
_USERS = {"input": "output", "output": "input"}
_ANY = -1  # index

# Chunks, and how their words are dealt out to threads: operations on packets agree on that, all others may not.
_Mark = tuple[str, int, int, int, bool]


def with_syncs(program: RankProgram) -> RankProgram:
    """The same program for blocks of many threads."""
    return RankProgram(program.rank, tuple(_block(block) for block in program.blocks))


def _block(block: tuple[Operation, ...]) -> tuple[Operation, ...]:
    cuts = _cuts(block)
    before = set(cuts)
    out: list[Operation] = []
    for position, operation in enumerate(block):
        if position in before:
            out.append(Operation("sync"))
        # Slices of one turn have nothing in common with the next one's: that need not begin with the sync.
        moved = sum(cut <= operation.target for cut in cuts) if operation.name == "loop" else 0
        out.append(replace(operation, target=operation.target + moved) if moved else operation)
    return tuple(out)


def _cuts(block: Sequence[Operation]) -> list[int]:
    """Positions of the operations that a sync must precede, in order."""
    cuts = []
    touched = _Touched()
    for position, operation in enumerate(block):
        # Slices of different turns have nothing in common, so only what isn't sliced can collide with the next turn's.
        again = operation.name == "loop" and any(
            other.dst and not other.sliced for other in block[operation.target : position]
        )
        if operation.name in _MEETINGS:
            touched = _Touched()
        elif again or touched.collides(operation):
            cuts.append(position)
            touched = _Touched()
        touched.add(operation)
    return cuts


@dataclass
class _Touched:
    """What a block's threads may have under way: marks of chunks, and of groups of the user's buffers."""

    read: set[_Mark] = field(default_factory=set)
    written: set[_Mark] = field(default_factory=set)

    def add(self, operation: Operation) -> None:
        for refs, marks in ((operation.src, self.read), (operation.dst, self.written)):
            marks.update(mark for ref in _plain(refs) for mark in _marks(ref, operation))

    def collides(self, operation: Operation) -> bool:
        read = {mark for ref in _plain(operation.src) for mark in _colliding(ref, operation)}
        written = {mark for ref in _plain(operation.dst) for mark in _colliding(ref, operation)}
        return not (self.written.isdisjoint(read | written) and self.read.isdisjoint(written))


def _plain(refs: Iterable[Ref]) -> Iterable[Ref]:
    """Packets need no order: their readers wait for each."""
    return (ref for ref in refs if ref.buffer != "packets")


def _in_words(ref: Ref, operation: Operation) -> bool:
    """Word k of the user's chunk goes to one and the same thread in all such operations."""
    return ref.buffer in _USERS and operation.name.endswith("_packets")


def _marks(ref: Ref, operation: Operation) -> Iterable[_Mark]:
    in_words = _in_words(ref, operation)
    yield ref.buffer, ref.rank, ref.index, ref.part, in_words
    if ref.buffer in _USERS:
        yield ref.buffer, ref.rank, _ANY, ref.part, in_words


def _colliding(ref: Ref, operation: Operation) -> Iterable[_Mark]:
    """Marks of what may be the same memory in the hands of other threads. The user's two buffers may be one."""
    for in_words in (False,) if _in_words(ref, operation) else (False, True):
        yield ref.buffer, ref.rank, ref.index, ref.part, in_words
        if ref.buffer in _USERS:
            yield _USERS[ref.buffer], ref.rank, _ANY, ref.part, in_words
