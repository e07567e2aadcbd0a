"""Channels for users' kernels, and the launching of kernels. The device's side is `algorithms/device/channel.h`.

`Communicator.channels` joins one symmetric array of each rank; its result is an argument of `Communicator.launch`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from commrt import errors
from commrt.arrays import as_buffer
from commrt.dtypes import as_dtype
from commrt.errors import CommrtError, CommunicatorClosed, InvalidArgument, OperationError
from commrt.native import ffi, lib

if TYPE_CHECKING:
    from commrt.backend import Kernel, Stream
    from commrt.group import Group
    from commrt.issuing import Issuer
    from commrt.symmetric import SymmetricMemory
    from commrt.work import StreamWork

MAX_BLOCKS = 1024
MAX_PACKET_NBYTES = 1 << 30
_LINE = 128
_LAP = 0xFFFFFFFE
_ENDINGS: dict[int, tuple[type[OperationError], str]] = {
    lib.CR_PEER_LOST: (errors.PeerLost, "rank {peer} is gone, and a kernel waits for it"),
    lib.CR_TIMEOUT: (errors.OperationTimeout, "a kernel waited {seconds:g} s for rank {peer}"),
    lib.CR_ABORTED: (errors.Aborted, "a kernel that waited for rank {peer} was aborted, here or there"),
    lib.CR_TRANSPORT: (errors.TransportError, "the link to rank {peer} failed a kernel"),
    lib.CR_BOUNDS: (OperationError, "a kernel left the array on its channel to rank {peer}"),
}


class _Watch(ctypes.Structure):
    _fields_ = [
        ("abort", ctypes.c_uint64), ("timeout_ns", ctypes.c_uint64), ("failed", ctypes.c_uint64),
        ("communicator", ctypes.c_uint64), ("tend", ctypes.c_uint64),
    ]  # fmt: skip


class _Channel(ctypes.Structure):
    _fields_ = [
        ("watch", ctypes.c_uint64), ("peer", ctypes.c_uint64), ("local", ctypes.c_uint64), ("remote", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64), ("signal_out", ctypes.c_uint64), ("signal_in", ctypes.c_uint64),
        ("sent", ctypes.c_uint64), ("received", ctypes.c_uint64),
    ]  # fmt: skip


class _MemoryChannel(_Channel):
    _fields_ = [
        ("packets_out", ctypes.c_uint64), ("packets_in", ctypes.c_uint64), ("packet_half", ctypes.c_uint64),
        ("lap", ctypes.c_uint64), ("packets_sent", ctypes.c_uint64), ("packets_received", ctypes.c_uint64),
    ]  # fmt: skip


class _PortChannel(_Channel):
    _fields_ = [("port", ctypes.c_uint64)]


class _Handle(ctypes.Structure):
    _fields_ = [
        ("rank", ctypes.c_uint64), ("ranks", ctypes.c_uint64), ("blocks", ctypes.c_uint64), ("array", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64), ("mapped", ctypes.c_uint64), ("ports", ctypes.c_uint64),
    ]  # fmt: skip


class _Offer(msgspec.Struct, frozen=True):
    """What a rank brings: its array as (segment, offset), and what must be alike on all."""

    number: int = 0
    offset: int = 0
    alike: tuple[int, ...] = ()
    error: str = ""


class Channels:
    """To each peer a memory channel and a port channel for each of `blocks` blocks. Holds the array.

    `packet_nbytes`: the most that one `put_packets` carries. An argument of `Communicator.launch`, of one launch at a
    time; in the kernel it is a `commrt::Channels*`. `handle`: the address of that.
    """

    def __init__(self, blocks: int, packet_nbytes: int, array: Any) -> None:
        self.blocks, self.packet_nbytes, self.array = blocks, packet_nbytes, array
        self.watch, self.tables = _Watch(), (_MemoryChannel * 0)()
        self.native = _Handle()
        self.keep: list[Any] = []

    @property
    def handle(self) -> int:
        """The address of the native handle."""
        return ctypes.addressof(self.native)

    def error(self, rank: int) -> OperationError | None:
        """What ended a wait of a kernel, if anything did."""
        code, peer = self.watch.failed & 0xFFFFFFFF, self.watch.failed >> 32
        if not code:
            return None
        kind, text = _ENDINGS.get(code, (OperationError, "a kernel failed on its channel to rank {peer}"))
        message = text.format(peer=peer, seconds=self.watch.timeout_ns / 1e9)
        return kind(message, rank=rank, peer=peer, operation="kernel")


class Layout:
    """Where a channel's words lie in the memory that a rank sets aside: a line for each signal, then packets."""

    def __init__(self, ranks: int, blocks: int, packet_nbytes: int) -> None:
        self._blocks, self._channels = blocks, ranks * blocks
        self.packet_half = -(-2 * (packet_nbytes + 8) // _LINE) * _LINE if packet_nbytes else 0
        self.total = self._channels * (2 * _LINE + 2 * self.packet_half)

    def signal(self, writer: int, block: int, port: bool) -> int:
        """The line that rank `writer` signals with."""
        return (2 * (writer * self._blocks + block) + port) * _LINE

    def packets(self, writer: int, block: int) -> int:
        """The packets that rank `writer` sends."""
        return 2 * _LINE * self._channels + 2 * self.packet_half * (writer * self._blocks + block)


class ChannelMaker:
    """Makes one communicator's channels. Collective, step by step."""

    def __init__(self, group: Group, symmetric: SymmetricMemory, exchange: Callable[[bytes], list[bytes]]) -> None:
        self._group, self._symmetric, self._exchange = group, symmetric, exchange

    def make(self, array: Any, blocks: int, packet_nbytes: int, timeout_s: float, lap: int = _LAP) -> Channels:
        """See `Communicator.channels`. `lap`: where packet flags wrap; even."""
        arrays = self._offers(lambda: self._locate(array, blocks, packet_nbytes, timeout_s))
        layout = Layout(self._group.size, blocks, packet_nbytes)
        words = self._symmetric.empty(layout.total, as_dtype("uint8"))
        words[:] = 0
        places = self._offers(lambda: self._locate(words, blocks, packet_nbytes, timeout_s))  # all are zeroed
        channels = Channels(blocks, packet_nbytes, array)
        channels.keep += [words, lib, self._group]
        self._watch(channels.watch, timeout_s)
        _Table(self._group, self._symmetric, channels, layout, arrays, places, lap).fill()
        return channels

    def _offers(self, mine: Callable[[], _Offer]) -> list[_Offer]:
        try:
            offer = mine()
        except CommrtError as error:
            offer = _Offer(error=str(error))
        offers = [msgspec.msgpack.decode(reply, type=_Offer) for reply in self._exchange(msgspec.msgpack.encode(offer))]
        failed = "; ".join(f"rank {rank}: {one.error}" for rank, one in enumerate(offers) if one.error)
        if failed:
            raise InvalidArgument(f"no channels: {failed}", rank=self._group.rank)
        if len({one.alike for one in offers}) > 1:
            calls = ", ".join(f"{one.alike} (rank {rank})" for rank, one in enumerate(offers))
            raise InvalidArgument(f"ranks differ in (bytes, blocks, packet bytes): {calls}", rank=self._group.rank)
        return offers

    def _locate(self, array: Any, blocks: int, packet_nbytes: int, timeout_s: float) -> _Offer:
        if not 1 <= blocks <= MAX_BLOCKS or not 0 <= packet_nbytes <= MAX_PACKET_NBYTES:
            raise InvalidArgument(f"channels have 1..{MAX_BLOCKS} blocks and 0..{MAX_PACKET_NBYTES} bytes of packets")
        if not 0 < timeout_s < math.inf:
            raise InvalidArgument(f"a kernel's wait has a deadline of some seconds, not {timeout_s}")
        buffer = as_buffer(array, writable=True)
        segment = self._symmetric.lookup(buffer.address, buffer.nbytes)
        if segment is None:
            raise InvalidArgument("channels join symmetric memory, from comm.empty; this array is not of it")
        offset = buffer.address - segment.memory.address
        return _Offer(segment.number, offset, (buffer.nbytes, blocks, packet_nbytes))

    def _watch(self, watch: _Watch, timeout_s: float) -> None:
        watch.abort = int(ffi.cast("uintptr_t", lib.cr_comm_abort_word(self._group.native)))
        watch.timeout_ns = int(timeout_s * 1e9)
        watch.communicator = int(ffi.cast("uintptr_t", self._group.native))
        watch.tend = int(ffi.cast("uintptr_t", ffi.addressof(lib, "cr_comm_tend")))


class _Table:
    """Fills in the native handle."""

    def __init__(
        self, group: Group, symmetric: SymmetricMemory, channels: Channels, layout: Layout, arrays: Sequence[_Offer],
        places: Sequence[_Offer], lap: int,
    ) -> None:  # fmt: skip
        self._group, self._symmetric, self._channels, self._layout = group, symmetric, channels, layout
        self._arrays, self._places, self._lap = arrays, places, lap
        self._mapped = ffi.new("cr_port*")
        lib.cr_port_mapped(self._mapped)

    def fill(self) -> None:
        """Every channel to every peer."""
        group, channels = self._group, self._channels
        count = group.size * channels.blocks
        memory, ports = (_MemoryChannel * count)(), (_PortChannel * count)()
        for peer in range(group.size):
            for block in range(channels.blocks):
                index = peer * channels.blocks + block
                self._fill_memory(memory[index], peer, block)
                self._fill_port(ports[index], peer, block)
        own = self._arrays[group.rank]
        native = channels.native
        native.rank, native.ranks, native.blocks = group.rank, group.size, channels.blocks
        native.array, native.nbytes = self._here(own, 0), own.alike[0]
        native.mapped, native.ports = ctypes.addressof(memory), ctypes.addressof(ports)
        channels.keep += [memory, ports, self._mapped]

    def _fill(self, channel: _Channel, peer: int, block: int, port: bool) -> bool:
        """What both kinds have. Whether the peer can be reached so."""
        own, there = self._arrays[self._group.rank], self._arrays[peer]
        line = self._layout.signal
        channel.watch, channel.peer = ctypes.addressof(self._channels.watch), peer
        channel.local = channel.remote = self._here(own, 0)
        channel.signal_in = self._here(self._places[self._group.rank], line(peer, block, port))
        remote = self._there(there, peer, 0, port)
        signal = self._there(self._places[peer], peer, line(self._group.rank, block, port), port)
        if remote is None or signal is None:
            scrap = ctypes.c_uint64()  # nothing may be done on this channel, and nothing is harmed by doing it
            self._channels.keep.append(scrap)
            channel.signal_out = ctypes.addressof(scrap)
            return False
        channel.nbytes, channel.remote, channel.signal_out = own.alike[0], remote, signal
        return True

    def _fill_memory(self, channel: _MemoryChannel, peer: int, block: int) -> None:
        channel.lap = self._lap
        if not self._fill(channel, peer, block, False) or not self._layout.packet_half:
            return
        out = self._there(self._places[peer], peer, self._layout.packets(self._group.rank, block), False)
        channel.packets_out, channel.packet_half = out, self._layout.packet_half
        channel.packets_in = self._here(self._places[self._group.rank], self._layout.packets(peer, block))

    def _fill_port(self, channel: _PortChannel, peer: int, block: int) -> None:
        self._fill(channel, peer, block, True)
        port = self._mapped if self._is_mapped(peer) else self._group.ports[peer]
        channel.port = int(ffi.cast("uintptr_t", port))

    def _is_mapped(self, peer: int) -> bool:
        return peer == self._group.rank or self._group.connections[peer].mapped is not None

    def _here(self, place: _Offer, offset: int) -> int:
        return self._symmetric.segment(place.number).memory.address + place.offset + offset

    def _there(self, place: _Offer, peer: int, offset: int, port: bool) -> int | None:
        """An address for what is mapped; else the port's offset, or None where a mapping is wanted."""
        segment = self._symmetric.segment(place.number)
        if peer in segment.mapped:
            return segment.mapped[peer] + place.offset + offset
        return segment.located[peer] + place.offset + offset if port else None


class KernelLauncher:
    """Launches kernels in the order of calls, and knows which are running. Callable from any thread."""

    def __init__(self, group: Group, issuer: Issuer) -> None:
        self._group, self._issuer = group, issuer
        self._running = 0
        self._open = True
        self._changed = threading.Condition()

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[Any], stream: Stream | None) -> StreamWork | None:
        """See `Communicator.launch`."""
        self._issuer.check_usable()
        channels = [argument for argument in arguments if isinstance(argument, Channels)]
        for one in channels:
            if blocks > one.blocks:
                raise InvalidArgument(f"{blocks} blocks on channels for {one.blocks}", rank=self._group.rank)
        native = [as_argument(argument) for argument in arguments]
        work = lambda: self._run(kernel, blocks, native, channels, arguments)  # noqa: E731
        if stream is not None:
            return self._issuer.queue(stream, work)
        self._issuer.now(work)
        return None

    def close(self, timeout_s: float) -> None:
        """No new ones; those that run are aborted after `timeout_s`, and waited for."""
        with self._changed:
            self._open = False
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                lib.cr_comm_abort(self._group.native)
                self._changed.wait_for(lambda: not self._running)

    def _run(
        self, kernel: Kernel, blocks: int, native: Sequence[Any], channels: Sequence[Channels], keep: Sequence[Any]
    ) -> None:
        with self._counted():
            kernel.launch(blocks, native)
            failures = [error for one in channels if (error := one.error(self._group.rank)) is not None]
            if failures:
                self._issuer.broken_by(failures[0])
                lib.cr_comm_abort(self._group.native)  # peers must not wait for this rank in vain
                raise failures[0]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            if not self._open:
                raise CommunicatorClosed("the communicator is closed", rank=self._group.rank)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


def as_argument(value: Any) -> Any:
    """A kernel's argument: channels and arrays as addresses, whole numbers as u64 (or i64), others as double."""
    if isinstance(value, Channels):
        return ctypes.c_void_p(value.handle)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgument(f"a kernel's argument has 64 bits; {value} needs more")
        return ctypes.c_int64(value) if value < 0 else ctypes.c_uint64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_void_p(as_buffer(value, writable=False).address)
