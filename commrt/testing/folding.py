"""The arithmetic of reductions in plain numpy, as every executor must do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def fold(sources: Sequence[Array], reduction: str, divisor: int = 1) -> Array:
    """The sources combined in order, rounded once, narrow floats in float32. For avg, `divisor` divides the sum."""
    dtype = sources[0].dtype
    narrow = dtype.itemsize < 4 and dtype.kind not in "iub"
    wide = np.dtype(np.float32) if narrow else dtype
    combine = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    total = sources[0].astype(wide)
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            total = combine(total, source.astype(wide))
        if reduction == "avg" and divisor > 1:
            total = _divide(total, divisor)
        return total.astype(dtype)


def _divide(total: Array, divisor: int) -> Array:
    by = total.dtype.type(divisor)
    if total.dtype.kind not in "iu":
        scaled: Array = total / by
        return scaled
    quotient: Array = total // by
    rounded: Array = quotient + ((total < 0) & (quotient * by != total)).astype(total.dtype)  # towards zero
    return rounded
