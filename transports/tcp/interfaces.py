"""This host's network interfaces, and which of them serves."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from commrt.errors import ConfigError

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP = 1
_NAME = struct.Struct("16s24x")  # struct ifreq
_IPV6_USABLE = ("00", "10")  # global, and the host's own; an address of a link alone needs a scope to go with it
_IPV6_UNUSABLE_FLAGS = 0x48  # duplicate, or not known yet not to be one
_LAST = (("docker",), ("lo",))  # used by default where there is no other, in this order


@dataclass(frozen=True)
class Interface:
    """One that is up, and its address: IPv4 if it has one."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this host can be reached there."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> list[Interface]:
    """All that are up and have an address, in the system's order."""
    found = []
    by_ipv6 = _ipv6()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        for _, name in socket.if_nameindex():
            address = _ipv4(ask, name) or by_ipv6.get(name)
            if address and _is_up(ask, name):
                found.append(Interface(name, address))
    return found


def choose(spec: str | None, found: Sequence[Interface]) -> Interface | None:
    """The one to use, by the setting `net_interface`. None if there is none, ConfigError if none that it names."""
    if spec is None:
        return min(found, key=lambda one: _rank(one.name), default=None)
    excluding, exact = spec.startswith("^"), spec.lstrip("^").startswith("=")
    names = spec.lstrip("^=").split(",")

    def fits(name: str, pattern: str) -> bool:
        return name == pattern if exact else name.startswith(pattern)

    if excluding:
        left = [one for one in found if not any(fits(one.name, pattern) for pattern in names)]
        chosen = choose(None, left)
    else:
        chosen = next((one for pattern in names for one in found if fits(one.name, pattern)), None)
    if chosen is None:
        there = ", ".join(one.name for one in found) or "none"
        raise ConfigError(f"no network interface fits COMMRT_NET_INTERFACE={spec} (up, with an address: {there})")
    return chosen


def _rank(name: str) -> int:
    return next((1 + at for at, prefixes in enumerate(_LAST) if name.startswith(prefixes)), 0)


def _is_up(ask: socket.socket, name: str) -> bool:
    answer = _ask(ask, _SIOCGIFFLAGS, name)
    return answer is not None and bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)


def _ipv4(ask: socket.socket, name: str) -> str | None:
    answer = _ask(ask, _SIOCGIFADDR, name)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def _ask(ask: socket.socket, request: int, name: str) -> bytes | None:
    with suppress(OSError):  # it has none, or is just gone
        return fcntl.ioctl(ask, request, _NAME.pack(name.encode()))
    return None


def _ipv6() -> dict[str, str]:
    """The first usable address of each interface."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            address, _, _, scope, flags, name = line.split()
            if scope in _IPV6_USABLE and not int(flags, 16) & _IPV6_UNUSABLE_FLAGS:
                found.setdefault(name, str(ipaddress.IPv6Address(bytes.fromhex(address))))
    return found
