"""What another library can carry, as selection sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from commrt.collectives import REDUCING
from commrt.dtypes import DTYPES, REDUCE_OPS, DType, ReduceOp
from commrt.provider import Provider


class Element(NamedTuple):
    """What a call is made of."""

    dtype: DType
    op: ReduceOp


@dataclass(frozen=True)
class Carried:
    """A collective as a library carries it, in the place of an algorithm. How is the library's affair."""

    collective: str
    provider: Provider

    @property
    def name(self) -> str:
        """The library's name."""
        return self.provider.name

    def unfit(self, element: Element | None) -> str:
        """Why it can't carry these elements (None: any at all); empty if it can."""
        offered = [
            Element(dtype, op)
            for dtype in DTYPES
            for op in (REDUCE_OPS if self.collective in REDUCING else REDUCE_OPS[:1])
            if self.provider.supports(self.collective, dtype.name, op.name)
        ]
        if self.collective not in REDUCING and element is not None:
            element = Element(element.dtype, REDUCE_OPS[0])
        if (offered and element is None) or element in offered:
            return ""
        if not offered or element is None:
            return f"has no {self.collective}"
        ops = [op.name for op in REDUCE_OPS if Element(element.dtype, op) in offered]
        dtypes = [dtype.name for dtype in DTYPES if Element(dtype, element.op) in offered]
        what = f"{element.dtype} with op {element.op}" if self.collective in REDUCING else f"{element.dtype}"
        return (
            f"does not support {what} (ops for {element.dtype}: {', '.join(ops) or 'none'}; "
            f"dtypes for {element.op}: {', '.join(dtypes) or 'none'})"
        )
