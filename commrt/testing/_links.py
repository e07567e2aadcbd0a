"""Two ranks of this process joined over a transport, as its conformance suite looks at them."""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from commrt.backend import Backend, Memory
from commrt.native import ffi
from commrt.testing._conformance import expect, until
from commrt.transport import Connection, Context, Endpoint, Transport


class Link:
    """One direction of two joined ranks: requests of the one, and the registered memory of the other."""

    def __init__(self, connection: Connection, target: Memory, backend: Backend) -> None:
        self.connection, self.target, self._backend = connection, target, backend

    def put(self, offset: int, source: Any) -> int:
        """`source`: a writable buffer."""
        port = self.connection.port
        if self.connection.mapped is not None:
            self._store(offset, source)
            return 1
        if isinstance(port, ffi.CData):
            return _answer(port.put(port.context, offset, ffi.from_buffer(source), len(source)))
        return int(port.put(offset, memoryview(source)))

    def signal(self, offset: int, value: int) -> int:
        port = self.connection.port
        if self.connection.mapped is not None:
            self._store(offset, bytearray(value.to_bytes(8, "little")))
            return 1
        if isinstance(port, ffi.CData):
            return _answer(port.signal(port.context, offset, value))
        return int(port.signal(offset, value))

    def flush(self) -> int:
        return self._ask("flush", 1)

    def poll(self) -> int:
        return self._ask("poll", 0)

    def seen(self, offset: int) -> int:
        """The signal there, as the target has it."""
        return int.from_bytes(self.arrived(offset, 8), "little")

    def arrived(self, offset: int, nbytes: int) -> bytes:
        return fetch(self._backend, self.target.address + offset, nbytes)

    def _store(self, offset: int, source: bytearray) -> None:
        assert self.connection.mapped is not None
        store(self._backend, self.connection.mapped + offset, source)

    def _ask(self, what: str, mapped: int) -> int:
        port = self.connection.port
        if self.connection.mapped is not None:
            return mapped
        answer = getattr(port, what)(port.context) if isinstance(port, ffi.CData) else getattr(port, what)()
        return _answer(answer)


class Joined:
    """Some ranks of this process, joined over one transport."""

    def __init__(
        self,
        transport: Transport,
        backend: Backend,
        options: Mapping[str, Any],
        size: int,
        nbytes: int,
        patience_s: float,
    ) -> None:
        self._patience_s, self._backend = patience_s, backend
        token = secrets.token_bytes(16)
        self.size = size
        self.endpoints: list[Endpoint] = [
            transport.open(Context(rank, size, token, backend, dict(options))) for rank in range(size)
        ]
        self.reached = {
            (one, other): self.endpoints[one].reach(other, self.endpoints[other].address)
            for one in range(size)
            for other in range(size)
            if one != other
        }
        self.memory = [backend.allocate(nbytes) for _ in range(size)]
        self.keys = [endpoint.register(memory) for endpoint, memory in zip(self.endpoints, self.memory, strict=True)]
        self.connections: dict[tuple[int, int], Connection] = {}
        threads_over(size, self._connect)

    def link(self, source: int, target: int) -> Link:
        """What `source` sends to `target`."""
        return Link(self.connections[source, target], self.memory[target], self._backend)

    def poll(self) -> None:
        """Everyone's turn."""
        for source, target in self.connections:
            self.link(source, target).poll()

    def insist(self, request: Callable[[], int]) -> None:
        """Ask until it is taken, all ranks polling meanwhile."""

        def attempt() -> bool:
            answer = request()
            expect(answer in (0, 1), f"a request answered {answer}")
            if not answer:
                self.poll()
            return bool(answer)

        until(attempt, "a request was never taken", self._patience_s)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """All ranks polling until the condition holds."""

        def attempt() -> object:
            self.poll()
            return condition()

        until(attempt, what, self._patience_s)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        for memory in self.memory:
            memory.close()

    def _connect(self, rank: int) -> None:
        for peer in range(self.size):
            if peer != rank:
                address, key = self.endpoints[peer].address, self.keys[peer]
                self.connections[rank, peer] = self.endpoints[rank].connect(peer, address, key)


def store(backend: Backend, address: int, content: bytearray) -> None:
    """Write to memory of a device, whether or not the host can."""
    if content:
        backend.copy(address, ctypes.addressof((ctypes.c_char * len(content)).from_buffer(content)), len(content))


def fetch(backend: Backend, address: int, nbytes: int) -> bytes:
    """Read memory of a device, whether or not the host can."""
    buffer = bytearray(nbytes)
    if nbytes:
        backend.copy(ctypes.addressof((ctypes.c_char * nbytes).from_buffer(buffer)), address, nbytes)
    return bytes(buffer)


def _answer(answer: int) -> int:
    """Of native code, which can't raise."""
    if answer < 0:
        raise OSError(f"the port answered {answer}")
    return int(answer)


def threads_over(size: int, function: Callable[[int], None]) -> None:
    """function(rank) for every rank at once. Raises the first error."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
