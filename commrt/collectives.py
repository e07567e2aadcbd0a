"""What each collective wants of its arrays: which there are, how their sizes relate, what may alias."""

from __future__ import annotations

import sys
from typing import Any, Literal, NoReturn

import msgspec

from commrt.arrays import Buffer, as_buffer
from commrt.dtypes import as_op, require_op
from commrt.errors import InvalidArgument, UnknownName
from commrt.plan import COLLECTIVES, groups

Shape = Literal["gathered", "scattered", "same"]

REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_SAME_BUFFER = frozenset({"all_reduce", "reduce", "broadcast"})


class Call(msgspec.Struct, frozen=True):
    """A checked call: addresses (0 for none), elements of a group, codes, total bytes for selection."""

    input: int
    output: int
    count: int
    dtype: int
    reduction: int
    nbytes: int


def shapes(rank: int, size: int, collective: str, x: Any, out: Any, op: str, root: int, device: str = "cpu") -> Call:
    """Check a call's arrays, on `device`, against its collective. Raises InvalidArgument and its children."""
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES, rank=rank)
    reduction = as_op(op)
    if collective == "barrier":
        return Call(0, 0, 0, 2, 0, 0)
    check_rank(root, "root", rank, size)
    same = x is out
    source = _wanted(x, "x", has_input(collective, rank, root), same and collective in _SAME_BUFFER, rank, collective)
    target = source if same else _wanted(out, "out", has_output(collective, rank, root), True, rank, collective)
    for name, buffer in (("x", source), ("out", target)):
        if buffer is not None:
            check_device(name, buffer, device, rank)
    one = source or target
    if one is None:
        raise InvalidArgument(f"{collective} without any array", rank=rank, operation=collective)
    if same and collective == "all_to_all" and size > 1:
        _refuse("x and out are the same array (there is no in-place form)", rank, collective)
    if source and target and source.dtype.code != target.dtype.code:
        _refuse(f"x is of {source.dtype}, out of {target.dtype}", rank, collective)
    if collective in REDUCING:
        require_op(one.dtype, reduction)
    count = _count(size, collective, source, target, rank)
    if source and target and source is not target:
        _check_overlap(rank, size, collective, source, target, root)
    nbytes = count * one.dtype.itemsize * max(groups(collective, size))
    return Call(
        source.address if source else 0, target.address if target else 0, count, one.dtype.code,
        reduction.code if collective in REDUCING else 0, nbytes,
    )  # fmt: skip


def check_device(name: str, buffer: Buffer, device: str, rank: int) -> None:
    """Raise InvalidArgument on `rank` for an array that is not where the communicator's arrays are."""
    if buffer.device != device:
        raise InvalidArgument(f"{name} is on {buffer.device!r}, this communicator's arrays on {device!r}", rank=rank)


def check_rank(value: Any, what: str, rank: int, size: int) -> None:
    """Raise InvalidArgument on `rank` for a `what` that is no rank."""
    if not hasattr(value, "__index__") or not 0 <= value < size:
        raise InvalidArgument(f"{what} {value!r} is not in 0..{size - 1}", rank=rank)


def has_input(collective: str, rank: int, root: int) -> bool:
    """Whether `rank` passes an input."""
    return collective != "scatter" or rank == root


def has_output(collective: str, rank: int, root: int) -> bool:
    """Whether `rank` passes an output."""
    return collective not in ("gather", "reduce") or rank == root


def empty_like(x: Any, shape: Shape, size: int) -> Any:
    """An array of x's kind for a result: x by rank, a part of x, or as x. Raises InvalidArgument if it won't divide."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.new_empty(_result_shape(tuple(x.shape), shape, size))
    import numpy

    array = numpy.asarray(x)
    return numpy.empty(_result_shape(array.shape, shape, size), array.dtype)


def _result_shape(shape: tuple[int, ...], kind: Shape, size: int) -> tuple[int, ...]:
    if kind == "same":
        return shape
    if kind == "gathered":
        return (size, *shape)
    if not shape or shape[0] % size:
        raise InvalidArgument(f"shape {shape} does not divide into {size} parts along its first dimension")
    return (shape[0] // size, *shape[1:])


def _wanted(array: Any, name: str, wanted: bool, writable: bool, rank: int, collective: str) -> Buffer | None:
    if not wanted:
        return None
    if array is None:
        _refuse(f"{name} is missing on rank {rank}", rank, collective)
    return as_buffer(array, writable=writable)


def _count(size: int, collective: str, source: Buffer | None, target: Buffer | None, rank: int) -> int:
    """Elements of a group. Input and output must agree on it."""
    counts = []
    for name, buffer, parts in zip(("x", "out"), (source, target), groups(collective, size), strict=True):
        if buffer is None:
            continue
        if buffer.count % parts:
            _refuse(f"{name} has {buffer.count} elements, which {size} ranks don't divide", rank, collective)
        counts.append(buffer.count // parts)
    if len(set(counts)) > 1:
        _refuse(f"x has {counts[0]} elements for each rank's part, out has {counts[1]}", rank, collective)
    return counts[0]


def _check_overlap(rank: int, size: int, collective: str, x: Buffer, out: Buffer, root: int) -> None:
    """Equal buffers are in-place, as is the own part of a longer buffer; any other overlap would lose data."""
    if x.address >= out.address + out.nbytes or out.address >= x.address + x.nbytes or not x.nbytes or not out.nbytes:
        return
    long, short = (out, x) if out.nbytes > x.nbytes else (x, out)
    if collective in _SAME_BUFFER and x.address == out.address:
        return
    parted = collective in ("all_gather", "gather", "reduce_scatter", "scatter")
    if parted and short.address == long.address + rank * short.nbytes:
        return
    hint = "there is no in-place form" if collective == "all_to_all" else "pass the same array, or one's own part"
    _refuse(f"x and out overlap ({hint})", rank, collective)


def _refuse(message: str, rank: int, collective: str) -> NoReturn:
    raise InvalidArgument(f"{collective}: {message}", rank=rank, operation=collective)
