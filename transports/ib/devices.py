"""Which device, port and GID a rank uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commrt.errors import ConfigError, TransportError
from commrt.native import ffi, lib

LIBRARY = "libibverbs.so.1"
ETHERNET = 2  # link layer
_MOST_DEVICES, _MOST_PORTS = 64, 8
_SYSFS = Path("/sys/class/infiniband")
_IPV4, _LINK_LOCAL = bytes(10) + b"\xff\xff", b"\xfe\x80"
_V2 = "RoCE v2"


@dataclass(frozen=True)
class Port:
    """An active port of a device."""

    device: str
    number: int
    link_layer: int
    gids: int  # entries of its GID table

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table. `kind`: what the kernel calls it, "" where it does not say."""

    index: int
    raw: bytes
    kind: str


def checked(answer: int, why: Any) -> int:
    """The answer of a native function, if it isn't a refusal. Raises TransportError with the reason."""
    if answer < 0:
        raise TransportError(ffi.string(why.text).decode(errors="replace"))
    return answer


def active_ports(library: str = LIBRARY) -> list[Port]:
    """Those of all devices. Raises TransportError if there are none, saying why."""
    why = ffi.new("cr_ib_why*")
    checked(lib.cr_ib_load(library.encode(), why), why)
    names = list(_device_names())
    if not names:
        raise TransportError("no verbs device for InfiniBand or RoCE")
    found: list[Port] = []
    idle: list[str] = []
    for name in names:
        try:
            ports = [port for port, active in _ports(name) if active]
            found += ports
            idle += [] if ports else [f"{name} is down"]
        except TransportError as error:
            idle.append(str(error))
    if not found:
        raise TransportError(f"no active port: {'; '.join(idle)}")
    return found


def choose_port(ports: Sequence[Port], wanted: str | None) -> Port:
    """The one called `device` or `device:port`, else the first. Raises ConfigError if that one isn't active."""
    for port in ports:
        if wanted in (None, port.device, str(port)):
            return port
    raise ConfigError(f"COMMRT_IB_DEVICE={wanted} has no active port; those with one: {', '.join(map(str, ports))}")


def choose_gid(port: Port, gids: Sequence[Gid], wanted: int | None) -> int:
    """The index wanted, else of InfiniBand the first entry, of RoCE the best.

    Raises ConfigError if the wanted one is empty, TransportError if there is none.
    """
    if wanted is not None:
        if wanted not in [gid.index for gid in gids]:
            raise ConfigError(f"COMMRT_IB_GID_INDEX={wanted} is an empty entry of {port}")
        return wanted
    if not gids:
        raise TransportError(f"{port} has no GID")
    return gids[0].index if port.link_layer != ETHERNET else min(gids, key=_preference).index


def _preference(gid: Gid) -> tuple[bool, bool, bool, int]:
    """Routed before local, IPv4 before IPv6: the least is the best."""
    return (_V2 not in gid.kind, not gid.raw.startswith(_IPV4), gid.raw.startswith(_LINK_LOCAL), gid.index)


def read_gids(device: Any, port: Port) -> list[Gid]:
    """What the port's table holds."""
    raw = ffi.new("unsigned char[16]")
    found = []
    for index in range(min(port.gids, 256)):
        if lib.cr_ib_query_gid(device, port.number, index, raw) == 0 and any(raw):
            found.append(Gid(index, bytes(raw), _gid_kind(port, index)))
    return found


def is_soft(port: Port) -> bool:
    """Whether the device is the kernel's soft-RoCE, in software over an ordinary network interface."""
    return (_SYSFS / port.device / "parent").exists()


def _gid_kind(port: Port, index: int) -> str:
    try:
        return (_SYSFS / port.device / f"ports/{port.number}/gid_attrs/types/{index}").read_text().strip()
    except OSError:
        return ""


def open_device(name: str) -> Any:
    """A `cr_ib*`. Raises TransportError."""
    why, out = ffi.new("cr_ib_why*"), ffi.new("cr_ib**")
    checked(lib.cr_ib_open(name.encode(), out, why), why)
    return out[0]


def _device_names() -> Iterator[str]:
    why, name = ffi.new("cr_ib_why*"), ffi.new("char[64]")
    for index in range(_MOST_DEVICES):
        if not checked(lib.cr_ib_device(index, name, why), why):
            return
        yield ffi.string(name).decode()


def _ports(name: str) -> list[tuple[Port, bool]]:
    """Each port, and whether it is active."""
    device, found, ports = open_device(name), ffi.new("cr_ib_port*"), []
    try:
        for number in range(1, _MOST_PORTS + 1):
            if lib.cr_ib_query_port(device, number, found):
                break
            ports.append((Port(name, number, int(found.link_layer), int(found.gids)), bool(found.active)))
    finally:
        lib.cr_ib_close(device)
    return ports
