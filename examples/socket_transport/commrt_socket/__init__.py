"""A transport over Unix sockets in pure Python: short, complete, slow. Each end checks whose process the other is."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from commrt.backend import Probe
from commrt.errors import TransportError
from commrt.ports import PortConnection, PortEndpoint, Regions, check_own
from commrt.transport import Context, Reach, Transport, this_host

PLUGIN_API = 1
HEADER = struct.Struct("<?QQ")  # a message: is it a signal, where, the value of the signal; the data of a put follows
CHUNK, PATIENCE_S = 1 << 16, 30.0


class SocketTransport(Transport):
    name = "socket"

    def probe(self) -> Probe:
        return Probe(("this host",)) if hasattr(socket, "SO_PEERCRED") else Probe(reason="needs Linux's Unix sockets")

    def open(self, context: Context) -> SocketEndpoint:
        return SocketEndpoint(context)


class SocketEndpoint(PortEndpoint):
    """Listens for each peer under a name of its own, which the kernel picks. `address`: the host, then the names."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._rank = context.rank
        self._listeners = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(context.size)]
        for listener in self._listeners:
            listener.bind("")
            listener.listen(1)
            listener.settimeout(PATIENCE_S)
        self.closes += self._listeners
        self.address = b"\n".join([this_host(), *(listener.getsockname() for listener in self._listeners)])

    def reach(self, rank: int, address: bytes) -> Reach | None:
        return Reach(latency_us=50.0, bandwidth_gbps=0.5) if address.split(b"\n")[0] == this_host() else None

    def connect(self, rank: int, address: bytes, key: bytes) -> SocketConnection:
        try:
            if rank < self._rank:
                link = self._listeners[rank].accept()[0]
            else:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.connect(address.split(b"\n")[1 + self._rank])
            check_own(link)
        except (OSError, IndexError) as error:
            raise TransportError(f"no socket to rank {rank}: {error}", peer=rank) from error
        connection = SocketConnection(link, self.regions)
        self.closes.append(connection)
        return connection


class SocketConnection(PortConnection):
    """Connection and port in one. What is taken, the kernel has. A long put goes in chunks, over as many askings."""

    def __init__(self, link: socket.socket, regions: Regions) -> None:
        super().__init__(link)
        self._link, self._regions = link, regions
        self._sent: dict[int, int] = {}  # bytes of each put under way, by its offset
        link.setblocking(False)

    def put(self, offset: int, source: memoryview) -> int:
        for at in range(self._sent.pop(offset, 0), source.nbytes, CHUNK):
            if not self._send(HEADER.pack(False, offset + at, 0), source[at : at + CHUNK]):
                self._sent[offset] = at
                return 0
        return 1

    def signal(self, offset: int, value: int) -> int:
        return self._send(HEADER.pack(True, offset, value))

    def poll(self) -> int:
        moved = 0
        with suppress(BlockingIOError):
            while message := self._link.recv(HEADER.size + CHUNK):
                is_signal, offset, value = HEADER.unpack_from(message)
                if is_signal:
                    self._regions.signal(offset, value)
                else:
                    self._regions.view(offset, len(message) - HEADER.size)[:] = message[HEADER.size :]
                moved = 1
            raise EOFError("the peer has left")
        return moved

    def _send(self, *parts: bytes | memoryview) -> int:
        with suppress(BlockingIOError, ConnectionError):  # full; or poll tells, once the peer's last words are read
            return int(self._link.sendmsg(parts) > 0)
        return 0


plugin = SocketTransport()
