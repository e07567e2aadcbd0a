"""What process groups have to do, as functions of a Gloo group and of ours. Each runs on all ranks at once."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from commrt.errors import Aborted, CommunicatorBroken, InvalidArgument, OperationTimeout, UnsupportedType

warnings.filterwarnings("ignore", category=FutureWarning)  # old names are tried on purpose

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
CASES: dict[str, Callable[[Any, Any], None]] = {}


def case(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    CASES[function.__name__] = function
    return function


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in any order, in any of the dtypes."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, shape, generator=source).to(dtype)


def mine(group: Any, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return data(group.rank(), *shape, dtype=dtype, seed=seed)


def same(run: Callable[[Any], Any], gloo: Any, ours: Any) -> None:
    """`run` gives the same tensors on both groups."""
    expected, got = run(gloo), run(ours)
    for wanted, found in zip(expected, got, strict=True):
        assert wanted.dtype == found.dtype
        assert torch.equal(wanted, found), f"{wanted} from gloo, {found} from commrt"


def refused(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


# --- collectives against gloo ---


@case
def all_reduce(gloo: Any, ours: Any) -> None:
    for dtype in DTYPES:
        for op in OPS:
            for shape in ((), (1,), (3, 5), (0,), (70000,)):

                def run(group: Any, shape: Any = shape, dtype: Any = dtype, op: Any = op) -> Any:
                    x = mine(group, *shape, dtype=dtype)
                    dist.all_reduce(x, op, group=group)
                    return [x]

                same(run, gloo, ours)


@case
def all_reduce_average(gloo: Any, ours: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        x = mine(ours, 100, dtype=dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG, group=ours)
        total = sum(data(rank, 100, dtype=dtype) for rank in range(ours.size()))
        torch.testing.assert_close(x, total / ours.size())


@case
def all_reduce_complex(gloo: Any, ours: Any) -> None:
    def run(group: Any) -> Any:
        x = torch.complex(mine(group, 7), mine(group, 7, seed=1))
        dist.all_reduce(x, group=group)
        return [x]

    same(run, gloo, ours)


@case
def broadcast(gloo: Any, ours: Any) -> None:
    for dtype in (*DTYPES, torch.bool):
        for root in range(ours.size()):

            def run(group: Any, root: int = root, dtype: Any = dtype) -> Any:
                x = mine(group, 4, 3, dtype=dtype)
                dist.broadcast(x, group_src=root, group=group)
                return [x]

            same(run, gloo, ours)


@case
def reduce(gloo: Any, ours: Any) -> None:
    for root in range(ours.size()):
        for op in OPS:

            def run(group: Any, root: int = root, op: Any = op) -> Any:
                x = mine(group, 9)
                dist.reduce(x, group_dst=root, op=op, group=group)
                return [x] if group.rank() == root else []  # elsewhere it is anything

            same(run, gloo, ours)


@case
def all_gather(gloo: Any, ours: Any) -> None:
    for dtype in (*DTYPES, torch.bool):
        for shape in ((), (5,), (2, 3)):

            def run(group: Any, shape: Any = shape, dtype: Any = dtype) -> Any:
                outs = [torch.zeros(shape, dtype=dtype) for _ in range(group.size())]
                dist.all_gather(outs, mine(group, *shape, dtype=dtype), group=group)
                return outs

            same(run, gloo, ours)


@case
def all_gather_into_tensor(gloo: Any, ours: Any) -> None:
    for name in ("all_gather_single", "all_gather_into_tensor"):

        def run(group: Any, name: str = name) -> Any:
            out = torch.zeros(group.size() * 2, 3)
            getattr(dist, name)(out, mine(group, 2, 3), group=group)
            return [out]

        same(run, gloo, ours)
    stacked = torch.zeros(ours.size(), 2, 3)
    dist.all_gather_single(stacked, mine(ours, 2, 3), group=ours)
    assert torch.equal(stacked, torch.stack([data(rank, 2, 3) for rank in range(ours.size())]))


@case
def reduce_scatter(gloo: Any, ours: Any) -> None:
    def of_lists(group: Any) -> Any:
        out = torch.zeros(3, 2)
        dist.reduce_scatter(out, [mine(group, 3, 2, seed=k) for k in range(group.size())], group=group)
        return [out]

    def of_one(group: Any) -> Any:
        out = torch.zeros(2, 5, dtype=torch.int64)
        dist.reduce_scatter_single(out, mine(group, 2 * group.size(), 5, dtype=torch.int64), group=group)
        return [out]

    def by_the_old_name(group: Any) -> Any:
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, mine(group, 2 * group.size()), dist.ReduceOp.MAX, group=group)
        return [out]

    for run in (of_lists, of_one, by_the_old_name):
        same(run, gloo, ours)


@case
def gather(gloo: Any, ours: Any) -> None:
    for root in range(ours.size()):

        def run(group: Any, root: int = root) -> Any:
            outs = [torch.zeros(4) for _ in range(group.size())] if group.rank() == root else None
            dist.gather(mine(group, 4), outs, group_dst=root, group=group)
            return outs or []

        same(run, gloo, ours)


@case
def scatter(gloo: Any, ours: Any) -> None:
    for root in range(ours.size()):

        def run(group: Any, root: int = root) -> Any:
            out = torch.zeros(2, 2)
            parts = [mine(group, 2, 2, seed=k) for k in range(group.size())] if group.rank() == root else None
            dist.scatter(out, parts, group_src=root, group=group)
            return [out]

        same(run, gloo, ours)


@case
def all_to_all_single(gloo: Any, ours: Any) -> None:
    def equal(group: Any) -> Any:
        out = torch.zeros(2 * group.size(), 3)
        dist.all_to_all_single(out, mine(group, 2 * group.size(), 3), group=group)
        return [out]

    def unequal(group: Any) -> Any:  # rank i sends (i + 2 j) % 4 rows to rank j, which may be none
        n, rank = group.size(), group.rank()
        sent = [(rank + 2 * j) % 4 for j in range(n)]
        received = [(i + 2 * rank) % 4 for i in range(n)]
        out = torch.zeros(sum(received), 2, dtype=torch.int32)
        dist.all_to_all_single(out, mine(group, sum(sent), 2, dtype=torch.int32), received, sent, group=group)
        return [out]

    for run in (equal, unequal, unequal):
        same(run, gloo, ours)


@case
def all_to_all(gloo: Any, ours: Any) -> None:
    n, rank = ours.size(), ours.rank()
    outs = [torch.zeros(i + 2 * rank) for i in range(n)]
    dist.all_to_all(outs, [torch.full((rank + 2 * j,), float(10 * rank + j)) for j in range(n)], group=ours)
    for i, out in enumerate(outs):
        assert torch.equal(out, torch.full((i + 2 * rank,), float(10 * i + rank)))


@case
def an_exchange_does_not_meet_the_users_receives(gloo: Any, ours: Any) -> None:
    n, rank = ours.size(), ours.rank()
    inbox = torch.zeros(1)
    work = dist.irecv(inbox, group_src=(rank - 1) % n, group=ours)
    outs = [torch.zeros(1) for _ in range(n)]
    dist.all_to_all(outs, [torch.tensor([float(rank)])] * n, group=ours)
    dist.isend(torch.tensor([100.0 + rank]), group_dst=(rank + 1) % n, group=ours).wait()
    work.wait()
    assert inbox.item() == 100 + (rank - 1) % n
    assert [out.item() for out in outs] == list(range(n))


@case
def coalesced(gloo: Any, ours: Any) -> None:
    def reduced(group: Any) -> Any:
        xs = [mine(group, 3), mine(group, 2, 2, seed=1)]
        dist.all_reduce_coalesced(xs, group=group)
        return xs

    def managed(group: Any) -> Any:
        xs = [mine(group, 3), mine(group, 2, 2, seed=1)]
        with dist._coalescing_manager(group=group):
            for x in xs:
                dist.all_reduce(x, group=group)
        return xs

    for run in (reduced, managed):
        same(run, gloo, ours)

    n = ours.size()
    gathered = [torch.zeros(n * 3), torch.zeros(n * 2)]
    with dist._coalescing_manager(group=ours, async_ops=True) as manager:
        for k, out in enumerate(gathered):
            dist.all_gather_single(out, mine(ours, len(out) // n, seed=k), group=ours)
    manager.wait()
    for k, out in enumerate(gathered):
        assert torch.equal(out, torch.cat([data(rank, len(out) // n, seed=k) for rank in range(n)]))

    scattered = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager(group=ours):
        for k, out in enumerate(scattered):
            dist.reduce_scatter_single(out, mine(ours, n * len(out), seed=k), group=ours)
    for k, out in enumerate(scattered):
        total = sum(data(rank, n * len(out), seed=k) for rank in range(n))
        assert torch.equal(out, torch.chunk(total, n)[ours.rank()])

    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
    dist.all_gather_coalesced(lists, [mine(ours, 2), mine(ours, 3, seed=1)], group=ours)
    for rank, (first, second) in enumerate(lists):
        assert torch.equal(first, data(rank, 2)) and torch.equal(second, data(rank, 3, seed=1))


@case
def objects(gloo: Any, ours: Any) -> None:
    n, rank = ours.size(), ours.rank()
    everyones: list[Any] = [None] * n
    dist.all_gather_object(everyones, {"rank": rank, "text": "x" * rank}, group=ours)
    assert everyones == [{"rank": r, "text": "x" * r} for r in range(n)]
    said = ["by the root", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(said, group_src=0, group=ours)
    assert said == ["by the root", 0]
    gathered: list[Any] | None = [None] * n if rank == 0 else None
    dist.gather_object((rank,), gathered, group_dst=0, group=ours)
    assert gathered == ([(r,) for r in range(n)] if rank == 0 else None)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"for {r}" for r in range(n)] if rank == 0 else None, group_src=0, group=ours)
    assert part == [f"for {rank}"]


# --- tensors as they come ---


@case
def tensors_that_are_not_contiguous(gloo: Any, ours: Any) -> None:
    n = ours.size()
    whole = mine(ours, 6, 8)
    dist.all_reduce(whole[:, ::2], group=ours)
    dist.broadcast(whole[:, 1], group_src=0, group=ours)
    expected = mine(ours, 6, 8)
    expected[:, ::2] = sum(data(rank, 6, 8)[:, ::2] for rank in range(n))
    expected[:, 1] = data(0, 6, 8)[:, 1]
    assert torch.equal(whole, expected)
    whole = torch.zeros(4, 2 * n)
    work = dist.all_gather_single(whole.t(), mine(ours, 4, 2).t(), group=ours, async_op=True)
    work.wait()
    assert torch.equal(whole, torch.cat([data(rank, 4, 2) for rank in range(n)], dim=1))
    columns = torch.zeros(3, n)
    dist.all_gather([columns[:, r] for r in range(n)], mine(ours, 6)[::2], group=ours)
    assert torch.equal(columns, torch.stack([data(rank, 6)[::2] for rank in range(n)], dim=1))
    image = mine(ours, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(image, group=ours)
    assert torch.equal(image, sum(data(rank, 2, 3, 4, 5) for rank in range(n)))
    inbox = torch.zeros(3, 2)
    received = dist.irecv(inbox[:, 1], group_src=(ours.rank() - 1) % n, group=ours)
    dist.send(mine(ours, 3, 4)[:, 2], group_dst=(ours.rank() + 1) % n, group=ours)
    future = received.get_future()
    assert torch.equal(future.wait()[0], inbox[:, 1])
    assert torch.equal(inbox[:, 1], data((ours.rank() - 1) % n, 3, 4)[:, 2])
    assert not inbox[:, 0].any()


@case
def parameters(gloo: Any, ours: Any) -> None:
    weight = torch.nn.Parameter(mine(ours, 5))
    dist.broadcast(weight, group_src=1, group=ours)
    assert torch.equal(weight.detach(), data(1, 5)) and weight.requires_grad


@case
def what_is_refused(gloo: Any, ours: Any) -> None:
    x, n = torch.ones(2), ours.size()
    supported = "(supported: SUM, PRODUCT, MIN, MAX, AVG)"
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BXOR, dist.ReduceOp.PREMUL_SUM(2.0)):
        refused(UnsupportedType, supported, lambda op=op: dist.all_reduce(x, op, group=ours))
    refused(UnsupportedType, "can't reduce bool", lambda: dist.all_reduce(x.bool(), group=ours))
    refused(UnsupportedType, "can't reduce float8", lambda: dist.all_reduce(x.to(torch.float8_e5m2), group=ours))
    refused(UnsupportedType, "bits8", lambda: ours.broadcast([x.byte().view(torch.bits8)]))
    refused(InvalidArgument, "this backend is cpu only", lambda: dist.all_reduce(x.to("meta"), group=ours))
    refused(InvalidArgument, "to_dense", lambda: dist.all_reduce(x.to_sparse(), group=ours))
    refused(InvalidArgument, "alike", lambda: dist.all_gather([torch.zeros(k) for k in range(n)], x, group=ours))
    refused(InvalidArgument, "each rank's part", lambda: dist.all_gather([torch.zeros(3)] * n, x, group=ours))
    refused(InvalidArgument, "tag 7", lambda: dist.isend(x, group_dst=0, group=ours, tag=7))
    refused(InvalidArgument, "name the source", lambda: ours.recv_anysource([x], 0))
    refused(InvalidArgument, "split", lambda: dist.all_to_all_single(x, x.clone(), [1] * n, [2] * n, group=ours))
    refused(InvalidArgument, "exchange", lambda: dist.all_to_all([x], [x], group=ours))
    refused(InvalidArgument, "divide", lambda: dist.all_gather_single(torch.ones(2 * n + 1), x, group=ours))
    dist.all_reduce(x, group=ours)  # unharmed
    assert torch.equal(x, torch.full((2,), float(n)))


# --- order, and what runs in the background ---


@case
def sends_and_receives_keep_their_order(gloo: Any, ours: Any) -> None:
    n, rank = ours.size(), ours.rank()
    left, right = (rank - 1) % n, (rank + 1) % n
    inbox = [torch.zeros(1 + k) for k in range(20)]
    works = [dist.irecv(box, group_src=left, group=ours) for box in inbox[:10]]
    works += [dist.isend(torch.full((1 + k,), 100.0 * rank + k), group_dst=right, group=ours) for k in range(20)]
    works += [dist.irecv(box, group_src=left, group=ours) for box in inbox[10:]]
    for work in reversed(works):
        work.wait()
    for k, box in enumerate(inbox):
        assert torch.equal(box, torch.full((1 + k,), 100.0 * left + k))


@case
def batches_and_blocking_sends(gloo: Any, ours: Any) -> None:
    def exchanged(group: Any) -> Any:
        n, rank = group.size(), group.rank()
        inbox = torch.zeros(4)
        ops = [
            dist.P2POp(dist.isend, mine(group, 4), group_peer=(rank + 1) % n, group=group),
            dist.P2POp(dist.irecv, inbox, group_peer=(rank - 1) % n, group=group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return [inbox]

    same(exchanged, gloo, ours)
    x = mine(ours, 300000)  # more than fits on the way
    if ours.rank() == 0:
        dist.send(x, group_dst=1, group=ours)
    elif ours.rank() == 1:
        dist.recv(x, group_src=0, group=ours)
        assert torch.equal(x, data(0, 300000))
    outbox, inbox = torch.tensor([5.0]), torch.zeros(1)
    to_self = [dist.isend(outbox, group_dst=ours.rank(), group=ours)]
    to_self.append(dist.irecv(inbox, group_src=ours.rank(), group=ours))
    for work in to_self:
        work.wait()
    assert inbox.item() == 5.0


@case
def a_hundred_random_operations(gloo: Any, ours: Any) -> None:
    chosen, n, rank = random.Random(7), ours.size(), ours.rank()
    works: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for k in range(100):
        count, root, kind = chosen.choice((1, 7, 1000, 50000)), chosen.randrange(n), chosen.randrange(4)
        everyones = [data(r, n * count, seed=k) for r in range(n)]
        x = everyones[rank].clone()
        total = torch.stack(everyones).sum(0)
        if kind == 0:
            works.append((dist.all_reduce(x, group=ours, async_op=True), x, total))
        elif kind == 1:
            works.append((dist.broadcast(x, group_src=root, group=ours, async_op=True), x, everyones[root]))
        elif kind == 2:
            out = torch.zeros(count)
            work = dist.reduce_scatter_single(out, x, group=ours, async_op=True)
            works.append((work, out, total[rank * count : (rank + 1) * count]))
        else:
            out = torch.zeros(n * n * count)
            works.append((dist.all_gather_single(out, x, group=ours, async_op=True), out, torch.cat(everyones)))
    chosen.shuffle(works)
    for k, (work, got, expected) in enumerate(works):
        if k % 3 == 0:
            work.get_future().wait()
        else:
            work.wait()
        assert torch.equal(got, expected)
        assert work.is_completed() and work.is_success() and work.exception() is None


@case
def futures(gloo: Any, ours: Any) -> None:
    n = ours.size()
    x = torch.ones(3)
    work = dist.all_reduce(x, group=ours, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((3,), 2.0 * n))
    assert work.get_future() is work.get_future()
    assert torch.equal(work.result()[0], x)
    # A future does not wait for those that were asked for before it.
    inbox = torch.zeros(1)
    received = dist.irecv(inbox, group_src=(ours.rank() - 1) % n, group=ours)
    late = received.get_future()
    dist.all_reduce(x, group=ours, async_op=True).get_future().wait()
    assert not late.done() and not received.is_completed()
    dist.barrier(group=gloo)
    dist.send(torch.ones(1), group_dst=(ours.rank() + 1) % n, group=ours)
    assert torch.equal(late.wait()[0], torch.ones(1))


# --- what torch builds on process groups ---


@case
def functional_collectives(gloo: Any, ours: Any) -> None:
    def run(group: Any) -> Any:
        n = group.size()
        return [
            functional.all_reduce(mine(group, 4), "sum", group) + 0,
            functional.all_reduce(mine(group, 4), "max", group) + 0,
            functional.all_gather_tensor(mine(group, 2, 3), 0, group) + 0,
            functional.all_gather_tensor(mine(group, 2, 3), 1, group) + 0,
            functional.reduce_scatter_tensor(mine(group, 2 * n, 3), "sum", 0, group) + 0,
            functional.reduce_scatter_tensor(mine(group, 3, 2 * n), "sum", 1, group) + 0,
            functional.all_to_all_single(mine(group, 2 * n), None, None, group) + 0,
            functional.broadcast(mine(group, 4), 1, group) + 0,
            *(x + 0 for x in functional.all_reduce_coalesced([mine(group, 2), mine(group, 3)], "sum", group)),
        ]

    same(run, gloo, ours)
    rank, n = ours.rank(), ours.size()
    sent, received = [1 + rank + j for j in range(n)], [1 + i + rank for i in range(n)]
    got = functional.all_to_all_single(torch.full((sum(sent),), float(rank)), received, sent, ours)
    assert torch.equal(got + 0, torch.cat([torch.full((1 + i + rank,), float(i)) for i in range(n)]))
    refused(UnsupportedType, "can't reduce bool", lambda: functional.all_reduce(torch.ones(2).bool(), "sum", ours) + 0)


@case
def groups_of_some(gloo: Any, ours: Any) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for members in ([0], [0, n - 1], list(range(1, n)), list(range(n))):
        group = dist.new_group(members, backend="commrt")
        assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (rank not in members)
        if rank in members:
            x = torch.tensor([rank + 1])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(member + 1 for member in members)
            assert dist.get_rank(group) == members.index(rank) and dist.get_world_size(group) == len(members)
            assert dist.get_backend(group) == "commrt"
            dist.destroy_process_group(group)
    a, b = (dist.new_group(list(range(n)), backend="commrt") for _ in range(2))
    x, y = torch.ones(50000), torch.ones(50000)
    works = [dist.all_reduce(x, group=a, async_op=True), dist.all_reduce(y, group=b, async_op=True)]
    for work in works:
        work.wait()
    assert x.eq(n).all() and y.eq(n).all()
    dist.destroy_process_group(a)
    assert works[0].get_future().wait()[0] is x


@case
def a_timeout(gloo: Any, ours: Any) -> None:
    group = dist.new_group(backend="commrt", timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        refused(OperationTimeout, "never called by rank 1", lambda: dist.all_reduce(torch.ones(1), group=group))
        refused(CommunicatorBroken, "never called by rank 1", lambda: dist.barrier(group=group))
    dist.barrier(group=ours)
    # A limit for one wait leaves the operation running.
    x = torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, group=ours, async_op=True)
        refused(TimeoutError, "goes on", lambda: work.wait(timedelta(milliseconds=20)))
        dist.barrier(group=gloo)
        work.wait()
    else:
        dist.barrier(group=gloo)
        dist.all_reduce(x, group=ours)
    assert x.item() == ours.size()


@case
def another_timeout_and_abort(gloo: Any, ours: Any) -> None:
    late, given_up = (dist.new_group(backend="commrt", timeout=timedelta(seconds=20)) for _ in range(2))
    late.set_timeout(timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        refused(OperationTimeout, "did not end in time", lambda: dist.irecv(torch.ones(9), 1, late).wait())
        given_up.abort()
    else:
        refused(Aborted, "aborted by rank 0", lambda: dist.barrier(group=given_up))
    dist.barrier(group=gloo)
    begun = time.monotonic()
    for group in (late, given_up):
        dist.destroy_process_group(group)
    assert time.monotonic() - begun < 5
