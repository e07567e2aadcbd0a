"""Group set-up: from ranks that can exchange bytes to ranks that are joined by links.

Each step is an exchange in which a rank that failed says so, so that all raise together: who is there and with what
(rank 0's settings hold for all), who can reach whom, the keys of the segments, and what all links offer.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from commrt import __version__
from commrt.backend import Backend, DeviceBackend, Memory
from commrt.errors import BootstrapError, CommrtError, ConfigError, Unavailable
from commrt.kernel_lane import DeviceSide
from commrt.kinds import Allocator
from commrt.native import PythonPort, ffi, lib
from commrt.plugins import Registry
from commrt.settings import Settings
from commrt.transport import Connection, Context, Endpoint, Exchange, MemoryTransport, TellingConnection, Transport

_log = logging.getLogger("commrt.init")
_HOST = "cpu"  # the backend of host memory
_PAIR_SCRATCH, PAIR_PACKETS = 64 << 10, 8 << 10  # half a mailbox of an ordered pair


class _Hello(msgspec.Struct, frozen=True):
    version: str
    size: int
    backend: str
    settings: dict[str, Any]
    token: bytes
    boot: str
    cpus: tuple[int, ...]


class _Reaches(msgspec.Struct, frozen=True):
    addresses: dict[str, bytes]


class _Links(msgspec.Struct, frozen=True):
    """Per transport and rank: latency and bandwidth of the link, or null."""

    reaches: dict[str, list[tuple[float, float] | None]]


class _Keys(msgspec.Struct, frozen=True):
    keys: dict[str, bytes]


class _Offers(msgspec.Struct, frozen=True):
    capabilities: tuple[str, ...]


class _Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


@dataclass(frozen=True)
class Options:
    """What only tests and tools choose. `epoch` and `lap`: where flags start and wrap; the same on all ranks."""

    transport: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    lap: int = 0xFFFFFFFE


@functools.lru_cache(maxsize=1)
def process_engine(pid: int) -> Any:
    """The engine of this process; a forked child gets its own. Never freed: its thread may outlive Python."""
    return lib.cr_engine_new()


@dataclass
class Group:
    """Joined ranks: native communicator, links and memory. Closed by the communicator that holds it.

    `backend`: of host memory, in which the segment lies. `device`: where this rank's arrays are, if not there.
    """

    rank: int
    size: int
    settings: Settings
    backend: Backend
    native: Any
    segment: Memory
    endpoints: dict[str, Endpoint]
    links: dict[int, str]
    token: bytes
    allocator: Allocator
    ports: dict[int, Any] = field(default_factory=dict)  # `cr_port*` to each peer that has one, for any thread
    connections: dict[int, Connection] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset()
    pair_packets_half: int = PAIR_PACKETS
    keep: list[Any] = field(default_factory=list)
    device: DeviceSide | None = None
    near: dict[int, str] = field(default_factory=dict)  # links between devices, by peer

    def troubles(self) -> dict[int, str]:
        """What ended links, by peer, as far as they can tell."""
        telling = {peer: each for peer, each in self.connections.items() if isinstance(each, TellingConnection)}
        return {peer: trouble for peer, each in telling.items() if (trouble := each.trouble())}

    def release(self) -> None:
        """Unmap everything, once nothing is in flight. The native communicator stays, for those who still ask it."""
        for endpoint in self.endpoints.values():
            endpoint.close()
        if self.device is not None:
            self.device.close()
        self.segment.close()


_Reply = TypeVar("_Reply", _Hello, _Reaches, _Links, _Keys, _Offers)


@dataclass
class Setup:
    """One rank's way through group set-up. `engine` and `native_group` are native handles (the latter may be NULL)."""

    rank: int
    size: int
    exchange: Exchange
    settings: Settings
    registry: Registry
    options: Options
    engine: Any
    native_group: Any

    def run(self) -> Group:
        """Collective. Raises BootstrapError on every rank if any fails, and leaves nothing behind."""
        endpoints: dict[str, Endpoint] = {}
        memory: list[Memory] = []
        try:
            return self._run(endpoints, memory)
        except BaseException:
            for endpoint in endpoints.values():
                endpoint.close()
            for segment in memory:
                segment.close()
            raise

    def _run(self, endpoints: dict[str, Endpoint], memory: list[Memory]) -> Group:
        hellos = self._round(_Hello, self._hello)
        self._compare(hellos)
        settings = self.settings.adopt(hellos[0].settings)
        backend: Backend = self.registry.require("backends", _HOST)
        context = Context(self.rank, self.size, hellos[0].token, backend, dict(self.options.transport), settings)
        addresses = self._round(_Reaches, lambda: self._open(settings, context, endpoints))
        reaches = self._round(_Links, lambda: self._reach(endpoints, addresses))
        hosts, devices = self._families(endpoints)
        links = self._choose(reaches, hosts)
        near = self._near(reaches, devices, settings)
        shape = _shape(self.size, settings)
        allocator = self._allocator(backend, {name: endpoints[name] for name in hosts})
        for name in set(hosts) - set(links.values()):
            endpoints.pop(name).close()
        keys = self._round(_Keys, lambda: self._register(shape, allocator, endpoints, links, near, memory))
        native = self._native(shape, memory[0], hellos, settings)
        group = Group(
            rank=self.rank,
            size=self.size,
            settings=settings,
            backend=backend,
            native=native,
            segment=memory[0],
            endpoints=endpoints,
            links=links,
            token=context.token,
            allocator=allocator,
        )
        offers = self._round(_Offers, lambda: self._connect(group, near, hellos, addresses, keys, memory))
        group.capabilities = frozenset.intersection(*(frozenset(offer.capabilities) for offer in offers))
        return group

    def _round(self, kind: type[_Reply], work: Callable[[], _Reply]) -> list[_Reply]:
        """Exchange what `work` returns, or that it failed."""
        error: Exception | None = None
        try:
            mine = msgspec.msgpack.encode(work())
        except (CommrtError, OSError, MemoryError, ValueError) as caught:
            error = caught
            mine = msgspec.msgpack.encode(_Failed(f"{type(caught).__name__}: {caught}"))
        replies = self.exchange(mine)
        if error is not None:
            raise error
        return [self._decode(kind, reply, rank) for rank, reply in enumerate(replies)]

    def _decode(self, kind: type[_Reply], reply: bytes, rank: int) -> _Reply:
        try:
            return msgspec.msgpack.decode(reply, type=kind)
        except msgspec.DecodeError as error:
            try:
                failed = msgspec.msgpack.decode(reply, type=_Failed)
            except msgspec.DecodeError:
                raise BootstrapError(
                    f"rank {rank} sent a malformed set-up: {error}", rank=self.rank, peer=rank
                ) from error
            raise BootstrapError(f"rank {rank} failed to set up: {failed.reason}", rank=self.rank, peer=rank) from None

    def _hello(self) -> _Hello:
        boot = Path("/proc/sys/kernel/random/boot_id")
        return _Hello(
            __version__, self.size, self.settings.backend, self.settings.shared(), secrets.token_bytes(16),
            boot.read_text().strip() if boot.exists() else "", tuple(sorted(os.sched_getaffinity(0))),
        )  # fmt: skip

    def _compare(self, hellos: Sequence[_Hello]) -> None:
        for field_name in ("version", "size"):
            values = {getattr(hello, field_name): rank for rank, hello in enumerate(hellos)}
            if len(values) > 1:
                both = ", ".join(f"{value} (rank {rank})" for value, rank in values.items())
                raise BootstrapError(f"ranks have different {field_name}s: {both}", rank=self.rank)

    def _open(self, settings: Settings, context: Context, endpoints: dict[str, Endpoint]) -> _Reaches:
        for name in self._candidates(settings):
            transport = self.registry.require("transports", name)
            own = context if _HOST in transport.backends else replace(context, backend=self._device())
            endpoints[name] = transport.open(own)
        return _Reaches({name: endpoint.address for name, endpoint in endpoints.items()})

    def _candidates(self, settings: Settings) -> list[str]:
        if settings.transport is not None:
            probe = self.registry.require("transports", settings.transport).probe()
            if not probe.devices:
                raise Unavailable(f"transport {settings.transport!r} can't serve here: {probe.reason}", rank=self.rank)
        usable = sorted(self.registry.usable("transports").items())
        return [name for name, transport in usable if self._serves(transport, settings.transport)]

    def _serves(self, transport: Transport, forced: str | None) -> bool:
        """Whether to open it. One that is forced takes the place of those that join the same memory."""
        if not {_HOST, self.settings.backend} & set(transport.backends):
            return False
        if forced is not None and set(transport.backends) & set(self.registry.require("transports", forced).backends):
            return transport.name == forced
        probe = transport.probe()
        return bool(probe.devices) and probe.joins == "processes"

    def _device(self) -> DeviceBackend:
        """The backend of this rank's arrays, where that is a device."""
        backend = self.registry.require("backends", self.settings.backend)
        if not isinstance(backend, DeviceBackend):
            raise ConfigError(f"backend {self.settings.backend!r} does not run plans as kernels", rank=self.rank)
        if not (probe := backend.probe()).devices:
            raise Unavailable(f"backend {self.settings.backend!r} can't serve here: {probe.reason}", rank=self.rank)
        return backend

    def _families(self, endpoints: Mapping[str, Endpoint]) -> tuple[list[str], list[str]]:
        """The transports that join host memory, and those that join the memory of this rank's device."""
        joins = {name: self.registry.require("transports", name).backends for name in endpoints}
        return [name for name in joins if _HOST in joins[name]], [name for name in joins if _HOST not in joins[name]]

    def _reach(self, endpoints: dict[str, Endpoint], addresses: Sequence[_Reaches]) -> _Links:
        found: dict[str, list[tuple[float, float] | None]] = {}
        for name, endpoint in endpoints.items():
            row: list[tuple[float, float] | None] = []
            for rank, offer in enumerate(addresses):
                there = name in offer.addresses and rank != self.rank
                reach = endpoint.reach(rank, offer.addresses[name]) if there else None
                row.append((reach.latency_us, reach.bandwidth_gbps) if reach else None)
            found[name] = row
        return _Links(found)

    def _choose(self, reaches: Sequence[_Links], names: Sequence[str]) -> dict[int, str]:
        """The best link that both ends can use, for each peer; both ends come to the same answer."""
        links: dict[int, str] = {}
        for peer in (peer for peer in range(self.size) if peer != self.rank):
            best = self._best(reaches, names, peer)
            if best is None:
                tried = ", ".join(sorted(names)) or "none"
                raise BootstrapError(
                    f"no transport joins ranks {self.rank} and {peer} (tried {tried})", rank=self.rank, peer=peer
                )
            links[peer] = best
        return links

    def _best(self, reaches: Sequence[_Links], names: Sequence[str], peer: int) -> str | None:
        both: list[tuple[float, str]] = []
        for name in names:
            there = reaches[self.rank].reaches[name][peer]
            back = reaches[peer].reaches.get(name, [None] * self.size)[self.rank]
            if there and back:
                both.append((max(there[0], back[0]) + 1e3 / min(there[1], back[1]), name))
        return min(both)[1] if both else None

    def _near(self, reaches: Sequence[_Links], names: Sequence[str], settings: Settings) -> dict[int, str]:
        """The best link between the devices' memories, for each peer that has one; the others meet in host memory."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        near = {peer: name for peer in peers if (name := self._best(reaches, names, peer))}
        if settings.transport in names and len(near) < len(peers):
            far = next(peer for peer in peers if peer not in near)
            raise BootstrapError(
                f"transport {settings.transport!r} does not join ranks {self.rank} and {far}", rank=self.rank, peer=far
            )
        return near

    def _allocator(self, backend: Backend, endpoints: Mapping[str, Endpoint]) -> Allocator:
        transports = (self.registry.require("transports", name) for name in endpoints)
        return Allocator(backend, [transport for transport in transports if isinstance(transport, MemoryTransport)])

    def _register(
        self,
        shape: Any,
        allocator: Allocator,
        endpoints: dict[str, Endpoint],
        links: dict[int, str],
        near: dict[int, str],
        memory: list[Memory],
    ) -> _Keys:
        kind = allocator.kind(self.options.transport.get("segment_kind"))
        if kind.coherence != "kernel":
            raise ConfigError(f"scratch must be kernel-coherent; {kind.name!r} memory is not", rank=self.rank)
        nbytes = lib.cr_segment_bytes(shape)
        memory.append(allocator.allocate(nbytes, kind))
        keys = {name: endpoints[name].register(memory[0]) for name in sorted(set(links.values()))}
        if near:
            memory.append(self._device().allocate(nbytes))
            keys |= {name: endpoints[name].register(memory[1]) for name in sorted(set(near.values()))}
        return _Keys(keys)

    def _native(self, shape: Any, segment: Memory, hellos: Sequence[_Hello], settings: Settings) -> Any:
        here = [hello for hello in hellos if hello.boot == hellos[self.rank].boot]
        cpus = {cpu for hello in here for cpu in hello.cpus}
        config = ffi.new("cr_config*")
        config.shape = shape[0]
        config.rank = self.rank
        config.segment = ffi.cast("char*", segment.address)
        config.epoch, config.lap = self.options.epoch, self.options.lap
        config.oversubscribed = len(here) > len(cpus)
        native = lib.cr_comm_new(self.engine, config, self.native_group)
        if native == ffi.NULL:
            raise BootstrapError("the native communicator refused its configuration", rank=self.rank)
        return ffi.gc(native, lib.cr_comm_free)

    def _connect(
        self, group: Group, near: dict[int, str], hellos: Sequence[_Hello], addresses: Sequence[_Reaches],
        keys: Sequence[_Keys], memory: Sequence[Memory],
    ) -> _Offers:  # fmt: skip
        capabilities = {"mapped", "direct"}
        self._attach_self(group)
        for peer, name in group.links.items():
            connection = group.endpoints[name].connect(peer, addresses[peer].addresses[name], keys[peer].keys[name])
            group.connections[peer] = connection
            if connection.mapped is None:
                capabilities.discard("mapped")
            if connection.direct is None:
                capabilities.discard("direct")
            self._attach(group, peer, connection)
        if any(hello.backend != _HOST for hello in hellos):
            capabilities.discard("direct")
        if len(near) not in (0, self.size - 1):
            capabilities.discard("mapped")  # what this rank writes once, not all of its peers would find in one place
        if group.backend.name != self.settings.backend:
            opened = {
                peer: group.endpoints[name].connect(peer, addresses[peer].addresses[name], keys[peer].keys[name])
                for peer, name in near.items()
            }
            group.device, group.near = self._side(group, opened, memory), near
        names = set(group.links.values())
        if len(names) == 1:
            capabilities |= group.endpoints[names.pop()].group(range(self.size), self.exchange)
        _log.info("rank %d of %d: links %s, capabilities %s", self.rank, self.size, group.links, sorted(capabilities))
        return _Offers(tuple(sorted(capabilities)))

    def _side(self, group: Group, opened: Mapping[int, Connection], memory: Sequence[Memory]) -> DeviceSide:
        hosts = {peer: connection.mapped for peer, connection in group.connections.items()}
        hosts[self.rank] = group.segment.address
        near = {peer: connection.mapped for peer, connection in opened.items()}
        return DeviceSide(self._device(), group.native, self.rank, memory[0].nbytes, hosts, near, memory[1:])

    def _attach_self(self, group: Group) -> None:
        """A rank reaches itself without a link."""
        own = ffi.new("cr_port*")
        lib.cr_port_same_process(own)
        segment = ffi.cast("char*", group.segment.address)
        lib.cr_comm_connect(group.native, self.rank, segment, ffi.NULL, own, -1)

    def _attach(self, group: Group, peer: int, connection: Connection) -> None:
        port = connection.port
        if port is not None and not isinstance(port, ffi.CData):
            wrapped = PythonPort(port)
            group.keep.append(wrapped)
            port = wrapped.struct
        if port is not None:
            port = group.ports[peer] = ffi.gc(lib.cr_port_locked(port), lib.cr_port_locked_free)
        lib.cr_comm_connect(
            group.native, peer, ffi.cast("char*", connection.mapped or 0), ffi.NULL if port is None else port,
            connection.direct or ffi.NULL, connection.life,
        )  # fmt: skip


def half(size: int, nbytes: int) -> int:
    """Bytes of one half of a region, the other of which belongs to the epochs of other parity."""
    return max(256 * size, nbytes // 2) // 128 * 128


def _shape(size: int, settings: Settings) -> Any:
    scratch, packets = half(size, settings.scratch_bytes), half(size, settings.packet_bytes)
    return ffi.new("cr_shape*", [size, scratch, packets, _PAIR_SCRATCH, PAIR_PACKETS])
