"""The process group: torch's calls, on a communicator of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import commrt
from commrt.communicator import Communicator, Recv, Send
from commrt.errors import Aborted, InvalidArgument
from commrt.settings import MAX_SECONDS
from commrt.torch.tensors import DEVICE, Staging, only, reduction
from commrt.torch.work import Watcher, Work

Tensors = Sequence[Any]


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks. Made by torch.distributed; collective, as making a communicator is.

    Names and signatures are those that torch calls, from Python and from C++. With `opts.asyncOp` an operation is
    started, otherwise it has ended when the call returns; failures are raised in the call, or by the Work.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # the form with a store makes no object that can be subclassed
        self._store = store
        limit_s = self._timeout_s = min(timeout.total_seconds(), MAX_SECONDS)
        self._comm: Communicator = commrt.init(
            rank, size, store=store, backend=DEVICE, timeout=limit_s, init_timeout=limit_s
        )
        self._pairs: Communicator | None = None
        self._watcher = Watcher()
        self._name = self._description = ""

    # --- who it is: C++ asks by these names ------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "commrt"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(DEVICE)]

    # --- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce_coalesced([only(tensors)], opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.AllreduceCoalescedOptions(), Staging()
        reduce = partial(self._comm.all_reduce, op=reduction(opts.reduceOp))
        return self._run([partial(reduce, staging.both(tensor)) for tensor in tensors], opts, tensors, staging)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.BroadcastOptions(), Staging()
        call = partial(self._comm.broadcast, staging.both(only(tensors)), root=opts.rootRank)
        return self._run([call], opts, tensors, staging)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.ReduceOptions(), Staging()
        take = staging.both if self._comm.rank == opts.rootRank else staging.source
        call = partial(self._comm.reduce, take(only(tensors)), op=reduction(opts.reduceOp), root=opts.rootRank)
        return self._run([call], opts, tensors, staging)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        opts, staging, outputs = opts or c10d.AllgatherOptions(), Staging(), only(output_tensors)
        call = partial(self._comm.all_gather, staging.source(only(input_tensors)), staging.targets(outputs))
        return self._run([call], opts, outputs, staging)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.AllgatherOptions(), Staging()
        calls = [
            partial(self._comm.all_gather, staging.source(tensor), staging.targets([row[k] for row in output_lists]))
            for k, tensor in enumerate(input_list)
        ]
        return self._run(calls, opts, [tensor for row in output_lists for tensor in row], staging)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.AllgatherOptions(), Staging()
        calls = [
            partial(self._comm.all_gather, staging.source(x), staging.target(out))
            for x, out in zip(inputs, outputs, strict=True)
        ]
        return self._run(calls, opts, outputs, staging)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> Work:
        opts, staging = opts or c10d.ReduceScatterOptions(), Staging()
        x, out = staging.sources(only(input_tensors)), staging.target(only(output_tensors))
        call = partial(self._comm.reduce_scatter, x, out, op=reduction(opts.reduceOp))
        return self._run([call], opts, output_tensors, staging)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.ReduceScatterOptions(), Staging()
        scatter = partial(self._comm.reduce_scatter, op=reduction(opts.reduceOp))
        calls = [
            partial(scatter, staging.source(x), staging.target(out)) for x, out in zip(inputs, outputs, strict=True)
        ]
        return self._run(calls, opts, outputs, staging)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.GatherOptions(), Staging()
        outputs = only(output_tensors) if self._comm.rank == opts.rootRank else []
        out = staging.targets(outputs) if outputs else None
        call = partial(self._comm.gather, staging.source(only(input_tensors)), out, root=opts.rootRank)
        return self._run([call], opts, outputs, staging)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> Work:
        opts, staging = opts or c10d.ScatterOptions(), Staging()
        x = staging.sources(only(input_tensors)) if self._comm.rank == opts.rootRank else None
        call = partial(self._comm.scatter, x, staging.target(only(output_tensors)), root=opts.rootRank)
        return self._run([call], opts, output_tensors, staging)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        opts, staging = opts or c10d.AllToAllOptions(), Staging()
        x, out = staging.source(input), staging.target(output)
        if not output_splits and not input_splits:
            call: Callable[..., Any] = partial(self._comm.all_to_all, x, out)
        else:
            call = partial(self._exchange, self._parts(x, input_splits), self._parts(out, output_splits))
        return self._run([call], opts, [output], staging)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        opts, staging = opts or c10d.AllToAllOptions(), Staging()
        xs, outs = list(map(staging.source, input_tensors)), list(map(staging.target, output_tensors))
        return self._run([partial(self._exchange, xs, outs)], opts, output_tensors, staging)

    def barrier(self, opts: Any = None) -> Work:
        return self._run([self._comm.barrier], opts or c10d.BarrierOptions(), [], Staging())

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- point to point --------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        _refuse_tag(tag)
        staging = Staging()
        part = self._comm.isend(staging.source(only(tensors)), dst, timeout=self._timeout_s)
        return Work([part], tensors, staging, self._watcher)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        _refuse_tag(tag)
        staging = Staging()
        part = self._comm.irecv(staging.target(only(tensors)), src, timeout=self._timeout_s)
        return Work([part], tensors, staging, self._watcher)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        raise InvalidArgument("receiving from any rank is not supported: name the source", rank=self._comm.rank)

    # --- life ------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations that start from now on."""
        self._timeout_s = min(timeout.total_seconds(), MAX_SECONDS)

    def abort(self) -> None:
        """End everything in flight, on all ranks."""
        for comm in self._communicators():
            comm.abort()

    def shutdown(self) -> None:
        """Leave, once the peers have what was sent to them; see `Communicator.close`."""
        with suppress(Aborted), ExitStack() as leaving:  # from the last to the first, whatever fails
            leaving.callback(self._watcher.close)
            for comm in self._communicators():
                leaving.callback(comm.close)

    # --- how -------------------------------------------------------------------------------------------------------

    def _run(self, calls: Sequence[Callable[..., Any]], opts: Any, outputs: Tensors, staging: Staging) -> Work:
        timeout_s = opts.timeout.total_seconds()
        how = {"timeout": timeout_s if timeout_s > 0 else self._timeout_s, "async_op": opts.asyncOp}
        parts = [call(**how) for call in calls]
        if not opts.asyncOp:
            staging.finish()
        return Work(parts if opts.asyncOp else [], outputs, staging, self._watcher)

    def _parts(self, tensor: Any, splits: Sequence[int]) -> Tensors:
        """Views of a tensor, one a rank, by the lengths along its first dimension; equal ones if not given."""
        length, size = len(tensor) if tensor.dim() else 0, self._comm.size
        lengths = list(splits) or [length // size] * size
        if len(lengths) != size or sum(lengths) != length or min(lengths) < 0:
            raise InvalidArgument(f"{length} rows don't split into {lengths} for {size} ranks", rank=self._comm.rank)
        return list(torch.split(tensor, lengths))

    def _exchange(self, xs: Tensors, outs: Tensors, timeout: float, async_op: bool) -> Any:
        """The r-th of `xs` to rank r, from which comes the r-th of `outs`, of any lengths."""
        comm = self._exchanging()
        if len(xs) != comm.size or len(outs) != comm.size:
            raise InvalidArgument(f"{comm.size} ranks exchange as many tensors, not {len(xs)} and {len(outs)}")
        outs[comm.rank].copy_(xs[comm.rank])
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        work = comm.batch([Send(xs[r], r) for r in peers] + [Recv(outs[r], r) for r in peers], timeout)
        return work if async_op else work.wait()

    def _exchanging(self) -> Communicator:
        """Another communicator of the same ranks: what `_exchange` sends must not meet the user's own receives."""
        self._pairs = self._pairs or self._comm.split(0)
        assert self._pairs is not None  # every rank named the same color
        return self._pairs

    def _communicators(self) -> list[Communicator]:
        return [self._comm] if self._pairs is None else [self._comm, self._pairs]


def _refuse_tag(tag: int) -> None:
    if tag:
        raise InvalidArgument(f"tag {tag} is not supported: messages between two ranks arrive in the order they left")
