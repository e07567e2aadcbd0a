"""TCP: one connection for each pair of ranks. Set up and authenticated here, run by a native port.

A rank listens at two addresses: at the host's own, for ranks of the same network namespace, and at one of an interface
that others reach; only there if the setting `net_interface` names one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from commrt.backend import Memory, Probe
from commrt.errors import TransportError
from commrt.native import ffi, lib
from commrt.ports import PortConnection, PortEndpoint
from commrt.transport import Context, Reach, Transport
from commrt.transports.tcp.handshake import Caller, HandshakeError
from commrt.transports.tcp.interfaces import Interface, choose, interfaces
from commrt.transports.tcp.meeting import Door, Place, call, close_in_children, listen

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LEAVE_S = 1.0  # for what was sent to arrive, when closing
_DRAIN_NBYTES = 1 << 16
_SENT = (5, 6, 7)  # states of a connection whose end of sending was confirmed: FIN_WAIT2, TIME_WAIT, CLOSE
# Seconds of silence, and between questions, and questions without an answer, until an idle link counts as cut.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
_SAME_HOST = Reach(latency_us=20.0, bandwidth_gbps=2.0)
_OTHER_HOST = Reach(latency_us=50.0, bandwidth_gbps=1.0)


class Address(msgspec.Struct, frozen=True):
    """Where an endpoint listens: for ranks of the same `host` (a booted system's network namespace), and for others."""

    host: str
    inner: Place
    outer: Place | None


class TcpTransport(Transport):
    """Implements `commrt.transport.Transport`."""

    name = "tcp"

    def probe(self) -> Probe:
        """Needs an interface that is up."""
        names = tuple(one.name for one in interfaces())
        return Probe(names) if names else Probe(reason="no network interface is up and has an address")

    def open(self, context: Context) -> TcpEndpoint:
        """An endpoint that listens from now on. Raises ConfigError if the interface that was asked for is not there."""
        return TcpEndpoint(context)


class TcpEndpoint(PortEndpoint):
    """Implements `commrt.transport.Endpoint`."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._native_regions = ffi.gc(lib.cr_regions_new(), lib.cr_regions_free)
        self._connections: list[TcpConnection] = []
        inner, outer = _interfaces(context.settings.net_interface)
        self._inner = listen(inner.address, context.size)
        try:
            self._outer = self._inner if outer == inner else listen(outer.address, context.size) if outer else None
        except OSError:
            self._inner.close()
            raise
        listeners = {one for one in (self._inner, self._outer) if one is not None}
        self._door = Door(listeners, context.token, context.size, context.rank)
        self.closes.append(self._door)
        self._own = Address(_this_host(), _place(self._inner), _place(self._outer) if self._outer else None)
        self._callers = dict.fromkeys(range(context.rank), True)  # who may yet call: whether from another host
        self.address = msgspec.msgpack.encode(self._own)

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """By the host's own interface, or by one to others, if both have one of the same kind."""
        peer = _decode(address)
        far = peer.host != self._own.host
        if far and not (self._own.outer and peer.outer and _family(self._own.outer) == _family(peer.outer)):
            self._callers.pop(rank, None)
            return None
        if rank in self._callers:
            self._callers[rank] = far
        return _OTHER_HOST if far else _SAME_HOST

    def register(self, memory: Memory) -> bytes:
        """For the native port too."""
        if lib.cr_regions_add(self._native_regions, ffi.cast("void*", memory.address), memory.nbytes):
            raise TransportError("too much memory is registered")
        return super().register(memory)

    def connect(self, rank: int, address: bytes, key: bytes) -> TcpConnection:
        """Call a higher rank, or answer a lower one."""
        deadline = time.monotonic() + self._context.settings.init_timeout_s
        try:
            link = self._call(rank, address, deadline) if rank > self._context.rank else self._answer(rank, deadline)
            connection = TcpConnection(link, self._native_regions)
        except (OSError, HandshakeError) as error:
            raise TransportError(f"no connection to rank {rank}: {error}", peer=rank) from error
        self._connections.append(connection)
        self.closes.append(connection)
        return connection

    def close(self) -> None:
        """Leave all peers at once, then as every endpoint."""
        deadline = time.monotonic() + _LEAVE_S
        for connection in self._connections:
            connection.hang_up()
        for connection in self._connections:
            connection.leave(deadline)
        self._connections.clear()
        super().close()

    def _call(self, rank: int, address: bytes, deadline: float) -> socket.socket:
        self._door.close()  # ranks are joined in order: all lower ones have called
        peer = _decode(address)
        place = peer.inner if peer.host == self._own.host else peer.outer
        if place is None:
            raise TransportError(f"rank {rank} has no address for other hosts", peer=rank)
        return call(place, Caller(self._context.token, self._context.size, self._context.rank, rank), deadline)

    def _answer(self, rank: int, deadline: float) -> socket.socket:
        link = self._door.answer(rank, deadline)
        self._callers.pop(rank, None)
        if self._outer is not None and self._outer is not self._inner and not any(self._callers.values()):
            self._door.shut(self._outer)
        if not self._callers:
            self._door.close()
        return link


class TcpConnection(PortConnection):
    """Implements `commrt.transport.Connection`: a native port over a socket, which it owns."""

    def __init__(self, link: socket.socket, regions: object) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        port = ffi.gc(lib.cr_stream_new(link.fileno(), regions), lib.cr_stream_free)
        super().__init__(link, port)
        self._socket, self._regions, self._leaving = link, regions, False
        close_in_children(link)

    def trouble(self) -> str:
        """What ended the port, if it was not the peer's end."""
        return str(ffi.string(lib.cr_stream_fault(self.port)).decode(errors="replace"))

    def hang_up(self) -> None:
        """Say that nothing more will come. Idempotent."""
        if not lib.cr_stream_end(self.port):
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                self._leaving = True

    def leave(self, deadline: float) -> None:
        """Wait until the peer's system has all that was sent. Idempotent.

        A socket that is closed with something unread would take back what has not arrived: so all of it is read.
        """
        with suppress(OSError):
            while self._leaving and time.monotonic() < deadline and _state(self._socket) not in _SENT:
                with suppress(BlockingIOError):
                    while self._socket.recv(_DRAIN_NBYTES):
                        pass
                time.sleep(0.0005)
        self._leaving = False

    def close(self) -> None:
        """Leave, and close the socket."""
        self.hang_up()
        self.leave(time.monotonic() + _LEAVE_S)
        super().close()


def _interfaces(spec: str | None) -> tuple[Interface, Interface | None]:
    """For ranks of this host, and for others. Raises ConfigError if the one that `spec` asks for is not there."""
    found = interfaces()
    outer = choose(spec, found if spec else [one for one in found if not one.is_loopback])
    inner = outer if spec else next((one for one in found if one.is_loopback), outer)
    if inner is None:
        raise TransportError("no network interface is up and has an address")
    return inner, outer


def _this_host() -> str:
    return f"{_BOOT_ID.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _place(listener: socket.socket) -> Place:
    host, port = listener.getsockname()[:2]
    return host, port


def _family(place: Place) -> int:
    return ipaddress.ip_address(place[0]).version


def _state(link: socket.socket) -> int:
    return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _decode(address: bytes) -> Address:
    """Checked: numeric addresses, ports that are some."""
    try:
        peer = msgspec.msgpack.decode(address, type=Address)
        for place in (peer.inner, peer.outer):
            if place is not None and (_family(place) not in (4, 6) or not 0 < place[1] < 1 << 16):
                raise ValueError(f"{place[1]} is no port")
    except (msgspec.DecodeError, ValueError) as error:
        raise TransportError(f"a peer's tcp address is malformed: {error}") from error
    return peer
