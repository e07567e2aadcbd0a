"""Sockets of the bootstrap: where to listen, how to reach a listener that may not be there yet. Decides by errno, never
by message.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from commrt.errors import BootstrapError, BootstrapTimeout, ConfigError

log = logging.getLogger("commrt.init")

# Nobody is there yet, the path there is not up yet, or this host is short of something for the moment.
_PASSING = frozenset(
    {
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOBUFS,
        errno.ENOTCONN,
    }
)
_NOT_THIS_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
_LONGEST_PAUSE_S = 0.25


class Address(NamedTuple):
    """One address that a host name stands for."""

    family: int
    sockaddr: tuple[Any, ...]

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(str(self.sockaddr[0]).partition("%")[0]).is_loopback

    def __str__(self) -> str:
        host = f"[{self.sockaddr[0]}]" if self.family == socket.AF_INET6 else self.sockaddr[0]
        return f"{host}:{self.sockaddr[1]}"


def parse_address(text: str, source: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. `source` says in the `ConfigError` whose value it is."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"{source}={text!r} is not host:port (an IPv6 address goes in brackets)")
    return host[1:-1] if bracketed else host, parse_port(port, source, text)


def parse_port(port: str, source: str, whole: str | None = None) -> int:
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConfigError(f"{source}={port if whole is None else whole!r}: the port must lie within 1..65535")
    return int(port)


def resolve(host: str, port: int, deadline: float) -> list[Address]:
    """Every address of `host`. A name server that is out for the moment is asked again until the deadline."""
    for pause in pauses(deadline):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise BootstrapError(f"the host name {host!r} can't be resolved: {error.strerror}") from None
            time.sleep(pause)
        except UnicodeError:
            raise BootstrapError(f"{host!r} is not a host name") from None
        else:
            return list(dict.fromkeys(Address(family, sockaddr) for family, _, _, _, sockaddr in found))
    raise BootstrapTimeout(f"the host name {host!r} was not resolved in time: no name server answers")


def pauses(deadline: float) -> Iterator[float]:
    """Lengths of the pauses between tries, growing and jittered; ends when the deadline has passed. The first try is
    always made.
    """
    pause = 0.01
    while True:
        left = deadline - time.monotonic()
        yield max(0.0, min(left, pause * random.uniform(0.5, 1.0)))
        if time.monotonic() >= deadline:
            return
        pause = min(pause * 2, _LONGEST_PAUSE_S)


def backlog() -> int:
    """What the kernel allows; a world that starts at once must fit in."""
    try:
        with open("/proc/sys/net/core/somaxconn") as limit:
            return int(limit.read())
    except (OSError, ValueError):
        return socket.SOMAXCONN


def listen(addresses: list[Address], deadline: float) -> socket.socket:
    """A listener on the first of `addresses` that is this host's. A port in use is waited for until the deadline."""
    tried = ", ".join(map(str, addresses))
    told = False
    for pause in pauses(deadline):
        for address in addresses:
            try:
                return _bind(address)
            except OSError as error:
                failed = error
                if error.errno not in _NOT_THIS_ADDRESS:
                    break
        if failed.errno != errno.EADDRINUSE:
            raise BootstrapError(f"rank 0 can't listen on any of {tried}: {failed.strerror}", rank=0)
        if not told:
            log.warning("%s is in use by another process; waiting for it", address)
            told = True
        time.sleep(pause)
    raise BootstrapTimeout(f"rank 0 can't listen on {tried}: the port stayed in use by another process", rank=0)


def _bind(address: Address) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address.sockaddr)
        sock.listen(backlog())
    except BaseException:
        sock.close()
        raise
    return sock


def connect_once(address: Address, timeout_s: float) -> socket.socket:
    """A connected socket, or OSError."""
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect(address.sockaddr)
        if sock.getsockname() == sock.getpeername():
            # With no listener, a port from the ephemeral range can meet itself, and would keep rank 0 from binding it.
            raise OSError(errno.ECONNREFUSED, "connected to itself")
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """No delay for small frames; a host that vanished without a word is noticed within half a minute."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_passing(error: OSError) -> bool:
    """Whether the same try may succeed a little later."""
    return isinstance(error, (TimeoutError, ConnectionError)) or error.errno in _PASSING


def in_this_process(pid: int) -> bool:
    """False in a process forked from the one that made a thing; such a thing is its parent's."""
    return os.getpid() == pid
