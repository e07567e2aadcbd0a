"""From a checked call to a launch: a short way for numpy arrays, a long way for all else, streams, and failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from commrt.arrays import as_buffer
from commrt.carrying import Carriage
from commrt.collectives import Call, check_device, check_rank, shapes
from commrt.dtypes import DTYPES, by_code, op_by_code
from commrt.errors import CommrtError, CommunicatorBroken, CommunicatorClosed, InvalidArgument, ProviderError
from commrt.failures import Circumstances, Place, Standing, to_error
from commrt.group import Group, Setup
from commrt.kernel_lane import KernelLane
from commrt.native import COLLECTIVE_CODES, ffi, lib, short_way
from commrt.plan import COLLECTIVES, MAX_BLOCKS, Plan
from commrt.provider import Task
from commrt.routing import Router
from commrt.work import NativeWork, StreamWork, Work, checked_timeout

if TYPE_CHECKING:
    from commrt._native._calls import ShortWay
    from commrt.backend import Event, Stream

_SLICE_S = 0.1  # how long a signal to this process may wait
_LEAST_HELD = 8
_PENDING = lib.CR_PENDING
_SEND = COLLECTIVE_CODES["send"]


class _Pair(NamedTuple):
    lane: Any
    short: ShortWay


class Issuer:
    """Issues one communicator's operations in the order of calls. Callable from any thread.

    covers(address): whether it lies in the communicator's symmetric memory. `refusal`, once set, makes the error that
    every later call raises.
    """

    def __init__(self, setup: Setup, group: Group, router: Router, covers: Callable[[int], bool]) -> None:
        self.refusal: Callable[[], CommrtError] | None = None
        self.timeout = group.settings.timeout_s
        self.lane = lib.cr_comm_collectives(group.native)
        self._setup, self._group, self._router, self._covers = setup, group, router, covers
        self._carriage = Carriage(group.joined)
        self._lock = threading.RLock()
        self._left = False
        self._device = group.settings.backend if group.device is None else group.device.backend.name
        self._kernels: KernelLane | None = None
        if group.device is not None:
            self._kernels = KernelLane(group.device, group.rank, self.timeout, router.install, self._broke)
        self._arrays: type | None = None  # numpy's array class, while the short way is open
        self.short = short_way(self.lane, self._after_short)
        self._pairs: dict[tuple[int, bool], _Pair] = {}  # by peer and direction
        self._last: tuple[Stream | None, Event | None] = (None, None)
        self._held: list[NativeWork] = []
        self._most_held = _LEAST_HELD  # sweep then: a constant share of the work, however much is in flight
        lib.cr_comm_patience(group.native, self.timeout, _SLICE_S)

    # --- the short way: a blocking call on numpy arrays, in one native call ---

    def short_pair(self, peer: int, send: bool, x: Any) -> bool:
        """A blocking send or receive. False: nothing was done, take the long way."""
        pair = self._pairs.get((peer, send))
        return pair is not None and pair.short(_SEND, "sum", 0, x, x)

    def _after_short(self, answer: int, x: Any, out: Any) -> bool:
        if answer != _PENDING:
            self.settle(answer)
        return self._hold(NativeWork(lib.cr_pending(), self.settle, (x, out))).wait()

    def _open_short_way(self) -> None:
        """Tell the engine numpy's types, once the program has imported numpy itself."""
        numpy = sys.modules.get("numpy")
        closed = self._kernels is not None or self._last[1] is not None
        if numpy is None or sys.implementation.name != "cpython" or closed:
            return
        for dtype in DTYPES:
            if not dtype.extended or "ml_dtypes" in sys.modules:
                lib.cr_engine_numpy_type(self._setup.engine, id(dtype.to_numpy()), dtype.code)
        self._show_arrays(numpy.ndarray)

    def _show_arrays(self, arrays: type | None) -> None:
        with self._lock:
            self._arrays = arrays
            for way in (self.short, *(pair.short for pair in self._pairs.values())):
                way.arrays = arrays

    def refuse(self, error: Callable[[], CommrtError]) -> None:
        """From now on every call raises; the first reason stays."""
        self._show_arrays(None)
        self.refusal = self.refusal or error

    # --- the long way ---

    def call(
        self, collective: str, x: Any, out: Any, op: str, root: int, algorithm: str | None, precise: bool,
        plan: Plan | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """A checked native call, and what must stay alive until it has ended."""
        self.check_usable()
        if algorithm is not None and not isinstance(algorithm, str):
            raise InvalidArgument(f"an algorithm is called by its name, not {algorithm!r}", rank=self._group.rank)
        if self._arrays is None:
            self._open_short_way()
        call: Call = shapes(self._group.rank, self._group.size, collective, x, out, op, root, self._device)
        native = ffi.new("cr_call*")
        native.collective = COLLECTIVE_CODES[collective]
        native.dtype, native.reduction, native.root = call.dtype, call.reduction, root
        native.input, native.output = ffi.cast("void*", call.input), ffi.cast("void*", call.output)
        native.count = call.count
        if plan is not None:
            native.program = self._router.custom(plan, self._is_symmetric(collective, call))
        elif algorithm is not None or precise or self._group.joined:
            symmetric = self._is_symmetric(collective, call)
            native.program = self._router.chosen(collective, call, root, algorithm, precise, symmetric)
        return native, (x, out, call)

    def pair_call(self, x: Any, peer: int, send: bool, algorithm: str | None) -> tuple[Any, Any, Any]:
        """The same for a send or receive, and its lane."""
        self.check_usable()
        self.check_rank(peer, "peer")
        buffer = as_buffer(x, writable=not send)
        check_device("x", buffer, self._device, self._group.rank)
        if self._kernels is not None:
            raise InvalidArgument("send and receive know arrays in host memory alone yet", rank=self._group.rank)
        if self._arrays is None:
            self._open_short_way()
        lane = (self._pairs.get((peer, send)) or self._open_pair(peer, send)).lane
        native = ffi.new("cr_call*")
        native.collective, native.dtype, native.count = _SEND, buffer.dtype.code, buffer.count
        address = ffi.cast("void*", buffer.address)
        native.input, native.output = (address, ffi.NULL) if send else (ffi.NULL, address)
        if algorithm is not None:
            symmetric = not buffer.nbytes or self._symmetric(buffer.address)
            native.program = self._router.forced_pair(lane, buffer.nbytes, send, algorithm, symmetric)
        return lane, native, (x, buffer)

    def finish(self, lane: Any, call: Any, keep: Any, seconds: float) -> None:
        """Run to the end. `keep` holds the arrays."""
        if self._kernels is not None:
            return self._kernels.run(call, keep, seconds)
        self._await_stream(None)
        self._run(lane, call, keep, seconds)

    def start(self, lane: Any, call: Any, keep: Any, seconds: float) -> Work:
        """Start, and return at once."""
        if self._kernels is not None:
            return self._kernels.start(call, keep)
        self._await_stream(None)
        return self._begin(lane, call, keep, seconds)

    def on_stream(self, stream: Stream, call: Any, keep: Any, seconds: float) -> Work:
        """Run when the stream comes to it."""
        if self._kernels is not None:
            return self._kernels.start(call, keep, stream)
        return self.queue(stream, lambda: self._run(self.lane, call, keep, seconds))

    def queue(self, stream: Stream, work: Callable[[], None]) -> StreamWork:
        """Do any work when the stream comes to it, in the order of calls."""
        if not hasattr(stream, "submit"):
            raise InvalidArgument(f"a stream is made by a backend, not {stream!r}", rank=self._group.rank)
        outcome: list[BaseException] = []

        def job() -> None:
            try:
                work()
            except BaseException as error:
                outcome.append(error)
                raise

        with self._lock:
            self._await_stream(stream)
            event = stream.submit(job)
            self._last = (stream, event)
            self._show_arrays(None)
        return StreamWork(event, outcome)

    def now(self, work: Callable[[], None]) -> None:
        """Do any work here, in the order of calls."""
        self._await_stream(None)
        work()

    def seconds(self, timeout: float | None) -> float:
        """A call's deadline."""
        return self.timeout if timeout is None else checked_timeout(timeout)

    def check_rank(self, rank: int, what: str) -> None:
        """Raise InvalidArgument for a rank that isn't there."""
        check_rank(rank, what, self._group.rank, self._group.size)

    def check_usable(self) -> None:
        """Raise what later calls raise, if there is anything."""
        if self.refusal is not None:
            raise self.refusal()

    def settle(self, code: int) -> NoReturn:
        """Raise for a native code; the communicator is broken from here on."""
        if code == lib.CR_INVALID:
            raise InvalidArgument("the native core refused the call", rank=self._group.rank)
        if code == lib.CR_NO_MEMORY:
            raise MemoryError("no memory for the operation")
        raise self._broke()

    def broken_by(self, error: CommrtError) -> None:
        """From now on every call raises, naming this cause."""
        cause, rank = str(error), self._group.rank
        self.refuse(lambda: CommunicatorBroken(f"the communicator is broken: {cause}", rank=rank))

    def failure(self) -> CommrtError:
        """What broke the communicator."""
        record = ffi.new("cr_failure*")
        lib.cr_comm_failure(self._group.native, record)
        if not record.code:
            return CommunicatorClosed("the communicator was closed during the operation", rank=self._group.rank)
        around = Circumstances(
            self._group.rank, self._router.names(), self._standing(), self._stuck(), self._group.troubles(),
            self._carriage.failure,
        )  # fmt: skip
        error = to_error(record, around)
        if isinstance(error, ProviderError):
            error.__cause__ = self._carriage.failure
        return error

    def exchange(self, all_gather: Callable[[Any, Any], None], value: Any, everyone: Any) -> None:
        """all_gather of bytes in numpy arrays, wherever the communicator's arrays are."""
        if self._kernels is None:
            all_gather(value, everyone)
        else:
            self._kernels.exchange(all_gather, value, everyone)

    def end(self, timeout_s: float) -> None:
        """Let what was launched on a device end, or end it."""
        if self._kernels is not None:
            self._kernels.close(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """The communicator is closed: its other libraries are left, its group's record of a deadlock may go."""
        self._left = True
        self._carriage.close(timeout_s)

    def disown(self) -> None:
        """In a forked child: what belongs to the parent is not touched any more."""
        self._carriage.disown()

    def _broke(self) -> CommrtError:
        """What broke the communicator; later calls will say so."""
        error = self.failure()
        self.broken_by(error)
        return error

    def _run(self, lane: Any, call: Any, keep: Any, seconds: float) -> None:
        self.check_usable()
        if self._router.provider(call) is not None:
            self._begin(lane, call, keep, seconds).wait()
            return
        pending = ffi.new("cr_launch**")
        code = lib.cr_run(lane, call, seconds, _SLICE_S, pending)
        if code == lib.CR_NEED_PLAN:
            self._router.install(call, lane)
            code = lib.cr_run(lane, call, seconds, _SLICE_S, pending)
        if code == _PENDING:
            self._hold(NativeWork(pending[0], self.settle, keep)).wait()
        elif code:
            self.settle(code)

    def _begin(self, lane: Any, call: Any, keep: Any, seconds: float) -> NativeWork:
        lib.cr_engine_progress_thread(self._setup.engine)
        provider = self._router.provider(call)
        if provider is None:
            handle = self._launch(lane, call, seconds)
        else:
            handle = self._carriage.start(provider, _task(call), keep, lambda: self._launch(lane, call, seconds))
        return self._hold(NativeWork(handle, self.settle, keep))

    def _launch(self, lane: Any, call: Any, seconds: float) -> Any:
        handle = ffi.new("cr_launch**")
        code = lib.cr_start(lane, call, seconds, handle)
        if code == lib.CR_NEED_PLAN:
            self._router.install(call, lane)
            code = lib.cr_start(lane, call, seconds, handle)
        if code:
            self.settle(code)
        return handle[0]

    def _await_stream(self, stream: Stream | None) -> None:
        """The order of calls is the order of operations, whatever stream they are on."""
        last, event = self._last
        if event is None or last is stream:
            return
        if stream is not None:
            stream.wait_event(event)
        else:
            event.wait()
            self._last = (None, None)

    def _hold(self, work: NativeWork) -> NativeWork:
        """Keep the arrays of work whose handle the caller may drop, until it is done."""
        with self._lock:
            if len(self._held) >= self._most_held:
                self._held = [held for held in self._held if not held.done()]
                self._most_held = max(_LEAST_HELD, 2 * len(self._held))
            self._held.append(work)
        return work

    def _open_pair(self, peer: int, send: bool) -> _Pair:
        with self._lock:
            lane = lib.cr_comm_pair(self._group.native, peer, send)
            if lane == ffi.NULL:
                raise MemoryError(f"no memory for the lane to rank {peer}")
            short = short_way(lane, self._after_short)
            short.arrays = self._arrays
            return self._pairs.setdefault((peer, send), _Pair(lane, short))

    def _is_symmetric(self, collective: str, call: Call) -> bool:
        """As the native core decides; empty arrays may be taken for either."""
        output = 0 if collective in ("gather", "reduce") else call.output
        return not call.nbytes or self._symmetric(call.input, output)

    def _symmetric(self, *addresses: int) -> bool:
        return all(self._covers(address) for address in addresses if address)

    def _standing(self) -> dict[int, Standing]:
        """How the ranks of the failed operation stood, by rank."""
        found = ffi.new("cr_standing[]", self._group.size)
        lib.cr_comm_standing(self._group.native, found)
        return {
            rank: Standing(place.sequence, place.completed, place.state, bool(place.dead), place.silent_s)
            for rank, place in enumerate(found)
            if place.member
        }

    def _stuck(self) -> list[Place]:
        """The blocks that could not move when no rank could; empty if that did not happen."""
        if self._left or self._setup.native_group == ffi.NULL:
            return []
        most = self._group.size * MAX_BLOCKS
        places = ffi.new("cr_place[]", most)
        found = lib.cr_group_stuck(self._setup.native_group, places, most)
        return [
            Place(one.rank, one.block, one.operation, one.op_code, one.channel, one.waits_for)
            for one in places[0:found]
        ]


def _task(call: Any) -> Task:
    return Task(
        COLLECTIVES[call.collective], by_code(call.dtype), op_by_code(call.reduction), int(call.root), int(call.count),
        int(ffi.cast("uintptr_t", call.input)), int(ffi.cast("uintptr_t", call.output)),
    )  # fmt: skip


class Prepared:
    """A persistent operation. `start` may be called again once the Work of the last start is done."""

    def __init__(self, issuer: Issuer, collective: str, call: Any, keep: Any, seconds: float) -> None:
        self._issuer, self._call, self._keep, self._seconds = issuer, call, keep, seconds
        self.collective = collective

    def start(self) -> Work:
        """Start it, as the communicator's next operation."""
        self._issuer.check_usable()
        return self._issuer.start(self._issuer.lane, self._call, self._keep, self._seconds)

    def run(self) -> None:
        """Start it and wait for its end: one call into native code."""
        self._issuer.finish(self._issuer.lane, self._call, self._keep, self._seconds)
