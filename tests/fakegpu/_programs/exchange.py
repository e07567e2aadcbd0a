"""exchange.py FOLDER RANK BLOCKS EPOCHS TRANSPORT BACKEND: two ranks put, signal and wait in each other's memory.

Nothing here knows whether the driver is a fake: with two real devices it runs unchanged. One line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from commrt.backend import DeviceBackend, Memory
from commrt.plugins import default_registry
from commrt.transport import Context

NBYTES, LINE = 96 << 10, 128
TIMEOUT_S = 10.0
SOURCE = (Path(__file__).parent / "exchange.cu").read_text()


class Meeting:
    """Two processes hand each other bytes, through files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._turn = folder, rank, 0

    def swap(self, mine: bytes) -> bytes:
        self._turn += 1
        unfinished = self._folder / f"{self._rank}.tmp"
        unfinished.write_bytes(mine)
        unfinished.rename(self._folder / f"{self._rank}.{self._turn}")
        other, deadline = self._folder / f"{1 - self._rank}.{self._turn}", time.monotonic() + 60
        while not other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the other rank does not come")
            time.sleep(0.001)
        return other.read_bytes()


class Rank:
    """Its memory: what it sends, what it gets, a line for each block's signals, and what ends waits."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self.memory = backend.allocate(2 * NBYTES + 64 * LINE)
        self.watch = backend.allocate(64)
        words = (ctypes.c_uint64 * 6)(self.watch.address + 40, int(TIMEOUT_S * 1e9))
        backend.copy(self.watch.address, ctypes.addressof(words), 48)

    def write(self, content: bytes) -> None:
        buffer = ctypes.create_string_buffer(content, len(content))
        self.backend.copy(self.memory.address, ctypes.addressof(buffer), len(content))

    def read(self, address: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        self.backend.copy(ctypes.addressof(buffer), address, nbytes)
        return buffer.raw

    def failed(self) -> int:
        return int.from_bytes(self.read(self.watch.address + 16, 8), "little")

    def arguments(self, mapped: int, epoch: int) -> tuple[Any, ...]:
        own, pointer, word = self.memory.address, ctypes.c_void_p, ctypes.c_uint64
        lines = 2 * NBYTES
        return (
            pointer(own), pointer(mapped), word(NBYTES), word(mapped + lines), pointer(own + lines), word(epoch),
            pointer(self.watch.address),
        )  # fmt: skip


def main() -> None:
    folder, rank, blocks, epochs, transport, name = sys.argv[1:7]
    meeting, number = Meeting(Path(folder), int(rank)), int(rank)
    backend: Any = default_registry().require("backends", name)
    endpoint = default_registry().require("transports", transport).open(Context(number, 2, b"t" * 16, backend))
    own = Rank(backend)
    address = meeting.swap(endpoint.address)
    reach = endpoint.reach(1 - number, address)
    key = meeting.swap(endpoint.register(own.memory))
    connection = endpoint.connect(1 - number, address, key)
    more: Memory = connection.open(key)
    kernel, stream = backend.build(SOURCE, "exchange"), backend.stream()
    wrong = 0
    for epoch in range(1, int(epochs) + 1):
        mine = os.urandom(NBYTES)
        own.write(mine)
        kernel.launch(int(blocks), own.arguments(connection.mapped, epoch), stream)
        stream.synchronize()
        wrong += own.read(own.memory.address + NBYTES, NBYTES) != meeting.swap(mine)
    meeting.swap(b"all is read")
    endpoint.close()
    ended = {"wrong": wrong, "failed": own.failed(), "reach": reach is not None, "more": more.nbytes}
    print(json.dumps({**ended, "devices": ", ".join(backend.probe().devices)}))


if __name__ == "__main__":
    main()
