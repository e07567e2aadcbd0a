"""Element types and reduction operators: their names, codes and sizes, and which pairs commrt can reduce.

The codes are those of the native core. Names are numpy's (and ml_dtypes' for the extended floats), which torch shares.
Nothing here imports numpy, ml_dtypes or torch: their dtypes are read by what they say of themselves.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from commrt.errors import UnsupportedType

Kind = Literal["bool", "int", "uint", "float", "complex"]


@dataclass(frozen=True)
class DType:
    """An element type. There is one object a type: compare with `is` or `==`. `itemsize` is in bytes."""

    code: int
    name: str
    kind: Kind
    itemsize: int

    def __str__(self) -> str:
        return self.name

    @property
    def extended(self) -> bool:
        """Whether numpy itself lacks it, and ml_dtypes has it."""
        return self.name.startswith(("bfloat", "float8"))

    def to_numpy(self) -> Any:
        """The numpy dtype object, which there is one of. Raises UnsupportedType if ml_dtypes has it and is missing."""
        import numpy

        if not self.extended:
            return numpy.dtype(self.name)
        try:
            import ml_dtypes
        except ImportError:
            raise UnsupportedType(f"numpy has no {self.name}: install ml_dtypes") from None
        return numpy.dtype(getattr(ml_dtypes, self.name))


@dataclass(frozen=True)
class ReduceOp:
    """A reduction operator. There is one object an operator."""

    code: int
    name: str

    def __str__(self) -> str:
        return self.name


BOOL = DType(0, "bool", "bool", 1)
INT8 = DType(1, "int8", "int", 1)
UINT8 = DType(2, "uint8", "uint", 1)
INT16 = DType(3, "int16", "int", 2)
UINT16 = DType(4, "uint16", "uint", 2)
INT32 = DType(5, "int32", "int", 4)
UINT32 = DType(6, "uint32", "uint", 4)
INT64 = DType(7, "int64", "int", 8)
UINT64 = DType(8, "uint64", "uint", 8)
FLOAT16 = DType(9, "float16", "float", 2)
BFLOAT16 = DType(10, "bfloat16", "float", 2)
FLOAT32 = DType(11, "float32", "float", 4)
FLOAT64 = DType(12, "float64", "float", 8)
FLOAT8_E4M3FN = DType(13, "float8_e4m3fn", "float", 1)
FLOAT8_E5M2 = DType(14, "float8_e5m2", "float", 1)
FLOAT8_E4M3FNUZ = DType(15, "float8_e4m3fnuz", "float", 1)
FLOAT8_E5M2FNUZ = DType(16, "float8_e5m2fnuz", "float", 1)
COMPLEX64 = DType(17, "complex64", "complex", 8)
COMPLEX128 = DType(18, "complex128", "complex", 16)

DTYPES: tuple[DType, ...] = (
    *(BOOL, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64),
    *(FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E4M3FNUZ, FLOAT8_E5M2FNUZ, COMPLEX64, COMPLEX128),
)
REDUCIBLE: tuple[DType, ...] = DTYPES[INT8.code : FLOAT64.code + 1]

SUM = ReduceOp(0, "sum")
PROD = ReduceOp(1, "prod")
MIN = ReduceOp(2, "min")
MAX = ReduceOp(3, "max")
AVG = ReduceOp(4, "avg")
REDUCE_OPS: tuple[ReduceOp, ...] = (SUM, PROD, MIN, MAX, AVG)

_DTYPES = MappingProxyType({dtype.name: dtype for dtype in DTYPES})
_REDUCE_OPS = MappingProxyType({op.name: op for op in REDUCE_OPS})
_NATIVE_ORDERS = ("=", "|", "<" if sys.byteorder == "little" else ">")


def by_name(name: str) -> DType:
    """The type of that name. Raises UnsupportedType with the names there are."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise _unknown("dtype", name, _DTYPES) from None


def by_code(code: int) -> DType:
    """The type of that code. Raises UnsupportedType if there is none."""
    if 0 <= code < len(DTYPES):
        return DTYPES[code]
    raise UnsupportedType(f"no dtype has code {code} (known: 0 to {len(DTYPES) - 1})")


def from_numpy(dtype: Any) -> DType:
    """The type that a `numpy.dtype` describes, ml_dtypes' included. Raises UnsupportedType: byte order counts."""
    if dtype.byteorder not in _NATIVE_ORDERS:
        raise UnsupportedType(
            f"dtype {dtype.str!r} is not in this machine's byte order: convert it with astype() first"
        )
    return by_name(dtype.name)


def from_torch(dtype: Any) -> DType:
    """The type that a `torch.dtype` describes. Raises UnsupportedType."""
    return by_name(str(dtype).removeprefix("torch."))


def as_dtype(spec: Any) -> DType:
    """The type meant by a DType, a name, a numpy or torch dtype, or a scalar class such as `numpy.float32`.

    Raises UnsupportedType with the names there are.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, type):
        return by_name(spec.__name__.removesuffix("_"))
    if hasattr(spec, "byteorder"):
        return from_numpy(spec)
    return from_torch(spec)


def op_by_code(code: int) -> ReduceOp:
    """The operator of that code. Raises UnsupportedType if there is none."""
    if 0 <= code < len(REDUCE_OPS):
        return REDUCE_OPS[code]
    raise UnsupportedType(f"no reduction op has code {code} (known: 0 to {len(REDUCE_OPS) - 1})")


def as_op(spec: ReduceOp | str) -> ReduceOp:
    """The operator meant by a ReduceOp or a name. Raises UnsupportedType with the names there are."""
    if isinstance(spec, ReduceOp):
        return spec
    try:
        return _REDUCE_OPS[spec]
    except (KeyError, TypeError):
        raise _unknown("reduction op", spec, _REDUCE_OPS) from None


def supported_ops(dtype: DType) -> tuple[ReduceOp, ...]:
    """The operators that reduce elements of this type; none for a type that can only be moved."""
    return REDUCE_OPS if INT8.code <= dtype.code <= FLOAT64.code else ()


def require_op(dtype: DType, op: ReduceOp) -> None:
    """Raise UnsupportedType, naming the pairs there are, unless `op` reduces elements of `dtype`."""
    if op not in supported_ops(dtype):
        raise UnsupportedType(
            f"op {op} can't reduce {dtype}, which can only be moved "
            f"(supported: each of {_list(REDUCE_OPS)} on each of {_list(REDUCIBLE)})"
        )


def _unknown(what: str, name: Any, known: Iterable[str]) -> UnsupportedType:
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnsupportedType(f"unknown {what} {str(name)!r}{hint} (supported: {_list(known)})")


def _list(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
