"""A communicator's collectives as kernels on a device: its memory there, launches, and the watch over them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from commrt.arrays import Buffer, on_device
from commrt.dtypes import DTYPES, REDUCE_OPS
from commrt.errors import InvalidArgument, OperationTimeout, TransportError
from commrt.native import ffi, lib
from commrt.plan import COLLECTIVES
from commrt.provider import launch_order
from commrt.work import checked_timeout

if TYPE_CHECKING:
    from commrt.backend import DeviceBackend, Event, Kernel, Memory, Stream

_CHUNK = 64  # launches that room is made for at once
_LINE = 128
_WATCH_S, _DRAIN_S = 0.02, 5.0
_DESK_NBYTES = 1 << 14
_MOVES = ("uint8", "sum")  # the kernel of plans that reduce nothing
_REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})


class DeviceSide:
    """What a rank has on its device: memory that is laid out as its segment, and ways to that of its peers.

    hosts: where every rank's segment is mapped here. near: where the memory of peers' devices is, of those that can be
    reached so; this rank's own is then the only one of `memory`. Kernels reach all of it.
    """

    def __init__(
        self, backend: DeviceBackend, native: Any, rank: int, nbytes: int, hosts: Mapping[int, int | None],
        near: Mapping[int, int | None], memory: Sequence[Memory],
    ) -> None:  # fmt: skip
        self.backend, self.native = backend, native
        self.near = frozenset(near)
        self._memory, self._pinned = list(memory), list[int]()
        segments = {peer: self._pin(rank, peer, address, nbytes) for peer, address in hosts.items()}
        lane = self.share(lib.cr_device_bytes(native))
        lib.cr_device_open(native, ffi.cast("void*", lane.address), segments[rank], memory[0].address if near else 0)
        for peer, segment in segments.items():
            if peer != rank:
                lib.cr_device_join(native, peer, segment, near.get(peer) or 0)

    def share(self, nbytes: int) -> Memory:
        """Zeroed memory at one address for the host and for kernels, until `close`."""
        memory = self.backend.allocate(nbytes, "pinned")
        self._memory.append(memory)
        return memory

    def switch(self, multicast: int) -> None:
        """Where a switch reaches the same memory as this rank's, on all ranks at once; 0: nowhere."""
        lib.cr_device_switch(self.native, multicast)

    def close(self) -> None:
        """Give everything back, once nothing runs any more. Idempotent."""
        while self._pinned:
            self.backend.unpin(self._pinned.pop())
        while self._memory:
            self._memory.pop().close()

    def _pin(self, rank: int, peer: int, address: int | None, nbytes: int) -> int:
        if address is None:
            raise TransportError(
                f"rank {peer}'s host memory is not mapped here: kernels have no way to another host yet",
                rank=rank, peer=peer,
            )  # fmt: skip
        there = self.backend.pin(address, nbytes)
        self._pinned.append(address)
        return there


class _Room:
    """Memory for launches: each holds the arguments of a kernel, and the word that says that it has ended well."""

    def __init__(self, side: DeviceSide) -> None:
        self._side = side
        self._step = -(-int(lib.cr_device_launch_bytes()) // _LINE) * _LINE + _LINE
        self._free: list[int] = []

    def take(self) -> int:
        if not self._free:
            first = self._side.share(_CHUNK * self._step).address
            self._free = [first + number * self._step for number in range(_CHUNK)]
        return self._free.pop()

    def give(self, address: int) -> None:
        self._free.append(address)

    def done(self, address: int) -> Any:
        return ffi.cast("unsigned long long*", address + self._step - _LINE)


class DeviceWork:
    """A launch on a stream. Implements `commrt.work.Work`; `event` is None for one that was captured into a graph."""

    def __init__(self, lane: KernelLane, event: Event | None, ended_well: Callable[[], bool], keep: Any) -> None:
        self._lane, self._event, self._ended_well, self._keep = lane, event, ended_well, keep
        self._outcome: bool | None = None  # whether it ended well, once that is known

    def wait(self, timeout: float | None = None) -> bool:
        """See `Work`."""
        limit = checked_timeout(timeout)
        if self._event is None:
            raise InvalidArgument("a captured operation runs when its graph is launched: wait for that")
        if not self._event.wait(None if limit < 0 else limit):
            return False
        if not self.settle():
            raise self._lane.why()
        return True

    def done(self) -> bool:
        """See `Work`."""
        return self._event is not None and self._event.done()

    def ended(self, timeout_s: float) -> bool:
        """Whether it has ended, well or not, within that time."""
        return self._event is None or self._event.wait(timeout_s)

    def settle(self) -> bool:
        """Whether it ended well. To be called once it is done; holds nothing from then on."""
        with self._lane.lock:
            if self._outcome is None:
                self._outcome, self._keep = self._ended_well(), None
            return self._outcome

    def wait_stream(self, stream: Stream) -> None:
        """See `Work`."""
        if self._event is not None:
            stream.wait_event(self._event)


class KernelLane:
    """Issues one communicator's collectives as kernels, in the order of calls. Callable from any thread.

    install(call): makes the routes that a call lacks. failure(): what broke the communicator.
    """

    def __init__(
        self, side: DeviceSide, rank: int, timeout: float, install: Callable[[Any], None],
        failure: Callable[[], Exception],
    ) -> None:  # fmt: skip
        self.failure = failure
        self._side, self._rank, self._timeout, self._install = side, rank, timeout, install
        self._stream = side.backend.stream()
        self.lock = threading.RLock()
        self._room = _Room(side)
        self._exchanging = threading.Lock()
        self._desks: dict[int, Memory] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._flying: list[tuple[int, DeviceWork]] = []
        self._last: tuple[Stream, Event] | None = None
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="commrt-device-watch", daemon=True)
        self._watcher.start()

    def start(self, call: Any, keep: Any, stream: Stream | None = None) -> DeviceWork:
        """Launch on a stream, the communicator's own if None. `keep`: what the operation uses."""
        stream = stream or self._stream
        kernel = self._kernel(call)
        with self.lock:
            self._sweep()
            room = self._room.take()
            blocks = self._prepare(call, room)
            limit = self._side.backend.resident_blocks(kernel)
            if blocks > limit:
                raise InvalidArgument(f"{blocks} blocks can't all be on the device, which has room for {limit}")
            captured = stream.capturing
            if self._last is not None and self._last[0] is not stream and not captured:
                stream.wait_event(self._last[1])
            with launch_order(self._side.backend.name).launch():
                kernel.launch(blocks, [ctypes.c_uint64(room)], stream)
            return self._launched(room, keep, stream, None if captured else stream.record())

    def run(self, call: Any, keep: Any, seconds: float) -> None:
        """The same, and wait for its end. The communicator's own deadline is the watch's, which knows whom to name."""
        own = seconds != checked_timeout(self._timeout)
        if not self.start(call, keep).wait(seconds if own and seconds >= 0 else None):
            lib.cr_comm_abort(self._side.native)
            raise OperationTimeout(f"a kernel did not end within {seconds:g} s", rank=self._rank)

    def why(self) -> Exception:
        """Why a kernel has not ended well, once that is known."""
        while lib.cr_device_watch(self._side.native) in (lib.CR_OK, lib.CR_PENDING):
            self._closing.wait(_WATCH_S)
        return self.failure()

    def exchange(self, all_gather: Callable[[Any, Any], None], value: Any, everyone: Any) -> None:
        """all_gather of bytes in numpy arrays, by way of the device."""
        with self._exchanging:
            inner, outer = (self._desk(number, array.nbytes) for number, array in enumerate((value, everyone)))
            ctypes.memmove(inner.address, value.ctypes.data, value.nbytes)
            all_gather(inner, outer)
            ctypes.memmove(everyone.ctypes.data, outer.address, everyone.nbytes)

    def _desk(self, number: int, nbytes: int) -> Buffer:
        """Memory for an exchange, kept for the next: to allocate may wait for kernels, which may wait for peers."""
        if number not in self._desks or self._desks[number].nbytes < nbytes:
            self._desks[number] = self._side.share(max(_DESK_NBYTES, 2 * nbytes))
        return on_device(self._side.backend, self._desks[number], nbytes)

    def close(self, timeout_s: float) -> None:
        """Wait for what is in flight, end it if that takes too long, and stop watching."""
        for _, work in self._flying:
            if not work.ended(timeout_s):
                lib.cr_comm_abort(self._side.native)
                work.ended(_DRAIN_S)
        self._closing.set()
        self._watcher.join()

    def _prepare(self, call: Any, room: int) -> int:
        blocks = ffi.new("unsigned*")
        arguments = (self._side.native, call, ffi.cast("void*", room), self._room.done(room), blocks)
        code = lib.cr_device_prepare(*arguments)
        if code == lib.CR_NEED_PLAN:
            self._install(call)
            code = lib.cr_device_prepare(*arguments)
        if code:
            self._room.give(room)
            raise self.failure()
        return int(blocks[0])

    def _launched(self, room: int, keep: Any, stream: Stream, event: Event | None) -> DeviceWork:
        done = self._room.done(room)
        work = DeviceWork(self, event, lambda: bool(done[0]), keep)
        if event is not None:
            self._last = (stream, event)
            self._flying.append((room, work))
        return work  # what was captured keeps its room: the graph may be launched as long as the communicator lives

    def _sweep(self) -> None:
        """Make room of launches that have ended."""
        if len(self._flying) < _CHUNK // 2:
            return
        ended = [(room, work) for room, work in self._flying if work.done()]
        self._flying = [(room, work) for room, work in self._flying if not work.done()]
        for room, work in ended:
            work.settle()
            self._room.give(room)

    def _kernel(self, call: Any) -> Kernel:
        reduces = COLLECTIVES[call.collective] in _REDUCING
        names = (DTYPES[call.dtype].name, REDUCE_OPS[call.reduction].name) if reduces else _MOVES
        with self.lock:
            if names not in self._kernels:
                source = '#include "run_plan.h"\nCR_RUN_PLAN({}, {})\n'.format(*names)
                self._kernels[names] = self._side.backend.build(source, "run_plan_{}_{}".format(*names))
            return self._kernels[names]

    def _watch(self) -> None:
        """While kernels wait, someone must look at clock and peers: what is found ends them."""
        while not self._closing.wait(_WATCH_S):
            lib.cr_device_watch(self._side.native)
