"""What torch hands over, as a communicator takes it: operators by name, contiguous tensors on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp

from commrt.errors import InvalidArgument, UnsupportedType

DEVICE = "cpu"  # torch's name, and that of commrt's backend
REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.AVG: "avg",
}

_Item = TypeVar("_Item")


def reduction(op: Any) -> str:
    """commrt's name of a `torch.distributed.ReduceOp`. Raises UnsupportedType."""
    name = REDUCTIONS.get(op.op)
    if name is None:
        known = ", ".join(one.name for one in REDUCTIONS)
        raise UnsupportedType(f"ReduceOp.{op.op.name} is not supported (supported: {known})")
    return name


def only(items: Sequence[_Item]) -> _Item:
    """The one item of a list: torch wraps tensors so, from the time of several devices in a process."""
    if len(items) != 1:
        raise InvalidArgument(f"one tensor is expected for a process, not {len(items)}")
    return items[0]


class Staging:
    """The tensors of one operation. Those that don't lie contiguously are copied, and results copied back by `finish`.

    Raises InvalidArgument for those that are not on `DEVICE`.
    """

    def __init__(self) -> None:
        self._back: list[tuple[Any, Any]] = []  # home, stand-in

    def source(self, tensor: Any) -> Any:
        """To be read."""
        return self._plain(tensor).contiguous()

    def target(self, tensor: Any) -> Any:
        """To be written, in whole."""
        home = self._plain(tensor)
        return home if home.is_contiguous() else self._stand_in(home, torch.empty(home.shape, dtype=home.dtype))

    def both(self, tensor: Any) -> Any:
        """To be read and written."""
        home = self._plain(tensor)
        return home if home.is_contiguous() else self._stand_in(home, home.contiguous())

    def sources(self, tensors: Sequence[Any]) -> Any:
        """One tensor with all of these, which are alike, behind each other."""
        return torch.stack([self._plain(tensor) for tensor in self._alike(tensors)])

    def targets(self, tensors: Sequence[Any]) -> Any:
        """One tensor to be written, from which each of these, which are alike, gets its part."""
        first = self._alike(tensors)[0]
        whole = torch.empty((len(tensors), *first.shape), dtype=first.dtype)
        for part, tensor in zip(whole, tensors, strict=True):
            self._stand_in(self._plain(tensor), part)
        return whole

    def finish(self) -> None:
        """The results to where they belong."""
        for home, stand_in in self._back:
            home.copy_(stand_in)
        self._back.clear()

    def _stand_in(self, home: Any, tensor: Any) -> Any:
        self._back.append((home, tensor))
        return tensor

    def _plain(self, tensor: Any) -> Any:
        """The tensor's memory, out of autograd's sight."""
        if tensor.device.type != DEVICE:
            raise InvalidArgument(f"a tensor is on {tensor.device}, this backend is {DEVICE} only: pass x.cpu()")
        if tensor.layout is not torch.strided:
            raise InvalidArgument(f"a {tensor.layout} tensor has no single block of memory: pass x.to_dense()")
        return tensor.detach()

    def _alike(self, tensors: Sequence[Any]) -> Sequence[Any]:
        for tensor in tensors:
            if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
                both = f"{tuple(tensors[0].shape)} {tensors[0].dtype}, {tuple(tensor.shape)} {tensor.dtype}"
                raise InvalidArgument(f"the tensors of a list have to be alike, these are not: {both}")
        return tensors
