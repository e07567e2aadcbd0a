"""A reliable queue pair to each peer. Puts are RDMA writes, signals come behind them: see `commrt/_native/ib_link.cpp`.

Queue pair numbers and memory keys are the right to write into a rank's registered memory. They are in addresses and
keys, which travel over the authenticated exchange alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from commrt.backend import Memory, Probe
from commrt.errors import TransportError
from commrt.native import ffi, lib
from commrt.ports import PortConnection, PortEndpoint
from commrt.transport import Context, Reach, Transport
from commrt.transports.ib import devices
from commrt.transports.ib.link import NUMBER_SHIFT, End, Key, Link, close_all, to_u64


class Address(msgspec.Struct, frozen=True):
    """Of an endpoint: by rank, its queue pair for that one."""

    ends: list[End | None]


class IbTransport(Transport):
    """Implements `commrt.transport.Transport`. `library`: libibverbs, as the dynamic linker finds it."""

    name = "ib"

    def __init__(self, library: str = devices.LIBRARY) -> None:
        self._library = library

    def probe(self) -> Probe:
        """The active ports."""
        try:
            ports = devices.active_ports(self._library)
        except TransportError as error:
            return Probe(reason=str(error))
        soft = all(devices.is_soft(port) for port in ports)
        return Probe(devices=tuple(map(str, ports)), level="real verbs, soft-RoCE" if soft else "real verbs")

    def open(self, context: Context) -> IbEndpoint:
        """An endpoint at one port, with a queue pair for each peer."""
        port = devices.choose_port(devices.active_ports(self._library), context.settings.ib_device)
        return IbEndpoint(context, port)


class IbEndpoint(PortEndpoint):
    """Implements `commrt.transport.Endpoint`."""

    def __init__(self, context: Context, port: devices.Port) -> None:
        super().__init__()
        self._rank, self._port = context.rank, port
        self._device = devices.open_device(port.device)
        self._links: dict[int, Link] = {}
        self.closes.append(_Closing(self._device, self._links))
        try:
            self._open_links(context)
        except BaseException:
            self.close()
            raise

    def _open_links(self, context: Context) -> None:
        gid = devices.choose_gid(self._port, devices.read_gids(self._device, self._port), context.settings.ib_gid_index)
        ends: list[End | None] = []
        for peer in range(context.size):
            if peer != context.rank:
                self._links[peer] = Link(self._device, self._port.number, gid)
            ends.append(self._links[peer].end() if peer in self._links else None)
        self.address = msgspec.msgpack.encode(Address(ends))

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """Ports of the same kind are taken to be of one network. Shared memory is better, ordinary sockets are not."""
        same = self._end(address).link_layer == self._port.link_layer
        return Reach(latency_us=3.0, bandwidth_gbps=8.0) if same else None

    def register(self, memory: Memory) -> bytes:
        """Register it with the device. Raises TransportError."""
        number = self.regions.add(memory) >> NUMBER_SHIFT
        why, key = ffi.new("cr_ib_why*"), ffi.new("unsigned*")
        start = ffi.cast("void*", memory.address)
        devices.checked(lib.cr_ib_register(self._device, number, start, memory.nbytes, key, why), why)
        return msgspec.msgpack.encode(Key(number, to_u64(memory.address), to_u64(memory.nbytes), key[0]))

    def connect(self, rank: int, address: bytes, key: bytes) -> IbConnection:
        """Join the queue pair made for that rank with the one that it made for this."""
        link = self._links[rank]
        link.join(self._end(address))
        link.know(_decode(key, Key))
        return IbConnection(link)

    def _end(self, address: bytes) -> End:
        ends = _decode(address, Address).ends
        end = ends[self._rank] if self._rank < len(ends) else None
        if end is None:
            raise TransportError("a peer's ib address has no queue pair for this rank")
        return end


class IbConnection(PortConnection):
    """Implements `commrt.transport.TellingConnection`."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, link.port)
        self._link = link

    def locate(self, key: bytes) -> int:
        """By its number."""
        return self._link.know(_decode(key, Key))

    def trouble(self) -> str:
        """In the words of libibverbs."""
        return self._link.trouble()


class _Closing:
    """Closes links, then their device. Once."""

    def __init__(self, device: Any, links: Mapping[int, Link]) -> None:
        self._device, self._links = device, links

    def close(self) -> None:
        close_all(self._links.values())
        lib.cr_ib_close(self._device)


_Record = TypeVar("_Record", Address, Key)


def _decode(data: bytes, kind: type[_Record]) -> _Record:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError(f"a peer's ib {kind.__name__.lower()} is malformed: {error}") from error
