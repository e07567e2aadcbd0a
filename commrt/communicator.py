"""Communicators: ordered groups of ranks and the operations between them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from commrt.arrays import as_buffer
from commrt.collectives import Call, Shape, empty_like, shapes
from commrt.dtypes import DTYPES, REDUCE_OPS, as_dtype
from commrt.errors import CommrtError, CommunicatorBroken, CommunicatorClosed, InvalidArgument
from commrt.group import Group, Options, Setup, process_engine
from commrt.native import COLLECTIVE_CODES, ffi, lib, to_error
from commrt.plugins import Registry, default_registry
from commrt.routing import Router
from commrt.selection import Explanation
from commrt.settings import Settings
from commrt.symmetric import SymmetricMemory
from commrt.work import NativeWork, StreamWork, Work, WorkGroup, checked_timeout

if TYPE_CHECKING:
    from commrt.backend import Event, Stream


@dataclass(frozen=True)
class Send:
    """One send of a batch: `array` to rank `peer`."""

    array: Any
    peer: int


@dataclass(frozen=True)
class Recv:
    """One receive of a batch: into `array` from rank `peer`."""

    array: Any
    peer: int


def init(
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | None = None,
    secret: bytes | None = None,
    *,
    store: Any = None,
    timeout: float | None = None,
    init_timeout: float | None = None,
    transport: str | None = None,
    algorithm: str | None = None,
    insecure: bool = False,
    options: Options | None = None,
    registry: Registry | None = None,
) -> Communicator:
    """The communicator of all ranks. Collective: returns once every rank has arrived and is joined to all others.

    Who this rank is comes from the arguments, or from `commrt run`, torchrun, Open MPI, MPICH or Slurm; without any of
    them it is the only one. `store`: a handed-in store with torch's methods, instead of meeting at `rendezvous`.
    `timeout`: seconds that an operation may take. `transport`, `algorithm`: force one. Rank 0's settings hold for all.

    Raises ConfigError, BootstrapTimeout naming the ranks that never came, BootstrapError on all ranks if any failed.
    """
    from commrt import bootstrap, logs

    info = bootstrap.detect(rank=rank, size=size, rendezvous=rendezvous)
    settings = Settings.from_environment(
        os.environ, timeout_s=timeout, init_timeout_s=init_timeout, transport=transport, algorithm=algorithm
    )
    logs.configure(settings, info.rank)
    settings.log()
    if store is not None:
        meeting = bootstrap.adapt(store, info.rank, info.size, timeout_s=settings.init_timeout_s)
    else:
        meeting = bootstrap.join(info, secret=secret, timeout_s=settings.init_timeout_s, insecure=insecure)
    try:
        rounds = iter(range(1 << 30))
        exchange = lambda value: meeting.exchange(f"setup{next(rounds)}", value)  # noqa: E731
        setup = Setup(
            info.rank, info.size, exchange, settings, registry or default_registry(), options or Options(),
            process_engine(os.getpid()), ffi.NULL,
        )  # fmt: skip
        communicator = Communicator(setup)
        meeting.barrier("joined")
    finally:
        meeting.close()
    return communicator


_SLICE_S = 0.1  # how long a signal to this process may wait
_LEAST_HELD = 8
_COLLECTIVES = object()  # the lane of collectives, as a default argument
_SEND = COLLECTIVE_CODES["send"]


class Communicator:
    """An ordered group of ranks. Made by `init`, `split`, or `commrt.testing.World`.

    Callable from any thread; calls are serialised, and the order of calls is the order of operations, which must be
    the same on all ranks for collectives. Point-to-point operations are ordered for each ordered pair of ranks alone.
    An operation that fails breaks the communicator: later ones raise CommunicatorBroken with the cause.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._group: Group = setup.run()
        self.rank: int = self._group.rank
        self.size: int = self._group.size
        self._timeout = self._group.settings.timeout_s
        self._lock = threading.RLock()
        self._refusal: Callable[[], CommrtError] | None = None
        self._lane = lib.cr_comm_collectives(self._group.native)
        self._router = Router(self._group, setup.registry)
        self._symmetric = SymmetricMemory(self._group, self.exchange)
        self._slots = threading.local()
        self._ndarray: type | None = None
        self._lanes: dict[tuple[int, bool], Any] = {}  # point to point, by peer and direction
        self._last: tuple[Stream | None, Event | None] = (None, None)
        self._held: list[NativeWork] = []
        self._most_held = _LEAST_HELD  # sweep then: a constant share of the work, however much is in flight
        _open.add(self)

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, out: Any = None, op: str = "sum", *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, precise: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks, the result on each, in `out` or, without it, in `x`.

        Returns the result, or a Work if `async_op` or `stream`. All ranks get the same bits.
        """
        out = x if out is None else out
        if not (stream or async_op or algorithm or precise or timeout) and self._fast(0, _OPS.get(op), 0, x, out):
            return out
        return self._run("all_reduce", x, out, op, 0, stream, async_op, algorithm, timeout, precise)

    def all_gather(
        self, x: Any, out: Any = None, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Every rank's `x`, by rank, on each rank: in `out`, of size times its elements, made if None."""
        if not (stream or async_op or algorithm or timeout) and self._fast(1, 0, 0, x, out):
            return out
        return self._run("all_gather", x, out, "sum", 0, stream, async_op, algorithm, timeout)

    def reduce_scatter(
        self, x: Any, out: Any = None, op: str = "sum", *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, precise: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks; rank r gets the r-th of its size equal parts, in `out`, made if None."""
        if not (stream or async_op or algorithm or precise or timeout) and self._fast(2, _OPS.get(op), 0, x, out):
            return out
        return self._run("reduce_scatter", x, out, op, 0, stream, async_op, algorithm, timeout, precise)

    def broadcast(
        self, x: Any, root: int = 0, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """`x` of rank `root` into everyone's `x`."""
        if not (stream or async_op or algorithm or timeout) and self._fast(3, 0, root, x, x):
            return x
        return self._run("broadcast", x, x, "sum", root, stream, async_op, algorithm, timeout)

    def reduce(
        self, x: Any, out: Any = None, op: str = "sum", root: int = 0, *, stream: Stream | None = None,
        async_op: bool = False, algorithm: str | None = None, precise: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks; the result at `root`, in `out` or, without it, in `x`. Others' `x` is unchanged."""
        target = None if self.rank != root else x if out is None else out
        return self._run("reduce", x, target, op, root, stream, async_op, algorithm, timeout, precise)

    def gather(
        self, x: Any, out: Any = None, root: int = 0, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Every rank's `x`, by rank, at `root`: in `out`, made if None. None elsewhere."""
        return self._run("gather", x, out, "sum", root, stream, async_op, algorithm, timeout)

    def scatter(
        self, x: Any, out: Any = None, root: int = 0, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """The r-th of the size equal parts of the root's `x` to rank r, in `out`. Elsewhere than at `root`, `x` is None.

        `out` may be left out at the root alone, where it is then made.
        """
        return self._run("scatter", x, out, "sum", root, stream, async_op, algorithm, timeout)

    def all_to_all(
        self, x: Any, out: Any = None, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """The r-th of the size equal parts of `x` to rank r; the parts that come in, by rank, in `out`, made if None."""
        if not (stream or async_op or algorithm or timeout) and self._fast(7, 0, 0, x, out):
            return out
        return self._run("all_to_all", x, out, "sum", 0, stream, async_op, algorithm, timeout)

    def barrier(
        self, *, stream: Stream | None = None, async_op: bool = False, algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Return once every rank has called it."""
        return self._run("barrier", None, None, "sum", 0, stream, async_op, algorithm, timeout)

    # --- point to point --------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Send `x` to rank `dst`, which receives as many elements of the same dtype. May return before it has them."""
        if algorithm or timeout or not self._fast(_SEND, 0, 0, x, x, self._lanes.get((dst, True))):
            self._pair(x, dst, True, False, algorithm, timeout)

    def recv(self, x: Any, src: int, *, algorithm: str | None = None, timeout: float | None = None) -> Any:
        """Receive into `x` from rank `src`; returns `x`."""
        if algorithm or timeout or not self._fast(_SEND, 0, 0, x, x, self._lanes.get((src, False))):
            self._pair(x, src, False, False, algorithm, timeout)
        return x

    def isend(self, x: Any, dst: int, *, algorithm: str | None = None, timeout: float | None = None) -> Work:
        """Start a send. `x` must not be written before the Work is done."""
        return self._pair(x, dst, True, True, algorithm, timeout)

    def irecv(self, x: Any, src: int, *, algorithm: str | None = None, timeout: float | None = None) -> Work:
        """Start a receive."""
        return self._pair(x, src, False, True, algorithm, timeout)

    def batch(self, transfers: Sequence[Send | Recv], timeout: float | None = None) -> Work:
        """Start several sends and receives at once; their order in the list does not matter across pairs of ranks."""
        works: list[Work] = []
        for transfer in transfers:
            if not isinstance(transfer, (Send, Recv)):
                raise InvalidArgument(f"a batch is of Send and Recv, not {type(transfer).__name__}", rank=self.rank)
            works.append(self._pair(transfer.array, transfer.peer, isinstance(transfer, Send), True, None, timeout))
        return WorkGroup(works)

    # --- what else a communicator does -----------------------------------------------------------------------------

    def prepare(
        self, collective: str, x: Any = None, out: Any = None, *, op: str = "sum", root: int = 0,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Prepared:  # fmt: skip
        """A persistent operation on fixed arrays: checked once, started any number of times. Not collective."""
        if collective in ("all_reduce", "broadcast") or (collective == "reduce" and self.rank == root):
            out = x if out is None else out
        call, keep = self._call(collective, x, out, op, root, algorithm, False)
        return Prepared(self, collective, call, keep, self._seconds(timeout))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that gave the same `color`, ordered by `key`, then rank. Collective.

        None as the color joins none, and returns None.
        """
        from commrt.splitting import split

        return split(self, color, key)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """Symmetric memory: a numpy array that peers can load and store. Collective, and the same size on all ranks.

        All ranks get it, or all raise MemoryError. It goes back to the pool once every rank has let go of its array
        (and all its views), which the next call of `empty` settles.
        """
        self._check_usable()
        return self._symmetric.empty(shape, as_dtype(dtype))

    def explain(
        self, collective: str, nbytes: int, *, symmetric: bool = False, algorithm: str | None = None, precise: bool = False
    ) -> Explanation:
        """What would run for that many bytes, and why."""
        return self._router.explain(collective, nbytes, symmetric, algorithm, precise)

    def abort(self) -> None:
        """End everything in flight, here and at the peers, with Aborted. Local, immediate, from any thread."""
        if self._refusal is None:
            lib.cr_comm_abort(self._group.native)

    def close(self) -> None:
        """Finish what was accepted, within the close timeout, and leave. Idempotent; waits for no peer otherwise.

        Raises what a peer found wrong with what this rank had sent.
        """
        self._close(self._group.settings.close_timeout_s)

    @property
    def settings(self) -> Settings:
        """Rank 0's settings, which hold for all."""
        return self._group.settings

    @property
    def capabilities(self) -> frozenset[str]:
        """What all links of this communicator offer."""
        return self._group.capabilities

    @property
    def links(self) -> Mapping[int, str]:
        """The transport to each rank."""
        return dict(self._group.links)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.abort()  # peers that wait for this rank must not wait in vain
        try:
            self._close(0.0 if error is not None else self._group.settings.close_timeout_s)
        except CommrtError:
            if error is None:
                raise

    # --- how -------------------------------------------------------------------------------------------------------

    def _fast(self, collective: int, op: int | None, root: int, x: Any, out: Any, lane: Any = _COLLECTIVES) -> bool:
        """The short way for two numpy arrays: one native call. False: nothing was done, take the long way."""
        if type(x) is not self._ndarray or type(out) is not self._ndarray or op is None or self._refusal or self._last[1]:
            return False
        try:
            slot = self._slots.pending
        except AttributeError:
            slot = self._slots.pending = ffi.new("cr_launch**")
        if not 0 <= root < self.size:
            return False
        if lane is _COLLECTIVES:
            lane = self._lane
        elif lane is None:
            return False
        code = lib.cr_numpy_run(lane, collective, op, root, id(x), id(out), self._timeout, _SLICE_S, slot)
        if code == _OK:
            return True
        if code in (lib.CR_UNFIT, lib.CR_NEED_PLAN, lib.CR_INVALID):
            return False
        if code != lib.CR_PENDING:
            self._settle(code)
        return self._hold(NativeWork(slot[0], self._settle, (x, out))).wait()

    def _learn_numpy(self) -> None:
        """Tell the engine numpy's types, once the program has imported numpy itself."""
        numpy = sys.modules.get("numpy")
        if numpy is None or sys.implementation.name != "cpython":
            return
        for dtype in DTYPES:
            if not dtype.extended or "ml_dtypes" in sys.modules:
                lib.cr_engine_numpy_type(self.setup.engine, object.__basicsize__, id(dtype.to_numpy()), dtype.code)
        self._ndarray = numpy.ndarray

    def _run(
        self, collective: str, x: Any, out: Any, op: str, root: int, stream: Stream | None, async_op: bool,
        algorithm: str | None, timeout: float | None, precise: bool = False,
    ) -> Any:  # fmt: skip
        if out is None and collective in _MAKES_OUTPUT:
            out = self._make_output(collective, x, root)
        call, keep = self._call(collective, x, out, op, root, algorithm, precise)
        seconds = self._seconds(timeout)
        if stream is not None:
            return self._on_stream(stream, lambda: self._finish(call, keep, seconds))
        self._await_other_stream(None)
        if async_op:
            return self._start(self._lane, call, keep, seconds)
        self._finish(call, keep, seconds)
        return out

    def _call(
        self, collective: str, x: Any, out: Any, op: str, root: int, algorithm: str | None, precise: bool
    ) -> tuple[Any, Any]:
        self._check_usable()
        if self._ndarray is None:
            self._learn_numpy()
        call: Call = shapes(self.rank, self.size, collective, x, out, op, root)
        native = ffi.new("cr_call*")
        native.collective = COLLECTIVE_CODES[collective]
        native.dtype, native.reduction, native.root = call.dtype, call.reduction, root
        native.input, native.output = ffi.cast("void*", call.input), ffi.cast("void*", call.output)
        native.count = call.count
        if algorithm is not None or precise:
            symmetric = not call.nbytes or self._is_symmetric(call.input, call.output)
            native.program = self._router.forced(collective, call.nbytes, root, algorithm, precise, symmetric)
        return native, (x, out, call)

    def _finish(self, call: Any, keep: Any, seconds: float, lane: Any = None) -> None:
        """Run to the end. `keep` holds the arrays."""
        lane = lane or self._lane
        pending = ffi.new("cr_launch**")
        code = lib.cr_run(lane, call, seconds, _SLICE_S, pending)
        if code == lib.CR_NEED_PLAN:
            self._router.install(call, lane)
            code = lib.cr_run(lane, call, seconds, _SLICE_S, pending)
        if code == lib.CR_PENDING:
            self._hold(NativeWork(pending[0], self._settle, keep)).wait()
        elif code:
            self._settle(code)

    def _start(self, lane: Any, call: Any, keep: Any, seconds: float) -> NativeWork:
        lib.cr_engine_progress_thread(self.setup.engine)
        handle = ffi.new("cr_launch**")
        code = lib.cr_start(lane, call, seconds, handle)
        if code == lib.CR_NEED_PLAN:
            self._router.install(call, lane)
            code = lib.cr_start(lane, call, seconds, handle)
        if code:
            self._settle(code)
        return self._hold(NativeWork(handle[0], self._settle, keep))

    def _hold(self, work: NativeWork) -> NativeWork:
        """Keep the arrays of work whose handle the caller may drop, until it is done."""
        with self._lock:
            if len(self._held) >= self._most_held:
                self._held = [held for held in self._held if not held.done()]
                self._most_held = max(_LEAST_HELD, 2 * len(self._held))
            self._held.append(work)
        return work

    def _pair(
        self, x: Any, peer: int, send: bool, async_op: bool, algorithm: str | None, timeout: float | None
    ) -> Any:
        self._check_usable()
        self._check_rank(peer, "peer")
        buffer = as_buffer(x, writable=not send)
        if self._ndarray is None:
            self._learn_numpy()
        lane = self._lanes.get((peer, send)) or self._open_pair(peer, send)
        native = ffi.new("cr_call*")
        native.collective, native.dtype, native.count = COLLECTIVE_CODES["send"], buffer.dtype.code, buffer.count
        address = ffi.cast("void*", buffer.address)
        native.input, native.output = (address, ffi.NULL) if send else (ffi.NULL, address)
        if algorithm is not None:
            symmetric = not buffer.nbytes or self._is_symmetric(buffer.address)
            native.program = self._router.forced_pair(lane, buffer.nbytes, send, algorithm, symmetric)
        if async_op:
            return self._start(lane, native, (x, buffer), self._seconds(timeout))
        self._finish(native, (x, buffer), self._seconds(timeout), lane)
        return None

    def _open_pair(self, peer: int, send: bool) -> Any:
        with self._lock:
            lane = lib.cr_comm_pair(self._group.native, peer, send)
            if lane == ffi.NULL:
                raise MemoryError(f"no memory for the lane to rank {peer}")
            return self._lanes.setdefault((peer, send), lane)

    def _on_stream(self, stream: Stream, run: Callable[[], None]) -> StreamWork:
        outcome: list[BaseException] = []

        def job() -> None:
            try:
                run()
            except BaseException as error:
                outcome.append(error)
                raise

        with self._lock:
            self._await_other_stream(stream)
            event = stream.submit(job)
            self._last = (stream, event)
        return StreamWork(event, outcome)

    def _await_other_stream(self, stream: Stream | None) -> None:
        """The order of calls is the order of operations, whatever stream they are on."""
        last, event = self._last
        if event is None or last is stream or event.done():
            return
        if stream is None:
            event.wait()
        else:
            stream.wait_event(event)

    def _is_symmetric(self, *addresses: int) -> bool:
        return all(self._symmetric.covers(address, 0) for address in addresses if address)

    def _make_output(self, collective: str, x: Any, root: int) -> Any:
        if collective == "gather" and self.rank != root:
            return None
        if x is None:
            raise InvalidArgument(f"{collective} needs out= on rank {self.rank}", rank=self.rank, operation=collective)
        return empty_like(x, _MAKES_OUTPUT[collective], self.size)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else checked_timeout(timeout)

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise InvalidArgument(f"{what} {rank} is not in 0..{self.size - 1}", rank=self.rank)

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _settle(self, code: int) -> NoReturn:
        """Raise for a native code; the communicator is broken from here on."""
        if code == lib.CR_INVALID:
            raise InvalidArgument("the native core refused the call", rank=self.rank)
        if code == lib.CR_NO_MEMORY:
            raise MemoryError("no memory for the operation")
        error = self._failure()
        if self._refusal is None:
            cause = str(error)
            self._refusal = lambda: CommunicatorBroken(f"the communicator is broken: {cause}", rank=self.rank)
        raise error

    def _failure(self) -> CommrtError:
        failure = ffi.new("cr_failure*")
        lib.cr_comm_failure(self._group.native, failure)
        if not failure.code:
            return CommunicatorClosed("the communicator was closed during the operation", rank=self.rank)
        return to_error(self.rank, failure, self._router.names(), self._stuck())

    def _stuck(self) -> list[Any]:
        """Where every rank stood when none could move; empty if that did not happen."""
        if self.setup.native_group == ffi.NULL:
            return []
        places = ffi.new("cr_failure[]", self.size)
        found = [lib.cr_group_deadlock(self.setup.native_group, rank, places + rank) for rank in range(self.size)]
        return [places[rank] for rank in range(self.size)] if any(found) else []

    def _close(self, timeout_s: float) -> None:
        with self._lock:
            if self not in _open:
                return
            _open.discard(self)
        broken = self._refusal
        code = lib.cr_comm_close(self._group.native, timeout_s)
        error = self._failure() if code and broken is None else None
        self._refusal = broken or (lambda: CommunicatorClosed("the communicator is closed", rank=self.rank))
        self._symmetric.close()
        self._group.release()
        if error is not None and not isinstance(error, CommunicatorClosed):
            raise error

    def _disown(self) -> None:
        """In a forked child: the communicator is the parent's, and nothing of it may be touched."""
        self._refusal = lambda: CommunicatorClosed(
            "this communicator belongs to the process that this one was forked from; call commrt.init() here",
            rank=self.rank,
        )

    def exchange(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective; the values may differ in length."""
        import numpy

        lengths = numpy.empty(self.size, numpy.int64)
        self.all_gather(numpy.array([len(value)], numpy.int64), lengths)
        most = int(lengths.max())
        padded = numpy.zeros(most, numpy.uint8)
        padded[: len(value)] = numpy.frombuffer(value, numpy.uint8)
        everyone = numpy.empty((self.size, most), numpy.uint8)
        self.all_gather(padded, everyone)
        return [everyone[rank, : lengths[rank]].tobytes() for rank in range(self.size)]


class Prepared:
    """A persistent operation. `start` may be called again once the Work of the last start is done."""

    def __init__(self, communicator: Communicator, collective: str, call: Any, keep: Any, seconds: float) -> None:
        self._communicator, self._call, self._keep, self._seconds = communicator, call, keep, seconds
        self.collective = collective

    def start(self) -> Work:
        """Start it, as the communicator's next operation."""
        self._communicator._check_usable()
        return self._communicator._start(self._communicator._lane, self._call, self._keep, self._seconds)

    def run(self) -> None:
        """Start it and wait for its end: one call into native code."""
        self._communicator._check_usable()
        self._communicator._finish(self._call, self._keep, self._seconds)


_OK = lib.CR_OK
_OPS = {op.name: op.code for op in REDUCE_OPS}
_MAKES_OUTPUT: dict[str, Shape] = {
    "all_gather": "gathered", "gather": "gathered", "reduce_scatter": "scattered", "scatter": "scattered",
    "all_to_all": "same",
}  # fmt: skip

# Those not closed yet, for the end of the process and for forked children.
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_EXIT_S = 1.0


@atexit.register
def _leave() -> None:
    for communicator in list(_open):
        try:
            communicator._close(_EXIT_S)
        except CommrtError:
            continue  # the process is ending; peers raise by themselves


def _after_fork() -> None:
    for communicator in list(_open):
        communicator._disown()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
