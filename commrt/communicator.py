"""Communicators: ordered groups of ranks and the operations between them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from commrt.carried import Element
from commrt.channels import ChannelMaker, Channels, KernelLauncher
from commrt.collectives import Shape, empty_like
from commrt.dtypes import as_dtype, as_op
from commrt.errors import CommrtError, CommunicatorClosed, InvalidArgument, TransportError
from commrt.group import Group, Options, Setup, process_engine
from commrt.issuing import Issuer, Prepared
from commrt.lifetime import PROCESS
from commrt.native import COLLECTIVE_CODES, ffi, lib
from commrt.plan import Plan, validate
from commrt.plugins import Registry, default_registry
from commrt.routing import Router
from commrt.selection import NATIVE, Explanation
from commrt.settings import Settings
from commrt.symmetric import SymmetricMemory
from commrt.work import StreamWork, Work, WorkGroup

if TYPE_CHECKING:
    from commrt.backend import Backend, Kernel, Stream


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
    backend: str | None = None,
    algorithm: str | None = None,
    providers: str | None = None,
    table: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    options: Options | None = None,
    registry: Registry | None = None,
) -> Communicator:
    """The communicator of all ranks. Collective: returns once every rank has arrived and is joined to all others.

    Who this rank is comes from the arguments, or from `commrt run`, torchrun, Open MPI, MPICH or Slurm; without any of
    them it is the only one. `store`: a handed-in store with torch's methods, instead of meeting at `rendezvous`; with
    rank and size it says everything, and no launcher is asked.
    `timeout`: seconds that an operation may take. `transport`, `algorithm`: force one. `providers`: other libraries to
    join, as `gloo` or `gloo,mpi`. `table`: a file with a selection table. Rank 0's settings hold for all.
    `backend`: the kind of device that this rank's arrays are on; ranks may differ in it.

    Raises ConfigError, BootstrapTimeout naming the ranks that never came, BootstrapError on all ranks if any failed.
    """
    from commrt import bootstrap, logs

    complete = store is not None and rank is not None and size is not None
    info = bootstrap.detect({} if complete else None, rank=rank, size=size, rendezvous=rendezvous)
    settings = Settings.from_environment(
        os.environ,
        timeout_s=timeout,
        init_timeout_s=init_timeout,
        transport=transport,
        backend=backend,
        algorithm=algorithm,
        providers=providers,
        table=table,
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
        self._router = Router(self._group, setup.registry)
        self._symmetric = SymmetricMemory(self._group, self.exchange)
        self._issuer = Issuer(setup, self._group, self._router, self._symmetric.covers)
        self._short = self._issuer.short
        self._kernels = KernelLauncher(self._group, self._issuer)
        PROCESS.add(self)

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, out: Any = None, op: str = "sum", *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, precise: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks, the result on each, in `out` or, without it, in `x`.

        Returns the result, or a Work if `async_op` or `stream`. All ranks get the same bits.
        """
        out = x if out is None else out
        unusual = stream or async_op or algorithm or precise or timeout is not None
        if not unusual and self._short(_ALL_REDUCE, op, 0, x, out):
            return out
        return self._run("all_reduce", x, out, op, 0, stream, async_op, algorithm, timeout, precise)

    def all_gather(
        self, x: Any, out: Any = None, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Every rank's `x`, by rank, on each rank: in `out`, of size times its elements, made if None."""
        if not (stream or async_op or algorithm or timeout is not None) and self._short(_ALL_GATHER, "sum", 0, x, out):
            return out
        return self._run("all_gather", x, out, "sum", 0, stream, async_op, algorithm, timeout)

    def reduce_scatter(
        self, x: Any, out: Any = None, op: str = "sum", *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, precise: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks; rank r gets the r-th of its size equal parts, in `out`, made if None."""
        unusual = stream or async_op or algorithm or precise or timeout is not None
        if not unusual and self._short(_REDUCE_SCATTER, op, 0, x, out):
            return out
        return self._run("reduce_scatter", x, out, op, 0, stream, async_op, algorithm, timeout, precise)

    def broadcast(
        self, x: Any, root: int = 0, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """`x` of rank `root` into everyone's `x`."""
        unusual = stream or async_op or algorithm or timeout is not None
        if not unusual and self._short(_BROADCAST, "sum", root, x, x):
            return x
        return self._run("broadcast", x, x, "sum", root, stream, async_op, algorithm, timeout)

    def reduce(
        self, x: Any, out: Any = None, op: str = "sum", root: int = 0, *, stream: Stream | None = None,
        async_op: bool = False, algorithm: str | None = None, precise: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks; the result at `root`, in `out` or, without it, in `x`. Others' `x` stays."""
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
        """The r-th of the size equal parts of the root's `x` to rank r, in `out`. Elsewhere `x` is None.

        `out` may be left out at the root alone, where it is then made.
        """
        return self._run("scatter", x, out, "sum", root, stream, async_op, algorithm, timeout)

    def all_to_all(
        self, x: Any, out: Any = None, *, stream: Stream | None = None, async_op: bool = False,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """The r-th of the size equal parts of `x` to rank r; what comes in, by rank, in `out`, made if None."""
        if not (stream or async_op or algorithm or timeout is not None) and self._short(_ALL_TO_ALL, "sum", 0, x, out):
            return out
        return self._run("all_to_all", x, out, "sum", 0, stream, async_op, algorithm, timeout)

    def barrier(
        self, *, stream: Stream | None = None, async_op: bool = False, algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Return once every rank has called it."""
        unusual = stream or async_op or algorithm or timeout is not None
        if not unusual and self._short(_BARRIER, "sum", 0, None, None):
            return None
        return self._run("barrier", None, None, "sum", 0, stream, async_op, algorithm, timeout)

    # --- point to point --------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Send `x` to rank `dst`, which receives as many elements of the same dtype. May return before it has them."""
        if algorithm or timeout is not None or not self._issuer.short_pair(dst, True, x):
            self._run_pair(x, dst, True, algorithm, timeout)

    def recv(self, x: Any, src: int, *, algorithm: str | None = None, timeout: float | None = None) -> Any:
        """Receive into `x` from rank `src`; returns `x`."""
        if algorithm or timeout is not None or not self._issuer.short_pair(src, False, x):
            self._run_pair(x, src, False, algorithm, timeout)
        return x

    def isend(self, x: Any, dst: int, *, algorithm: str | None = None, timeout: float | None = None) -> Work:
        """Start a send. `x` must not be written before the Work is done."""
        return self._start_pair(x, dst, True, algorithm, timeout)

    def irecv(self, x: Any, src: int, *, algorithm: str | None = None, timeout: float | None = None) -> Work:
        """Start a receive."""
        return self._start_pair(x, src, False, algorithm, timeout)

    def batch(self, transfers: Sequence[Send | Recv], timeout: float | None = None) -> Work:
        """Start several sends and receives at once; their order in the list does not matter across pairs of ranks."""
        seconds = self._issuer.seconds(timeout)
        self._issuer.check_usable()
        calls = [self._checked_transfer(transfer) for transfer in transfers]  # all of them before any is started
        return WorkGroup([self._issuer.start(lane, call, keep, seconds) for lane, call, keep in calls])

    # --- what else a communicator does -----------------------------------------------------------------------------

    def prepare(
        self, collective: str, x: Any = None, out: Any = None, *, op: str = "sum", root: int = 0,
        algorithm: str | None = None, timeout: float | None = None,
    ) -> Prepared:  # fmt: skip
        """A persistent operation on fixed arrays: checked once, started any number of times. Not collective."""
        if collective in ("all_reduce", "broadcast") or (collective == "reduce" and self.rank == root):
            out = x if out is None else out
        call, keep = self._issuer.call(collective, x, out, op, root, algorithm, False)
        return Prepared(self._issuer, collective, call, keep, self._issuer.seconds(timeout))

    def run_plan(
        self, plan: Plan, x: Any = None, out: Any = None, *, op: str = "sum", root: int = 0,
        stream: Stream | None = None, async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Run a plan of the caller's, by the contract of its collective; `root` is the one that it was built for.

        Every rank passes the same whole plan: its digest is part of what ranks compare. Its bounds are checked, each
        time; whether it does what its collective promises is not. Without `out` it works in place where the collective
        can. Raises PlanError for one out of bounds, InvalidArgument for one that does not fit this communicator.
        """
        validate(plan)
        if plan.collective in _IN_PLACE and (plan.collective != "reduce" or self.rank == root):
            out = x if out is None else out
        return self._run(plan.collective, x, out, op, root, stream, async_op, None, timeout, plan=plan)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that gave the same `color`, ordered by `key`, then rank. Collective.

        None as the color joins none, and returns None.
        """
        from commrt.splitting import split

        return split(self, Communicator, color, key)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32", kind: str | None = None) -> Any:
        """Symmetric memory: a numpy array that peers can load and store. Collective, and the same size on all ranks.

        All ranks get it, or all raise MemoryError. It goes back to the pool once every rank has let go of its array
        (and all its views), which the next call of `empty` settles. `kind`: of memory, the backend's first if None;
        what is coherent only between launches is not shared with peers, and used like any ordinary array.
        """
        self._issuer.check_usable()
        if self._group.device is not None:
            raise InvalidArgument("symmetric memory is of the host alone yet", rank=self.rank)
        return self._symmetric.empty(shape, as_dtype(dtype), kind)

    def channels(self, array: Any, blocks: int = 1, packet_nbytes: int = 0, timeout: float | None = None) -> Channels:
        """Channels for kernels of up to `blocks` blocks, over `array`, which is symmetric memory. Collective.

        `packet_nbytes`: the most that one `put_packets` carries. `timeout`: seconds that one wait in a kernel may take.
        All ranks get them, or all raise. See docs/kernels.md.
        """
        self._issuer.check_usable()
        maker = ChannelMaker(self._group, self._symmetric, self.exchange)
        return maker.make(array, blocks, packet_nbytes, self._issuer.seconds(timeout))

    def launch(self, kernel: Kernel, blocks: int, *arguments: Any, stream: Stream | None = None) -> StreamWork | None:
        """Run a kernel (of `backend.build`) on `blocks` blocks, in the order of this rank's calls. Not collective.

        An argument is a Channels, an array (its address), a whole number (u64, i64 if negative) or a float (double).
        Returns when it has ended or, given a stream, a Work. A wait in it that failed is raised here, or by the Work,
        and breaks the communicator.
        """
        return self._kernels.launch(kernel, blocks, arguments, stream)

    def explain(
        self,
        collective: str,
        nbytes: int,
        *,
        symmetric: bool = False,
        algorithm: str | None = None,
        precise: bool = False,
        dtype: Any = "float32",
        op: str = "sum",
    ) -> Explanation:
        """What would run for that many bytes, and why."""
        element = Element(as_dtype(dtype), as_op(op))
        return self._router.explain(collective, nbytes, symmetric, algorithm, precise, element)

    @property
    def providers(self) -> tuple[str, ...]:
        """What can carry its collectives: native, and the libraries that all ranks have joined."""
        return (NATIVE, *sorted(self._group.joined))

    def abort(self) -> None:
        """End everything in flight, here and at the peers, with Aborted. Local, immediate, from any thread."""
        if self._issuer.refusal is None:
            lib.cr_comm_abort(self._group.native)

    def close(self) -> None:
        """Finish what was accepted and leave. Idempotent.

        Waits, within the close timeout, until every peer has begun what this rank has sent it, or has left: raises
        Mismatch if a peer finds that ranks disagree, PeerLost if one never called a collective that this rank did.
        """
        self._close(self._group.settings.close_timeout_s)

    @property
    def backend(self) -> Backend:
        """The device that this communicator's memory and kernels are on."""
        return self._group.backend if self._group.device is None else self._group.device.backend

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
        """The transport to each rank: between their devices where there is one, else between their hosts."""
        return self._group.links | self._group.near

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()  # peers that wait for this rank must not wait in vain
        try:
            self._close(0.0 if error is not None else self._group.settings.close_timeout_s)
        except CommrtError:
            if error is None:
                raise

    # --- how -------------------------------------------------------------------------------------------------------

    def _run(
        self, collective: str, x: Any, out: Any, op: str, root: int, stream: Stream | None, async_op: bool,
        algorithm: str | None, timeout: float | None, precise: bool = False, plan: Plan | None = None,
    ) -> Any:  # fmt: skip
        if out is None and collective in _MAKES_OUTPUT:
            out = self._make_output(collective, x, root)
        issuer = self._issuer
        call, keep = issuer.call(collective, x, out, op, root, algorithm, precise, plan)
        seconds = issuer.seconds(timeout)
        if stream is not None:
            return issuer.on_stream(stream, call, keep, seconds)
        if async_op:
            return issuer.start(issuer.lane, call, keep, seconds)
        issuer.finish(issuer.lane, call, keep, seconds)
        return out

    def _checked_transfer(self, transfer: Send | Recv) -> tuple[Any, Any, Any]:
        if not isinstance(transfer, (Send, Recv)):
            raise InvalidArgument(f"a batch is of Send and Recv, not {type(transfer).__name__}", rank=self.rank)
        return self._issuer.pair_call(transfer.array, transfer.peer, isinstance(transfer, Send), None)

    def _start_pair(self, x: Any, peer: int, send: bool, algorithm: str | None, timeout: float | None) -> Work:
        lane, call, keep = self._issuer.pair_call(x, peer, send, algorithm)
        return self._issuer.start(lane, call, keep, self._issuer.seconds(timeout))

    def _run_pair(self, x: Any, peer: int, send: bool, algorithm: str | None, timeout: float | None) -> None:
        lane, call, keep = self._issuer.pair_call(x, peer, send, algorithm)
        self._issuer.finish(lane, call, keep, self._issuer.seconds(timeout))

    def _make_output(self, collective: str, x: Any, root: int) -> Any:
        if collective == "gather" and self.rank != root:
            return None
        if x is None:
            raise InvalidArgument(f"{collective} needs out= on rank {self.rank}", rank=self.rank, operation=collective)
        return empty_like(x, _MAKES_OUTPUT[collective], self.size)

    def _close(self, timeout_s: float) -> None:
        if PROCESS.remove(self):
            self.leave(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """What `close` does, once; see `commrt.lifetime`."""
        broken = self._issuer.refusal
        self._issuer.refuse(lambda: CommunicatorClosed("the communicator is closed", rank=self.rank))
        self._kernels.close(timeout_s)
        self._issuer.end(timeout_s)
        code = lib.cr_comm_close(self._group.native, timeout_s)
        error = self._issuer.failure() if code and broken is None else None
        self._issuer.leave(timeout_s)
        self._symmetric.close()
        self._group.release()
        if error is not None and not isinstance(error, CommunicatorClosed):
            raise error

    def disown(self) -> None:
        """In a forked child: the communicator is the parent's, and nothing of it may be touched."""
        self._issuer.disown()
        self._issuer.refusal = None
        self._issuer.refuse(
            lambda: CommunicatorClosed(
                "this communicator belongs to the process that this one was forked from; call commrt.init() here",
                rank=self.rank,
            )
        )

    def exchange(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective; the values may differ in length."""
        import numpy

        length, lengths = numpy.array([len(value)], numpy.int64), numpy.empty(self.size, numpy.int64)
        self._issuer.exchange(self.all_gather, length.view(numpy.uint8), lengths.view(numpy.uint8))
        most = int(lengths.max())
        if not 0 <= int(lengths.min()) <= most <= _MOST_EXCHANGED:
            raise TransportError(f"a peer announced {most} bytes to exchange", rank=self.rank)
        padded = numpy.zeros(most, numpy.uint8)
        padded[: len(value)] = numpy.frombuffer(value, numpy.uint8)
        everyone = numpy.empty((self.size, most), numpy.uint8)
        self._issuer.exchange(self.all_gather, padded, everyone.reshape(-1))
        return [everyone[rank, : lengths[rank]].tobytes() for rank in range(self.size)]


_MOST_EXCHANGED = 1 << 26  # bytes of one rank
_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _BROADCAST, _ALL_TO_ALL, _BARRIER = (
    COLLECTIVE_CODES[name]
    for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
)
_MAKES_OUTPUT: dict[str, Shape] = {
    "all_gather": "gathered", "gather": "gathered", "reduce_scatter": "scattered", "scatter": "scattered",
    "all_to_all": "same",
}  # fmt: skip
_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
