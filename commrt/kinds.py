"""Memory of every kind that a communicator's backend and transports have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commrt.backend import Backend, Memory, MemoryKind
from commrt.errors import UnknownName
from commrt.transport import MemoryTransport


@dataclass(frozen=True)
class Allocator:
    """Finds who has a kind of memory. Callable from any thread."""

    backend: Backend
    transports: Sequence[MemoryTransport]

    def kind(self, name: str | None) -> MemoryKind:
        """The kind of that name; the backend's first for None. Raises UnknownName."""
        kinds = list(self.backend.memory_kinds)
        kinds += [kind for transport in self.transports for kind in transport.memory_kinds]
        found = next((kind for kind in kinds if name in (None, kind.name)), None)
        if found is None:
            raise UnknownName("memory kind", str(name), [kind.name for kind in kinds])
        return found

    def allocate(self, nbytes: int, kind: MemoryKind, reserve: bool = False) -> Memory:
        """Zeroed memory of that kind. `reserve`: touching the backend's own can't fail later. Raises MemoryError."""
        for transport in self.transports:
            if kind in transport.memory_kinds:
                return transport.allocate(nbytes, kind.name)
        return self.backend.allocate(nbytes, kind.name, reserve=reserve)
