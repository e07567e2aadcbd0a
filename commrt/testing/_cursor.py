"""The state of the reference interpreter's blocks, and of what passes between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from commrt.plan import Operation

Array = NDArray[Any]


@dataclass
class Cursor:
    """Where one block of one rank is. `taken`: peers whose signal the current wait already has."""

    rank: int
    number: int
    block: tuple[Operation, ...]
    pc: int = 0
    turn: int = 0
    taken: set[int] = field(default_factory=set)
    barriers: int = 0
    arrived: bool = False

    @property
    def operation(self) -> Operation | None:
        """What this block does next, None at its end."""
        return self.block[self.pc] if self.pc < len(self.block) else None

    def restart(self) -> None:
        """Back to the first operation, for the next window."""
        self.pc = self.barriers = 0

    def __str__(self) -> str:
        if self.operation is None:
            return f"rank {self.rank}, block {self.number}: at its end"
        return f"rank {self.rank}, block {self.number}, operation {self.pc} ({self.operation.name})"


@dataclass(frozen=True)
class Signal:
    """What a wait takes: its window, whether it hands over addresses, and who the sender knew to have entered."""

    window: int
    publish: bool
    heard: frozenset[int]


@dataclass
class Slot:
    """A packet slot of one window: its values once they arrived, and what the sender knew."""

    values: Array | None = None
    heard: frozenset[int] = frozenset()
