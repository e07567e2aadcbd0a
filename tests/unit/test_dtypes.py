"""The tables of element types and operators, and what names, numpy and torch dtypes they answer to."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commrt import dtypes
from commrt.dtypes import DType
from commrt.errors import UnsupportedType

# The codes are part of plans, of fingerprints and of the native interface: they never change.
CODES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "complex128"),
]


def numpy_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype.name, dtype.name))


def test_codes_and_names() -> None:
    assert [dtype.name for dtype in dtypes.DTYPES] == CODES
    assert [dtype.code for dtype in dtypes.DTYPES] == list(range(len(CODES)))
    assert [(op.code, op.name) for op in dtypes.REDUCE_OPS] == list(enumerate(("sum", "prod", "min", "max", "avg")))


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_agrees_with_numpy(dtype: DType) -> None:
    described = numpy_type(dtype)
    assert described.itemsize == dtype.itemsize
    assert dtypes.from_numpy(described) is dtype
    assert dtypes.as_dtype(described) is dtype
    assert dtypes.as_dtype(described.type) is dtype
    kinds = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex", "V": "float"}
    assert kinds[described.kind] == dtype.kind


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_found_by_name_code_and_torch(dtype: DType) -> None:
    class TorchDtype:
        def __str__(self) -> str:
            return f"torch.{dtype.name}"

    assert dtypes.by_name(dtype.name) is dtypes.by_code(dtype.code) is dtype
    assert dtypes.as_dtype(dtype) is dtypes.as_dtype(dtype.name) is dtype
    assert dtypes.from_torch(TorchDtype()) is dtypes.as_dtype(TorchDtype()) is dtype


def test_ops_found() -> None:
    for op in dtypes.REDUCE_OPS:
        assert dtypes.as_op(op) is dtypes.as_op(op.name) is dtypes.op_by_code(op.code) is op


@pytest.mark.parametrize(
    "spec", ["float33", "", "FLOAT32", np.dtype("S3"), np.dtype("M8[s]"), np.dtype([("a", "i4")]), str, None, 3]
)
def test_unknown_types_name_the_known(spec: Any) -> None:
    with pytest.raises(UnsupportedType, match=r"supported: bool, int8, .*, complex128"):
        dtypes.as_dtype(spec)


def test_near_names_are_offered() -> None:
    with pytest.raises(UnsupportedType, match="did you mean 'bfloat16'"):
        dtypes.by_name("bflot16")
    with pytest.raises(UnsupportedType, match=r"did you mean 'prod'\? \(supported: sum, prod, min, max, avg\)"):
        dtypes.as_op("product")


@pytest.mark.parametrize("spec", ["xyzzy", None, 0, ["sum"]])
def test_unknown_ops_name_the_known(spec: Any) -> None:
    with pytest.raises(UnsupportedType, match=r"supported: sum, prod, min, max, avg"):
        dtypes.as_op(spec)


@pytest.mark.parametrize("code", [-1, 19, 1 << 40])
def test_unknown_codes(code: int) -> None:
    with pytest.raises(UnsupportedType, match=str(code)):
        dtypes.by_code(code)
    with pytest.raises(UnsupportedType, match=str(code)):
        dtypes.op_by_code(code)


def test_foreign_byte_order_is_refused() -> None:
    foreign = np.dtype(np.float32).newbyteorder()
    with pytest.raises(UnsupportedType, match="byte order"):
        dtypes.from_numpy(foreign)


def test_which_pairs_reduce() -> None:
    movers = {"bool", "complex64", "complex128", *(name for name in CODES if "float8" in name)}
    for dtype in dtypes.DTYPES:
        assert dtypes.supported_ops(dtype) == (() if dtype.name in movers else dtypes.REDUCE_OPS)
        assert (dtype in dtypes.REDUCIBLE) == (dtype.name not in movers)
        for op in dtypes.supported_ops(dtype):
            dtypes.require_op(dtype, op)
    for name in movers:
        with pytest.raises(
            UnsupportedType, match=rf"op sum can't reduce {name}.*supported: .*avg on each of int8, .*float64"
        ):
            dtypes.require_op(dtypes.by_name(name), dtypes.SUM)


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        dtypes.FLOAT32.code = 3  # type: ignore[misc]
    assert DType(11, "float32", "float", 4) == dtypes.FLOAT32
    assert str(dtypes.FLOAT32) == "float32"
    assert str(dtypes.AVG) == "avg"


def test_importing_loads_no_array_library() -> None:
    probe = "import sys, commrt.dtypes; print([m for m in ('numpy', 'torch', 'ml_dtypes') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
