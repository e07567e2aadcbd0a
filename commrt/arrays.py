"""Arrays of any library, seen as memory.

`as_buffer` takes what users have: numpy and torch arrays, whatever speaks DLPack or `__cuda_array_interface__`, and the
buffer protocol (bytearray, memoryview, array.array, ctypes arrays). Nothing is copied, no library is imported.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from commrt import dtypes
from commrt.dtypes import DType
from commrt.errors import InvalidArgument, UnsupportedType

if TYPE_CHECKING:
    from commrt.backend import Backend, Memory

MAX_DIMENSIONS = 64


class Buffer(msgspec.Struct, frozen=True, eq=False):
    """Contiguous elements in memory, in row-major order. The memory stays valid as long as the Buffer does.

    `address` is 0 or meaningless where `count` is 0. `device` is the name of a backend. `owner` keeps the memory alive
    and, where the library can do that, from being resized.
    """

    address: int
    nbytes: int
    count: int
    dtype: DType
    device: str
    shape: tuple[int, ...]
    owner: Any


def on_device(backend: Backend, memory: Memory, count: int, dtype: str = "uint8") -> Buffer:
    """An array of `count` elements at the start of a backend's memory, where no library of arrays is at hand."""
    kind = dtypes.by_name(dtype)
    return Buffer(memory.address, count * kind.itemsize, count, kind, backend.name, (count,), memory)


def as_buffer(obj: Any, *, writable: bool) -> Buffer:
    """The memory of an array, to be read, or also written if `writable`. Callable from any thread. Buffers stay as is.

    Raises InvalidArgument, with what to do instead, for what is not an array, not contiguous, or read-only where it
    would be written; UnsupportedType for an element type that commrt doesn't have.
    """
    return _reader(type(obj))(obj, writable)


# --- choosing a protocol, once a type ---

_Reader = Callable[[Any, bool], Buffer]


def _choose_reader(cls: type) -> _Reader:
    if cls is Buffer:
        return lambda buffer, writable: buffer
    if _is_a(cls, "numpy", "ndarray"):
        return _refuse_masked if hasattr(cls, "mask") else _from_numpy
    if _is_a(cls, "torch", "Tensor"):
        return _from_torch
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return _from_dlpack
    if hasattr(cls, "__cuda_array_interface__"):
        return _from_cuda_array_interface
    return _from_buffer_protocol


# Bounded, so that classes made by the thousand don't live for ever.
_cached_reader = functools.lru_cache(maxsize=256)(_choose_reader)
_reader: Callable[[type], _Reader] = _cached_reader


def _is_a(cls: type, module: str, name: str) -> bool:
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(cls, base)


# --- numpy and torch, the short ways ---

# numpy's C ABI puts the address of the data right behind Python's object header. Reading it there takes a fifth of the
# time of __array_interface__, and serves the types that numpy doesn't export as buffers (bfloat16).
_IS_CPYTHON = sys.implementation.name == "cpython"
_HEADER_NBYTES = object.__basicsize__
_pointer_at = ctypes.c_void_p.from_address


def _from_numpy(array: Any, writable: bool) -> Buffer:
    flags = array.flags
    if not flags.c_contiguous:
        raise _not_contiguous(array, array.shape, "numpy.ascontiguousarray(x)")
    if writable and not flags.writeable:
        raise _read_only(array)
    dtype = _numpy_dtype(array.dtype)
    if _IS_CPYTHON:
        address = _pointer_at(id(array) + _HEADER_NBYTES).value or 0
    else:
        address = array.__array_interface__["data"][0]
    return Buffer(address, array.nbytes, array.size, dtype, "cpu", array.shape, array)


def _refuse_masked(array: Any, writable: bool) -> Buffer:
    raise InvalidArgument(f"{_type_name(array)} would lose its mask: pass x.filled(value) or x.data")


def _from_torch(tensor: Any, writable: bool) -> Buffer:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"a {tensor.layout} tensor has no single block of memory: pass x.to_dense()")
    if not tensor.is_contiguous():
        raise _not_contiguous(tensor, tensor.shape, "x.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument("the tensor is a lazy conjugate or negative: pass x.resolve_conj().resolve_neg()")
    if writable and tensor.requires_grad:
        raise InvalidArgument("the tensor requires grad and would be written behind autograd's back: pass x.detach()")
    dtype = _torch_dtype(tensor.dtype)
    count = tensor.numel()
    nbytes = count * dtype.itemsize
    return Buffer(tensor.data_ptr(), nbytes, count, dtype, _torch_device(tensor), tuple(tensor.shape), tensor)


def _torch_device(tensor: Any) -> str:
    kind: str = tensor.device.type
    if kind == "cuda":
        return "hip" if sys.modules["torch"].version.hip else "cuda"
    if kind != "cpu":
        raise InvalidArgument(f"tensors on {kind!r} are not supported: pass x.cpu()")
    return kind


# --- DLPack (its header's structures, version 1.x and the unversioned one) ---

_DLPACK_VERSION = (1, 0)
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "hip", 11: "cpu", 13: "cuda"}
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_FLOAT8 = {10: "e4m3fn", 11: "e4m3fnuz", 12: "e5m2", 13: "e5m2fnuz"}
_DLPACK_READ_ONLY, _DLPACK_COPIED = 1, 2


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


# Own prototypes: setting argtypes on ctypes.pythonapi's functions would change them for everyone.
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _from_dlpack(obj: Any, writable: bool) -> Buffer:
    device = _DLPACK_DEVICES.get(int(obj.__dlpack_device__()[0]))
    if device is None:
        raise InvalidArgument(
            f"{_type_name(obj)} is on a device that commrt has no backend for: pass a copy on the CPU"
        )
    capsule = _dlpack_export(obj, device)
    tensor, flags = _dlpack_tensor(capsule)
    if writable and (flags & _DLPACK_READ_ONLY or _is_immutable(obj)):
        raise _read_only(obj)
    if writable and flags & _DLPACK_COPIED:
        raise InvalidArgument(
            f"{_type_name(obj)} exports only a copy of itself, so a result written to it would be lost"
        )
    shape = _bounded_shape(obj, tensor.ndim, tensor.shape)
    if tensor.strides and not _is_compact(shape, tensor.strides[: tensor.ndim], 1):
        raise _not_contiguous(obj, shape)
    dtype = _dlpack_dtype(tensor.code, tensor.bits, tensor.lanes)
    # The capsule is left unconsumed: it frees the exporter's tensor when the Buffer lets go of it.
    return _described((tensor.data or 0) + tensor.byte_offset, dtype, device, shape, capsule)


def _dlpack_export(obj: Any, device: str) -> Any:
    # A device's order is the caller's matter (stream=), so the exporter is asked not to synchronise.
    stream = {} if device == "cpu" else {"stream": -1}
    try:
        try:
            return obj.__dlpack__(**stream, max_version=_DLPACK_VERSION)
        except TypeError:  # an exporter from before versions
            return obj.__dlpack__(**stream)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{_type_name(obj)} can't be exported by DLPack: {error}") from error


def _dlpack_tensor(capsule: Any) -> tuple[_DLTensor, int]:
    """The tensor inside a capsule, valid while the capsule lives, and its flags."""
    if _capsule_is(capsule, b"dltensor_versioned"):
        pointer = _capsule_pointer(capsule, b"dltensor_versioned")
        versioned = _DLManagedTensorVersioned.from_address(pointer)
        if versioned.major != _DLPACK_VERSION[0]:
            raise InvalidArgument(f"DLPack version {versioned.major} is not supported (only {_DLPACK_VERSION[0]})")
        return versioned.tensor, versioned.flags
    if _capsule_is(capsule, b"dltensor"):
        return _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).tensor, 0
    raise InvalidArgument("__dlpack__ did not return an unused DLPack capsule")


def _dlpack_dtype(code: int, bits: int, lanes: int) -> DType:
    name = f"float8_{_DLPACK_FLOAT8[code]}" if code in _DLPACK_FLOAT8 else _DLPACK_KINDS.get(code, f"code {code}, ")
    if code in _DLPACK_KINDS and (code, bits) != (6, 8):
        name += str(bits)
    dtype = _dtype(name if lanes == 1 else f"{name} x {lanes}")
    if bits != 8 * dtype.itemsize:
        raise _unsupported(f"{name} of {bits} bits")
    return dtype


def _is_immutable(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] in ("jax", "jaxlib")


# --- __cuda_array_interface__ ---


def _from_cuda_array_interface(obj: Any, writable: bool) -> Buffer:
    try:
        described = obj.__cuda_array_interface__
        address, read_only = described["data"]
        dtype = _typestr_dtype(described["typestr"])
        shape = _bounded_shape(obj, len(described["shape"]), described["shape"])
        strides = described.get("strides")
        compact = strides is None or _is_compact(shape, strides, dtype.itemsize)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidArgument(f"{_type_name(obj)} has a malformed __cuda_array_interface__: {error!r}") from error
    if described.get("mask") is not None:
        raise InvalidArgument(f"{_type_name(obj)} would lose its mask: pass an array without one")
    if not compact:
        raise _not_contiguous(obj, shape)
    if writable and read_only:
        raise _read_only(obj)
    return _described(int(address or 0), dtype, "cuda", shape, obj)


def _typestr_dtype(typestr: str) -> DType:
    kind = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}.get(typestr[1:2])
    size = int(typestr[2:])
    return _sized(kind, size, swapped=typestr[0] not in _NATIVE_ORDER + "|", what=typestr)


# --- the buffer protocol ---

_NATIVE_ORDER = "@=<" if sys.byteorder == "little" else "@=>!"
_BUFFER_KINDS = {
    "?": "bool",
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQNc", "uint"),
    **dict.fromkeys("efd", "float"),
    **dict.fromkeys(("F", "D", "Zf", "Zd"), "complex"),
}


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def _from_buffer_protocol(obj: Any, writable: bool) -> Buffer:
    try:
        view = memoryview(obj)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(
            f"{_type_name(obj)} is not an array ({error}): pass a numpy or torch array, or an object with __dlpack__, "
            "__cuda_array_interface__ or the buffer protocol"
        ) from error
    if not view.c_contiguous:
        raise _not_contiguous(obj, view.shape or ())
    if writable and view.readonly:
        raise _read_only(obj)
    swapped = view.format[0] in "<>!" and view.format[0] not in _NATIVE_ORDER
    kind = _BUFFER_KINDS.get(view.format.lstrip("@=<>!"))
    dtype = _sized(kind, view.itemsize, swapped, f"buffer format {view.format!r}")
    # The memoryview holds an export: a bytearray can't be resized under it.
    return _described(_view_address(view), dtype, "cpu", view.shape or (), view)


def _view_address(view: memoryview) -> int:
    raw = _PyBuffer()
    _get_buffer(view, raw, 0)
    address: int = raw.buf or 0
    _release_buffer(raw)
    return address


# --- common to all ---


def _described(address: int, dtype: DType, device: str, shape: Sequence[int], owner: Any) -> Buffer:
    count = math.prod(shape)
    return Buffer(address, count * dtype.itemsize, count, dtype, device, tuple(shape), owner)


def _bounded_shape(obj: Any, ndim: int, sizes: Any) -> tuple[int, ...]:
    if not 0 <= ndim <= MAX_DIMENSIONS:
        raise InvalidArgument(f"{_type_name(obj)} has {ndim} dimensions (at most {MAX_DIMENSIONS})")
    shape = tuple(int(sizes[index]) for index in range(ndim))
    if any(size < 0 for size in shape):
        raise InvalidArgument(f"{_type_name(obj)} has a negative size: {shape}")
    return shape


def _is_compact(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    if len(shape) != len(strides):
        raise ValueError(f"{len(strides)} strides for {len(shape)} dimensions")
    if 0 in shape:
        return True
    expected = unit
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _sized(kind: str | None, itemsize: int, swapped: bool, what: str) -> DType:
    if kind is None or (swapped and itemsize > 1):
        raise _unsupported(what)
    return _dtype(kind if kind == "bool" and itemsize == 1 else f"{kind}{8 * itemsize}")


_dtype = functools.lru_cache(maxsize=64)(dtypes.by_name)
_numpy_dtype = functools.lru_cache(maxsize=64)(dtypes.from_numpy)
_torch_dtype = functools.lru_cache(maxsize=64)(dtypes.from_torch)


def _unsupported(what: str) -> UnsupportedType:
    return UnsupportedType(f"{what} is not supported (supported: {', '.join(map(str, dtypes.DTYPES))})")


def _not_contiguous(obj: Any, shape: Sequence[int], remedy: str = "a contiguous copy") -> InvalidArgument:
    return InvalidArgument(
        f"{_type_name(obj)} of shape {tuple(shape)} is not contiguous in row-major order: pass {remedy}"
    )


def _read_only(obj: Any) -> InvalidArgument:
    return InvalidArgument(f"{_type_name(obj)} is read-only and would be written: pass a writable copy")


def _type_name(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
