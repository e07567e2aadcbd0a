"""Arrays of every protocol as memory: where it is, how long it lives, and what is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt import arrays, dtypes
from commrt.arrays import Buffer, as_buffer
from commrt.errors import InvalidArgument, UnsupportedType

EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
PLAIN = tuple(dtype.name for dtype in dtypes.DTYPES if dtype.name not in EXTENDED)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in EXTENDED else name)


def memory(buffer: Buffer) -> bytes:
    """What lies at the address, read with no help from the array's library."""
    return ctypes.string_at(buffer.address, buffer.nbytes)


# --- numpy ---


@pytest.mark.parametrize("name", PLAIN + EXTENDED)
@pytest.mark.parametrize("writable", [True, False])
def test_numpy_of_every_type(name: str, writable: bool) -> None:
    x = np.arange(6).astype(numpy_dtype(name)).reshape(2, 3)
    x.flags.writeable = writable
    buffer = as_buffer(x, writable=writable)
    assert buffer.address == x.__array_interface__["data"][0]
    assert memory(buffer) == x.tobytes()
    assert (buffer.count, buffer.nbytes, buffer.shape, buffer.device) == (6, x.nbytes, (2, 3), "cpu")
    assert buffer.dtype is dtypes.by_name(name)
    assert buffer.owner is x


def test_views_start_where_they_start() -> None:
    x = np.arange(10, dtype=np.int16)
    assert as_buffer(x[3:], writable=True).address == as_buffer(x, writable=True).address + 6
    raw = np.zeros(33, np.uint8)
    unaligned = raw[1:].view(np.float64)
    assert as_buffer(unaligned, writable=True).address == as_buffer(raw, writable=True).address + 1


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_and_scalar_arrays(shape: tuple[int, ...]) -> None:
    buffer = as_buffer(np.ones(shape, np.float32), writable=True)
    assert (buffer.shape, buffer.count, buffer.nbytes) == (shape, int(np.prod(shape)), 4 * int(np.prod(shape)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_contiguity_is_numpys(shape: list[int], data: st.DataObject) -> None:
    """A strided view is taken if and only if numpy calls it contiguous, by numpy's way and by DLPack's."""
    whole = np.arange(int(np.prod([2 * n for n in shape])), dtype=np.int32).reshape([2 * n for n in shape])
    steps = [data.draw(st.sampled_from([1, 2])) for _ in shape]
    view = whole[tuple(slice(0, n * step, step) for n, step in zip(shape, steps, strict=True))]
    for obj in (view, Exporter(view), CudaLike(view)):
        if view.flags.c_contiguous:
            assert memory(as_buffer(obj, writable=True)) == view.tobytes()
        else:
            with pytest.raises(InvalidArgument, match="not contiguous"):
                as_buffer(obj, writable=True)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 4))[:, 1], r"of shape \(4,\) is not contiguous .* pass numpy.ascontiguousarray"),
        (np.zeros((4, 3), order="F"), "not contiguous in row-major order"),
        (np.broadcast_to(np.zeros(1), (4,)), "not contiguous"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "would lose its mask: pass x.filled"),
    ],
)
def test_numpy_refused_whether_read_or_written(x: Any, message: str) -> None:
    for writable in (True, False):
        with pytest.raises(InvalidArgument, match=message):
            as_buffer(x, writable=writable)


@pytest.mark.parametrize(
    "dtype", [">f4", ">i8", "object", "S3", "U3", "M8[s]", "m8[s]", "V4", [("a", "i4")], np.longdouble]
)
def test_numpy_of_other_types(dtype: Any) -> None:
    with pytest.raises(UnsupportedType, match=r"supported: .*float32|byte order"):
        as_buffer(np.zeros(3, dtype), writable=True)


@pytest.mark.skipif(sys.byteorder != "little", reason="names a byte order by its foreign letter")
def test_refusal_of_a_type_changes_nothing_for_the_next() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedType):
            as_buffer(np.zeros(3, ">f4"), writable=True)
        assert as_buffer(np.zeros(3, "<f4"), writable=True).count == 3


# --- every protocol: read-only and lifetime ---


class Exporter:
    """An array that speaks DLPack only; `versioned=False` is an exporter from before DLPack had versions."""

    def __init__(self, x: Any, versioned: bool = True, device: tuple[int, int] = (1, 0)) -> None:
        self.x, self.versioned, self.device = x, versioned, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if "max_version" in options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.x.__dlpack__(**options)


class CudaLike:
    """Something with __cuda_array_interface__, its memory on the CPU for the sake of the test."""

    def __init__(self, x: Any, **changes: Any) -> None:
        self.x, self.changes = x, changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.x.__array_interface__, "version": 3, **self.changes}


def read_only_numpy() -> Any:
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    return x


READ_ONLY: list[Callable[[], Any]] = [
    read_only_numpy,
    lambda: Exporter(read_only_numpy()),
    lambda: CudaLike(read_only_numpy()),
    lambda: b"0123",
    lambda: memoryview(bytearray(4)).toreadonly(),
    lambda: np.float32(1),
]


@pytest.mark.parametrize("make", READ_ONLY)
def test_read_only_may_be_read_but_not_written(make: Callable[[], Any]) -> None:
    assert as_buffer(make(), writable=False).count > 0
    with pytest.raises(InvalidArgument, match="is read-only and would be written: pass a writable copy"):
        as_buffer(make(), writable=True)


class Tracked(np.ndarray[Any, Any]):
    """numpy arrays that can be referred to weakly."""


@pytest.mark.parametrize(
    "wrap", [lambda x: x, Exporter, lambda x: Exporter(x, versioned=False), CudaLike, memoryview], ids=range(5)
)
def test_memory_lives_exactly_as_long_as_the_buffer(wrap: Callable[[Any], Any]) -> None:
    x = np.arange(5, dtype=np.int32).view(Tracked)
    gone = weakref.ref(x)
    expected = x.tobytes()
    buffer = as_buffer(wrap(x), writable=True)
    del x
    gc.collect()
    assert gone() is not None
    assert memory(buffer) == expected
    del buffer
    gc.collect()
    assert gone() is None


# --- DLPack ---


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_of_every_type_numpy_exports(name: str, versioned: bool) -> None:
    x = np.arange(6).astype(name).reshape(2, 3)
    buffer = as_buffer(Exporter(x, versioned), writable=True)
    assert memory(buffer) == x.tobytes()
    assert (buffer.dtype.name, buffer.shape, buffer.device) == (name, (2, 3), "cpu")


@pytest.mark.parametrize(
    ("device", "name"), [(1, "cpu"), (2, "cuda"), (3, "cpu"), (10, "hip"), (11, "cpu"), (13, "cuda")]
)
def test_dlpack_devices(device: int, name: str) -> None:
    asked: list[dict[str, Any]] = []
    made = Capsule()

    class Foreign(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            asked.append(options)
            return made.capsule()

    assert as_buffer(Foreign(None, device=(device, 0)), writable=True).device == name
    assert asked == [{"max_version": (1, 0)} if name == "cpu" else {"max_version": (1, 0), "stream": -1}]


def test_dlpack_device_without_a_backend() -> None:
    with pytest.raises(InvalidArgument, match="no backend for"):
        as_buffer(Exporter(np.zeros(3), device=(8, 0)), writable=True)


class Capsule:
    """A hand-made versioned DLPack capsule of six int32, to be spoilt field by field."""

    def __init__(self, **fields: Any) -> None:
        self.data = (ctypes.c_int32 * 6)(*range(6))
        self.shape = (ctypes.c_int64 * 100)(2, 3, *[1] * 98)
        self.managed = arrays._DLManagedTensorVersioned(major=1, minor=0)
        self.strides = (ctypes.c_int64 * 2)(3, 1)
        tensor = self.managed.tensor
        tensor.data, tensor.device_type, tensor.ndim = ctypes.addressof(self.data), 1, 2
        tensor.code, tensor.bits, tensor.lanes = 0, 32, 1
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        self.name = fields.pop("name", b"dltensor_versioned")
        for name, value in fields.items():
            if name == "sizes":
                self.shape[:2] = value
            else:
                setattr(tensor if hasattr(tensor, name) else self.managed, name, value)

    def capsule(self) -> Any:
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        return new(ctypes.addressof(self.managed), self.name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule()


def test_dlpack_byte_offset_and_missing_strides() -> None:
    made = Capsule(byte_offset=4, sizes=(1, 5), strides=None)
    buffer = as_buffer(made, writable=True)
    assert memory(buffer) == bytes(made.data)[4:]
    assert buffer.shape == (1, 5)


@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [
        *((4, 16, "bfloat16"), (6, 8, "bool"), (5, 64, "complex64")),
        *((10, 8, "float8_e4m3fn"), (11, 8, "float8_e4m3fnuz"), (12, 8, "float8_e5m2"), (13, 8, "float8_e5m2fnuz")),
    ],
)
def test_dlpack_types_beyond_numpys(code: int, bits: int, name: str) -> None:
    buffer = as_buffer(Capsule(code=code, bits=bits), writable=True)
    assert buffer.dtype is dtypes.by_name(name)
    assert buffer.nbytes == 6 * bits // 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"major": 2}, "DLPack version 2 is not supported"),
        ({"flags": 2}, "exports only a copy of itself"),
        ({"flags": 1}, "read-only"),
        ({"ndim": 65}, "65 dimensions"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"sizes": (2, -3)}, "negative size"),
        ({"lanes": 2}, "int32 x 2"),
        ({"code": 3}, "code 3"),
        ({"code": 6, "bits": 1}, "bool1"),
        ({"code": 0, "bits": 4}, "int4"),
        ({"code": 10, "bits": 16}, "float8_e4m3fn"),
        ({"name": b"used_dltensor_versioned"}, "unused DLPack capsule"),
        ({"name": b"other"}, "unused DLPack capsule"),
    ],
)
def test_dlpack_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        as_buffer(Capsule(**fields), writable=True)


def test_dlpack_exporters_own_refusal_is_told() -> None:
    class Refuses(Exporter):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("it is on loan")

    with pytest.raises(InvalidArgument, match="Refuses can't be exported by DLPack: it is on loan"):
        as_buffer(Refuses(None), writable=False)


def test_jax_arrays_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exporter, "__module__", "jaxlib.xla_extension")
    obj = Exporter(np.zeros(3), versioned=False)
    assert as_buffer(obj, writable=False).count == 3
    with pytest.raises(InvalidArgument, match="read-only"):
        as_buffer(obj, writable=True)


# --- __cuda_array_interface__ ---


def test_cuda_array_interface() -> None:
    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    buffer = as_buffer(CudaLike(x), writable=True)
    assert (buffer.device, buffer.shape, buffer.dtype.name, buffer.nbytes) == ("cuda", (2, 3), "float16", 12)
    assert memory(buffer) == x.tobytes()
    assert as_buffer(CudaLike(x, shape=(0,), data=(None, False)), writable=True).nbytes == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": object()}, "would lose its mask"),
        ({"typestr": ">f2"}, ">f2"),
        ({"typestr": "|O8"}, "O8"),
        ({"typestr": ""}, "malformed"),
        ({"data": 7}, "malformed"),
        ({"shape": (-1,)}, "negative size"),
        ({"strides": (1,)}, "malformed"),
    ],
)
def test_cuda_array_interface_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        as_buffer(CudaLike(np.zeros((2, 3), np.float16), **changes), writable=True)


# --- the buffer protocol ---


@pytest.mark.parametrize(
    ("obj", "name", "shape"),
    [
        (bytearray(b"abc"), "uint8", (3,)),
        (memoryview(bytearray(8)).cast("d"), "float64", (1,)),
        (memoryview(bytearray(12)).cast("B").cast("h", (2, 3)), "int16", (2, 3)),
        (array.array("l", [1, 2]), f"int{8 * array.array('l').itemsize}", (2,)),
        (array.array("f", [1, 2]), "float32", (2,)),
        (((ctypes.c_uint16 * 3) * 2)(), "uint16", (2, 3)),
        (ctypes.create_string_buffer(4), "uint8", (4,)),
        ((ctypes.c_bool * 2)(), "bool", (2,)),
        (ctypes.c_double(1), "float64", ()),
        (bytearray(), "uint8", (0,)),
    ],
)
def test_buffer_protocol(obj: Any, name: str, shape: tuple[int, ...]) -> None:
    buffer = as_buffer(obj, writable=True)
    assert (buffer.dtype.name, buffer.shape, buffer.device) == (name, shape, "cpu")
    assert memory(buffer) == bytes(memoryview(obj))
    if buffer.count:
        ctypes.memset(buffer.address, 0x01, buffer.nbytes)
        assert bytes(memoryview(obj)) == b"\x01" * buffer.nbytes


def test_bytearray_cannot_be_resized_while_in_use() -> None:
    raw = bytearray(4)
    buffer = as_buffer(raw, writable=True)
    with pytest.raises(BufferError):
        raw.extend(b"more")
    del buffer
    raw.extend(b"more")


def test_mapped_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mapped")
    with open(tmp_path / "file", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        buffer = as_buffer(mapped, writable=False)
        assert memory(buffer) == b"mapped"
        del buffer


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ([1.0, 2.0], "list is not an array .*: pass a numpy or torch array"),
        ("text", "str is not an array"),
        (None, "NoneType is not an array"),
        (memoryview(bytearray(8))[::2], "not contiguous .* pass a contiguous copy"),
    ],
)
def test_not_an_array(obj: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        as_buffer(obj, writable=False)


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int)]


@pytest.mark.parametrize("obj", [(Pair * 2)(), (ctypes.c_void_p * 2)(), (ctypes.c_int.__ctype_be__ * 2)()])
def test_buffers_of_other_types(obj: Any) -> None:
    with pytest.raises(UnsupportedType, match=r"buffer format .*float32"):
        as_buffer(obj, writable=True)


# --- torch ---


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name in PLAIN + EXTENDED:
        x = torch.zeros(2, 3).to(getattr(torch, name))
        buffer = as_buffer(x, writable=True)
        assert (buffer.address, buffer.dtype.name, buffer.shape) == (x.data_ptr(), name, (2, 3))
        assert (buffer.device, buffer.count, buffer.nbytes) == ("cpu", 6, 6 * x.element_size())
    assert as_buffer(torch.zeros(0), writable=True).nbytes == 0
    assert as_buffer(torch.zeros(3, requires_grad=True), writable=False).count == 3
    assert as_buffer(torch.nn.Parameter(torch.zeros(3)).detach(), writable=True).count == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("torch.zeros(4, 4).t()[1:]", "x.contiguous()"),
        ("torch.zeros(4).expand(3, 4)", "x.contiguous()"),
        ("torch.eye(3).to_sparse()", "x.to_dense()"),
        ("torch.zeros(3, dtype=torch.complex64).conj()", "resolve_conj"),
        ("torch.zeros(3, requires_grad=True)", "x.detach()"),
        ("torch.zeros(3, device='meta')", "'meta'"),
        ("torch.zeros(3).to(torch.float8_e8m0fnu)", "float8_e8m0fnu"),
    ],
)
def test_torch_refusals(make: str, message: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(InvalidArgument) as raised:
        as_buffer(eval(make, {"torch": torch}), writable=True)
    assert message in str(raised.value)


class Tensor:
    """The part of a torch tensor that is looked at, so that the way through it is tested without torch."""

    layout = "strided"
    dtype = "torch.bfloat16"
    shape = (2, 3)
    requires_grad = False

    def __init__(self, device: str) -> None:
        self.device = SimpleNamespace(type=device)

    def is_contiguous(self) -> bool:
        return True

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def numel(self) -> int:
        return 6

    def data_ptr(self) -> int:
        return 4096


@pytest.mark.parametrize(("hip", "expected"), [(None, "cuda"), ("7.0", "hip")])
def test_torch_on_a_device(monkeypatch: pytest.MonkeyPatch, hip: str | None, expected: str) -> None:
    fake = SimpleNamespace(Tensor=Tensor, strided="strided", version=SimpleNamespace(hip=hip))
    monkeypatch.setitem(sys.modules, "torch", fake)
    arrays._cached_reader.cache_clear()
    try:
        buffer = as_buffer(Tensor("cuda"), writable=True)
        assert (buffer.device, buffer.dtype.name, buffer.address, buffer.nbytes) == (expected, "bfloat16", 4096, 12)
    finally:
        arrays._cached_reader.cache_clear()
