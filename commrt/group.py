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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from commrt import __version__
from commrt.backend import Backend, DeviceBackend, Memory
from commrt.errors import BootstrapError, CommrtError, ConfigError, Unavailable
from commrt.joining import Joined, join_all
from commrt.kernel_lane import DeviceSide
from commrt.kinds import Allocator
from commrt.linking import HOST, Linker, Row
from commrt.native import PythonPort, ffi, lib
from commrt.plugins import Registry
from commrt.provider import Joining
from commrt.selection import NATIVE, Table, load_table, read_table
from commrt.settings import Settings
from commrt.transport import Connection, Context, Endpoint, Exchange, MemoryTransport, SwitchEndpoint, TellingConnection

_log = logging.getLogger("commrt.init")
_PAIR_SCRATCH, PAIR_PACKETS = 64 << 10, 8 << 10  # half a mailbox of an ordered pair


class _Hello(msgspec.Struct, frozen=True):
    version: str
    size: int
    backend: str
    settings: dict[str, Any]
    token: bytes
    boot: str
    cpus: tuple[int, ...]
    table: bytes
    providers: dict[str, bool]  # to join; True for those that must be there


class _Addresses(msgspec.Struct, frozen=True):
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
class _Joints:
    """How this rank is joined: links of host memory and between devices, by peer, and what joins all ranks at once."""

    links: dict[int, str]
    near: dict[int, str]
    groups: list[str]

    @classmethod
    def decide(cls, linker: Linker, reaches: Sequence[Mapping[str, Row]], forced: str | None) -> _Joints:
        """From what every rank reaches."""
        return cls(linker.hosts(reaches), linker.devices(reaches, forced), linker.groups(reaches, forced))

    @property
    def names(self) -> set[str]:
        """The transports that are needed."""
        return {*self.links.values(), *self.near.values(), *self.groups}


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
    table: Table | None = None  # None: the one that ships with commrt
    joined: dict[str, Joined] = field(default_factory=dict)
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


_Reply = TypeVar("_Reply", _Hello, _Addresses, _Links, _Keys, _Offers)


@dataclass
class Setup:
    """One rank's way through group set-up. `engine` and `native_group` are native handles (the latter may be NULL).

    `table`: rank 0's selection table once it is known to all, None for commrt's own.
    """

    rank: int
    size: int
    exchange: Exchange
    settings: Settings
    registry: Registry
    options: Options
    engine: Any
    native_group: Any
    table: Table | None = None

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
        self.table = load_table(hellos[0].table) if hellos[0].table else None
        backend: Backend = self.registry.require("backends", HOST)
        linker = Linker(self.rank, self.size, self.registry, self.settings.backend)
        context = Context(self.rank, self.size, hellos[0].token, backend, dict(self.options.transport), settings)
        offered = self._round(_Addresses, lambda: _Addresses(linker.open(context, settings.transport, endpoints)))
        addresses = [offer.addresses for offer in offered]
        reached = self._round(_Links, lambda: _Links(linker.reach(endpoints, addresses)))
        joints = _Joints.decide(linker, [one.reaches for one in reached], settings.transport)
        for name in set(endpoints) - joints.names:
            endpoints.pop(name).close()
        shape = _shape(self.size, settings)
        allocator = self._allocator(backend, endpoints)
        keys = self._round(_Keys, lambda: self._register(shape, linker, allocator, endpoints, joints, memory))
        native = self._native(shape, memory[0], hellos, settings)
        group = Group(
            rank=self.rank,
            size=self.size,
            settings=settings,
            backend=backend,
            native=native,
            segment=memory[0],
            endpoints=endpoints,
            links=joints.links,
            token=context.token,
            allocator=allocator,
            table=self.table,
        )
        offers = self._round(_Offers, lambda: self._connect(group, linker, joints, hellos, addresses, keys, memory))
        group.capabilities = frozenset.intersection(*(frozenset(offer.capabilities) for offer in offers))
        group.capabilities |= self._join(group, joints.groups)
        links, capabilities = group.links | group.near, sorted(group.capabilities)
        _log.info("rank %d of %d: links %s, capabilities %s", self.rank, self.size, links, capabilities)
        local = len({hello.boot for hello in hellos}) == 1
        joining = Joining(self.rank, self.size, self.exchange, self.settings.backend, local, settings.init_timeout_s)
        group.joined = join_all(hellos[0].providers, self.registry, joining)
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
            *self._choices(),
        )  # fmt: skip

    def _choices(self) -> tuple[bytes, dict[str, bool]]:
        """Rank 0's, for all: a selection table, and libraries to join."""
        if self.rank:
            return b"", {}
        settings = self.settings
        table = read_table(Path(settings.table)) if self.table is None and settings.table else self.table
        named = set(table.names() if table else ()) & set(self.registry.names("providers"))
        forced = {(settings.algorithm or "").rpartition("/")[2]} & set(self.registry.names("providers"))
        must = forced | set((settings.providers or NATIVE).split(","))
        return table.to_json() if table else b"", {name: name in must for name in (named | must) - {NATIVE}}

    def _compare(self, hellos: Sequence[_Hello]) -> None:
        for field_name in ("version", "size"):
            values = {getattr(hello, field_name): rank for rank, hello in enumerate(hellos)}
            if len(values) > 1:
                both = ", ".join(f"{value} (rank {rank})" for value, rank in values.items())
                raise BootstrapError(f"ranks have different {field_name}s: {both}", rank=self.rank)

    def _allocator(self, backend: Backend, endpoints: Mapping[str, Endpoint]) -> Allocator:
        transports = (self.registry.require("transports", name) for name in endpoints)
        return Allocator(backend, [transport for transport in transports if isinstance(transport, MemoryTransport)])

    def _register(
        self,
        shape: Any,
        linker: Linker,
        allocator: Allocator,
        endpoints: dict[str, Endpoint],
        joints: _Joints,
        memory: list[Memory],
    ) -> _Keys:
        kind = allocator.kind(self.options.transport.get("segment_kind"))
        if kind.coherence != "kernel":
            raise ConfigError(f"scratch must be kernel-coherent; {kind.name!r} memory is not", rank=self.rank)
        nbytes = lib.cr_segment_bytes(shape)
        memory.append(allocator.allocate(nbytes, kind))
        if joints.near:
            memory.append(linker.device().allocate(nbytes))
        return _Keys({name: endpoints[name].register(memory[self._place(name)]) for name in sorted(joints.names)})

    def _place(self, name: str) -> int:
        """Which memory a transport joins: the host's is first, the device's second."""
        return 0 if HOST in self.registry.require("transports", name).backends else 1

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
        self, group: Group, linker: Linker, joints: _Joints, hellos: Sequence[_Hello],
        addresses: Sequence[Mapping[str, bytes]], keys: Sequence[_Keys], memory: Sequence[Memory],
    ) -> _Offers:  # fmt: skip
        capabilities = {"mapped", "direct"}
        self._attach_self(group)
        for peer, name in group.links.items():
            connection = group.endpoints[name].connect(peer, addresses[peer][name], keys[peer].keys[name])
            group.connections[peer] = connection
            if connection.mapped is None:
                capabilities.discard("mapped")
            if connection.direct is None:
                capabilities.discard("direct")
            self._attach(group, peer, connection)
        if any(hello.backend != HOST for hello in hellos):
            capabilities.discard("direct")
        if len(joints.near) not in (0, self.size - 1):
            capabilities.discard("mapped")  # what this rank writes once, not all of its peers would find in one place
        opened = {
            peer: group.endpoints[name].connect(peer, addresses[peer][name], keys[peer].keys[name])
            for peer, name in joints.near.items()
        }
        if self.settings.backend != HOST:
            group.device, group.near = self._side(group, linker.device(), opened, memory), joints.near
        return _Offers(tuple(sorted(capabilities)))

    def _join(self, group: Group, names: Sequence[str]) -> frozenset[str]:
        """What is added by those that join all ranks at once. By now each rank knows that all others got here."""
        added: set[str] = set()
        for name in names:
            endpoint = group.endpoints[name]
            try:
                added |= endpoint.group(range(self.size), self.exchange)
            except Unavailable as error:
                if name == group.settings.transport:
                    raise
                _log.info("transport %s is left out: %s", name, error)
                continue
            if group.device is not None and isinstance(endpoint, SwitchEndpoint):
                group.device.switch(endpoint.multicast)
        return frozenset(added)

    def _side(
        self, group: Group, device: DeviceBackend, opened: Mapping[int, Connection], memory: Sequence[Memory]
    ) -> DeviceSide:
        hosts = {peer: connection.mapped for peer, connection in group.connections.items()}
        hosts[self.rank] = group.segment.address
        near = {peer: connection.mapped for peer, connection in opened.items()}
        return DeviceSide(device, group.native, self.rank, memory[0].nbytes, hosts, near, memory[1:])

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
