"""Global memory, weak. Words of 8 bytes are atomic, nothing wider is.

A store waits in its thread's *pending* stores and becomes visible to all at any later time, in any order but that of
one word's. A barrier hands what its threads have pending to the block: the block sees it, others need not yet. A
release makes first visible all that its thread, or its block up to the last barrier, has pending.

A load may return any value that the word had since the thread's *horizon*: what an acquire moved it to (the time of the
release whose value it took), or the last value of that word that the thread or, up to the last barrier, its block saw.

Multimem addresses stand for one word on each rank. What is read through them is as old as the last alias fence allows;
what is written waits for one, until when no release covers it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

WORD = 8
Pending = dict[int, list[tuple[int, int]]]  # by word: (mask, value), oldest first


class Fault(Exception):
    """An address that nothing lies at, or a misaligned one."""


class Version(NamedTuple):
    """What a word was set to, when, and when what was released with it had become visible: 0 if nothing was."""

    time: int
    value: int
    released: int


class Sight:
    """The oldest that may still be seen."""

    __slots__ = ("horizon", "seen")

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.seen: dict[int, int] = {}  # by word: time of the version

    def join(self, other: Sight) -> None:
        """No more than what both may see."""
        self.horizon = max(self.horizon, other.horizon)
        for word, time in other.seen.items():
            self.seen[word] = max(time, self.seen.get(word, 0))


class View(Sight):
    """What one thread, or one block, sees, and what it has pending."""

    __slots__ = ("alias", "pending", "pending_alias")

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.alias = Sight(horizon)  # through multimem addresses
        self.pending: Pending = {}
        self.pending_alias: Pending = {}


class Memory:
    """`stale`: how often a load that may return an older value does."""

    def __init__(self, chance: random.Random, stale: float = 0.4) -> None:
        self._chance, self._stale = chance, stale
        self._words: dict[int, int] = {}
        self._history: dict[int, list[Version]] = {}
        self._aliases: list[tuple[int, int, tuple[int, ...]]] = []
        self._end = 1 << 16
        self.clock = 0

    # ---- by the host, while no kernel runs ----

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory; nothing lies right behind it."""
        address = self._end
        self._words |= dict.fromkeys(range(address // WORD, (address + nbytes + WORD - 1) // WORD), 0)
        self._end += (nbytes + 511) // 256 * 256
        return address

    def alias(self, addresses: Sequence[int], nbytes: int) -> int:
        """A multimem address for memory of all ranks."""
        address = self._end
        self._aliases.append((address, nbytes, tuple(addresses)))
        self._end += (nbytes + 511) // 256 * 256
        return address

    def write(self, address: int, data: bytes) -> None:
        """Seen at once by all that have not seen another value. Also while kernels run."""
        for k, byte in enumerate(data):
            word, shift = (address + k) // WORD, (address + k) % WORD * 8
            self._words[word] = self._word(word) & ~(0xFF << shift) | byte << shift
        for word in range(address // WORD, (address + len(data) + WORD - 1) // WORD):
            if word in self._history:
                self._publish(word, 0, 0, 0)

    def read(self, address: int, nbytes: int) -> bytes:
        """What has become visible."""
        return bytes(self._word((address + k) // WORD) >> (address + k) % WORD * 8 & 0xFF for k in range(nbytes))

    # ---- by threads ----

    def load(self, view: View, block: View, address: int, size: int, acquire: bool) -> int:
        word, shift = _place(address, size)
        value = self._old_enough(view, block, word, acquire)
        return _with_pending(value, word, view, block) >> shift & (1 << 8 * size) - 1

    def store(self, view: View, block: View, address: int, size: int, value: int, release: bool) -> None:
        word, shift = _place(address, size)
        self._word(word)
        mask, stored = ((1 << 8 * size) - 1) << shift, value << shift
        if not release:
            view.pending.setdefault(word, []).append((mask, stored))
            return
        self.release(view, block)
        view.seen[word] = self._publish(word, mask, stored, self.clock)

    def add(self, view: View, block: View, address: int, size: int, value: int, acquire: bool, release: bool) -> int:
        """Reads and writes the newest value. A release it adds to stays one."""
        word, shift = _place(address, size)
        if release:
            self.release(view, block)
        self._drain_word(view, block, word)
        last = self._last(word)
        ones = (1 << 8 * size) - 1
        old = last.value >> shift & ones
        released = max(last.released, self.clock if release else 0)
        view.seen[word] = self._publish(word, ones << shift, (old + value & ones) << shift, released)
        if acquire:
            view.horizon = max(view.horizon, last.released)
        return old

    def release(self, view: View, block: View) -> None:
        """All that is pending becomes visible."""
        for word in [*block.pending, *view.pending]:
            self._drain_word(view, block, word)

    def meet(self, views: Sequence[View], block: View) -> None:
        """A barrier of a block's threads."""
        for view in views:
            for word, stores in view.pending.items():
                block.pending.setdefault(word, []).extend(stores)
            block.join(view)
            view.pending, view.seen = {}, {}
        alias = views[0].alias
        for view in views:
            if view.alias is not alias:
                alias.join(view.alias)
            view.horizon, view.alias = block.horizon, alias

    def drain(self, view: View, block: View) -> None:
        """One pending store, whichever, becomes visible."""
        words = [*block.pending, *view.pending, *view.pending_alias]
        if words:
            word = words[int(self._chance.random() * len(words))]
            if word in block.pending or word in view.pending:
                self._drain_oldest(view, block, word)
            else:
                self._drain_first(view.pending_alias, view, word)

    def settle(self, view: View, block: View) -> None:
        """The kernel that a thread belonged to is over: all that it did becomes visible."""
        self.fence_alias(view, block)
        self.release(view, block)

    def forget(self) -> None:
        """No kernel runs: whoever begins sees what is there."""
        self._history.clear()

    # ---- multimem ----

    def load_all(self, view: View, block: View, address: int, size: int, fold: Callable[[int, int], int]) -> int:
        values = []
        for member in self._members(address):
            word, shift = _place(member, size)
            value = self._old_enough(view.alias, view.alias, word, False)
            values.append(_with_pending(value, word, view, block) >> shift & (1 << 8 * size) - 1)
        total = values[0]
        for value in values[1:]:
            total = fold(total, value)
        return total

    def store_all(self, view: View, address: int, size: int, value: int) -> None:
        for member in self._members(address):
            word, shift = _place(member, size)
            self._word(word)
            view.pending_alias.setdefault(word, []).append((((1 << 8 * size) - 1) << shift, value << shift))

    def fence_alias(self, view: View, block: View) -> None:
        """Joins accesses through multimem addresses with those through others."""
        _append(view.pending, view.pending_alias)
        view.alias = Sight(view.horizon)
        view.alias.join(block)
        view.alias.join(view)

    def _members(self, address: int) -> list[int]:
        for base, nbytes, members in self._aliases:
            if base <= address < base + nbytes:
                return [member + address - base for member in members]
        raise Fault(f"multimem at {address:#x}, which is no such address")

    # ---- words ----

    def _word(self, word: int) -> int:
        try:
            return self._words[word]
        except KeyError:
            raise Fault(f"nothing lies at {word * WORD:#x}") from None

    def _last(self, word: int) -> Version:
        versions = self._history.get(word)
        return versions[-1] if versions else Version(0, self._word(word), 0)

    def _publish(self, word: int, mask: int, stored: int, released: int) -> int:
        """A new version of a word; its time."""
        versions = self._history.setdefault(word, [self._last(word)])
        self.clock += 1
        value = self._words[word] = self._word(word) & ~mask | stored
        versions.append(Version(self.clock, value, released))
        return self.clock

    def _old_enough(self, view: Sight, block: Sight, word: int, acquire: bool) -> int:
        versions = self._history.get(word)
        if versions is None:
            return self._word(word)
        horizon = max(view.horizon, view.seen.get(word, 0), block.seen.get(word, 0))
        at = len(versions) - 1
        if versions[at].time > horizon and self._chance.random() < self._stale:
            while at > 0 and versions[at].time > horizon and self._chance.random() < 0.5:
                at -= 1
        version = versions[at]
        view.seen[word] = version.time
        if acquire:
            view.horizon = max(view.horizon, version.released)
        return version.value

    def _drain_word(self, view: View, block: View, word: int) -> None:
        while word in block.pending or word in view.pending:
            self._drain_oldest(view, block, word)

    def _drain_oldest(self, view: View, block: View, word: int) -> None:
        owner = block if word in block.pending else view
        self._drain_first(owner.pending, owner, word)

    def _drain_first(self, pending: Pending, owner: View, word: int) -> None:
        mask, stored = pending[word].pop(0)
        if not pending[word]:
            del pending[word]
        owner.seen[word] = self._publish(word, mask, stored, 0)


def _place(address: int, size: int) -> tuple[int, int]:
    if address % size:
        raise Fault(f"{size} bytes at {address:#x} are misaligned")
    return address // WORD, address % WORD * 8


def _with_pending(value: int, word: int, view: View, block: View) -> int:
    for pending in (block.pending, view.pending):
        if word in pending:
            for mask, stored in pending[word]:
                value = value & ~mask | stored
    return value


def _append(pending: Pending, more: Pending) -> None:
    for word, stores in more.items():
        pending.setdefault(word, []).extend(stores)
    more.clear()
