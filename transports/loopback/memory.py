"""Emulated memory that is coherent at the boundaries of launches alone.

Results obtained over it show what a program may rely on, not how such memory behaves on a device: it is never kinder.
"""

from __future__ import annotations

import ctypes
import threading

from commrt.backend import Memory, MemoryKind

EMULATED_LAUNCH = MemoryKind("emulated_launch", "launch")
_ALIGNMENT = 4096


class _Bytes:
    """Page-aligned bytes of this process."""

    def __init__(self, nbytes: int) -> None:
        self.raw = ctypes.create_string_buffer(nbytes + _ALIGNMENT)
        start = -ctypes.addressof(self.raw) % _ALIGNMENT
        self.view = memoryview(self.raw).cast("B")[start : start + nbytes]
        self.address = ctypes.addressof(self.raw) + start


class EmulatedMemory:
    """`address` is what the owner's kernels see; `peers_view` what its peers do. They meet in `boundary` only.

    Implements `commrt.backend.Memory`.
    """

    kind = EMULATED_LAUNCH

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._own, self._peers, self._met = _Bytes(nbytes), _Bytes(nbytes), bytearray(nbytes)
        self._lock = threading.Lock()
        self.address = self._own.address
        self.peers_view = _PeersView(self, self._peers.address)

    @classmethod
    def create(cls, nbytes: int) -> EmulatedMemory:
        """A new one. Raises MemoryError."""
        return cls(max(1, nbytes))

    def boundary(self) -> None:
        """What a device does where a kernel begins or ends: all stores since the last time become common.

        Where both sides have stored, the owner's wins.
        """
        import numpy

        with self._lock:
            own, peers, met = (
                numpy.frombuffer(side, numpy.uint8) for side in (self._own.view, self._peers.view, self._met)
            )
            met[:] = numpy.where(own != met, own, peers)
            own[:] = peers[:] = met

    def retain(self) -> EmulatedMemory:
        """Held by Python's references."""
        return self

    def close(self) -> None:
        """Freed with its last reference."""


class _PeersView:
    """The memory as peers map it. Implements `commrt.backend.Memory`."""

    kind = EMULATED_LAUNCH

    def __init__(self, memory: EmulatedMemory, address: int) -> None:
        self._memory = memory
        self.address, self.nbytes = address, memory.nbytes

    def retain(self) -> _PeersView:
        """As the memory."""
        return self

    def close(self) -> None:
        """As the memory."""


def seen_by_peers(memory: Memory) -> Memory:
    """What a peer maps of registered memory."""
    return memory.peers_view if isinstance(memory, EmulatedMemory) else memory
