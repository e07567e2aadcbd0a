"""A trial's buffers on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commrt.arrays import Buffer
from commrt.backend import DeviceBackend, Memory
from commrt.dtypes import from_numpy
from commrt.testing.data import Array, Trial


class Mirror:
    """What a trial's calls are given where the communicator's arrays are on a device: all of its buffers, guards too.

    `send` copies what the trial holds to the device, `fetch` back. Holds its memory until `close`. `take`: where that
    comes from, if not from the backend.
    """

    def __init__(self, trial: Trial, backend: DeviceBackend, take: Callable[[int], Memory] | None = None) -> None:
        self._backend, self.case = backend, trial.case
        self._pairs: list[tuple[Array, Memory]] = [(raw, (take or backend.allocate)(raw.nbytes)) for raw in trial.raw]
        self.x = self._there(trial.x)
        self.out = self.x if trial.out is trial.x else self._there(trial.out)

    def send(self) -> None:
        """To the device."""
        for raw, memory in self._pairs:
            self._backend.copy(memory.address, raw.ctypes.data, raw.nbytes)

    def fetch(self) -> None:
        """From the device."""
        for raw, memory in self._pairs:
            self._backend.copy(raw.ctypes.data, memory.address, raw.nbytes)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        while self._pairs:
            self._pairs.pop()[1].close()

    def _there(self, array: Array | None) -> Any:
        if array is None:
            return None
        for raw, memory in self._pairs:
            offset = array.ctypes.data - raw.ctypes.data
            if 0 <= offset <= raw.nbytes - array.nbytes:
                dtype, address = from_numpy(array.dtype), memory.address + offset
                return Buffer(address, array.nbytes, array.size, dtype, self._backend.name, array.shape, memory)
        raise ValueError("the array is not of the trial")


class Pieces:
    """Two pieces of a device's memory, for the buffers of one trial after another. Taken once.

    Giving memory back waits for all kernels of a device, and among them may be one that waits for this very rank.
    """

    def __init__(self, backend: DeviceBackend, nbytes: int) -> None:
        self._pieces = [backend.allocate(nbytes) for _ in range(2)]

    def take(self, nbytes: int) -> Memory:
        """The piece that was not taken last, held once more."""
        self._pieces.reverse()
        return self._pieces[0].retain()

    def close(self) -> None:
        """Once no kernel of the device waits for anybody."""
        for piece in self._pieces:
            piece.close()
