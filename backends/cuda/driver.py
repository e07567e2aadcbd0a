"""The CUDA driver of this process, as cuda-python finds it: what is here, and calls that raise.

The bindings can be imported anywhere; they load the library at the first call, which raises RuntimeError without one.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterator
from typing import Any

from commrt.backend import Probe
from commrt.devices import own_device
from commrt.errors import OperationError, Unavailable

_LIBRARY = "libcuda.so.1"
_NAME_NBYTES = 256
_LOCATION_NBYTES = 16


def probe() -> Probe:
    """The GPUs that this process sees, or why there are none."""
    try:
        return _look(bindings())
    except ImportError:
        return Probe(reason="cuda-python is not installed")
    except RuntimeError as error:
        return Probe(reason=_unloadable(error))
    except Exception as error:  # whatever bindings and libraries of other versions may do
        return Probe(reason=f"cuda-python can't use the CUDA driver: {type(error).__name__}: {error}")


def bindings() -> Any:
    """cuda.bindings.driver. Raises ImportError."""
    from cuda.bindings import driver

    untyped: Any = driver
    return untyped


def _look(cuda: Any) -> Probe:
    (error,) = cuda.cuInit(0)
    if error == cuda.CUresult.CUDA_ERROR_NO_DEVICE:
        return Probe(reason="the CUDA driver finds no NVIDIA GPU")
    if int(error):
        return Probe(reason=f"the CUDA driver does not start ({error.name})")
    count = _succeed(cuda.cuDeviceGetCount(), "cuDeviceGetCount")
    if not count:
        return Probe(reason="the CUDA driver finds no NVIDIA GPU")
    return Probe(devices=tuple(_describe(cuda, device) for device in range(count)), level=_name(cuda, 0))


def _describe(cuda: Any, device: int) -> str:
    major, minor = _capability(cuda, device)
    return f"{_name(cuda, device)}, sm_{major}{minor}"


def _name(cuda: Any, device: int) -> str:
    name: bytes = _succeed(cuda.cuDeviceGetName(_NAME_NBYTES, device), "cuDeviceGetName")
    return name.partition(bytes(1))[0].decode(errors="replace")


def _capability(cuda: Any, device: int) -> tuple[int, int]:
    kinds = cuda.CUdevice_attribute
    major = kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return _attribute(cuda, major, device), _attribute(cuda, minor, device)


def _attribute(cuda: Any, kind: Any, device: int) -> int:
    return int(_succeed(cuda.cuDeviceGetAttribute(kind, device), "cuDeviceGetAttribute"))


def _succeed(answer: tuple[Any, ...], name: str) -> Any:
    error, *results = answer
    if int(error):
        raise RuntimeError(f"{name}: {error.name}")
    return results[0]


def _unloadable(error: RuntimeError) -> str:
    """The bindings say alike of a library that is missing and of one that is broken; the loader knows."""
    said = str(error)
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as reason:
        said = str(reason)
    if said.startswith(f"{_LIBRARY}: cannot open shared object file: No such file"):
        return f"no CUDA driver ({_LIBRARY}) is installed"
    return f"the CUDA driver can't be used: {' '.join(said.split())}"


class Driver:
    """Calls of the CUDA driver on one device. Callable from any thread; leaves each thread's own context as it was.

    The device's primary context is held for as long as the process lives.
    """

    def __init__(self, cuda: Any, device: int) -> None:
        self.cuda, self.device = cuda, device
        self.capability = _capability(cuda, device)
        self.version: int = _succeed(cuda.cuDriverGetVersion(), "cuDriverGetVersion")
        self._context = _succeed(cuda.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        self.multiprocessors = self.attribute("MULTIPROCESSOR_COUNT")
        self._idle: list[Any] = []
        self._left: deque[tuple[str, Any]] = deque()

    @classmethod
    def load(cls) -> Driver:
        """On this rank's device. Raises Unavailable."""
        found = probe()
        if not found.devices:
            raise Unavailable(found.reason)
        cuda = bindings()
        try:
            return cls(cuda, own_device(len(found.devices), _current_device(cuda)))
        except RuntimeError as error:
            raise Unavailable(f"this rank's NVIDIA GPU can't be used: {error}") from error

    def attempt(self, name: str, *arguments: Any) -> tuple[Any, Any]:
        """The error (an enumeration; 0 is none) and the result: None, one, or a tuple."""
        cuda, before = self.cuda, self.cuda.cuCtxGetCurrent()[1]
        if int(before) == int(self._context):
            error, *results = getattr(cuda, name)(*arguments)
        else:
            cuda.cuCtxSetCurrent(self._context)
            error, *results = getattr(cuda, name)(*arguments)
            cuda.cuCtxSetCurrent(before)
        return error, results[0] if len(results) == 1 else tuple(results) or None

    def call(self, name: str, *arguments: Any) -> Any:
        """The result. Raises MemoryError where memory is short, else OperationError."""
        error, result = self.attempt(name, *arguments)
        if error == self.cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"{name}: no memory left on NVIDIA GPU {self.device}")
        if int(error):
            raise OperationError(f"{name} failed on NVIDIA GPU {self.device}: {error.name} ({int(error)})")
        return result

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_<name> of the device."""
        kind = getattr(self.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return _attribute(self.cuda, kind, self.device)

    def location(self, device: int | None = None) -> bytes:
        """The device's own identity, the same to all processes."""
        return bytes(self.call("cuDeviceGetUuid", self.device if device is None else device).bytes)

    def reaches(self, location: bytes) -> bool:
        """Whether kernels can be at that device's memory. Of one that is not seen here, drivers decide later."""
        count = self.call("cuDeviceGetCount")
        others = [device for device in range(count) if self.location(device) == location]
        if not others or others[0] == self.device:
            return len(location) == _LOCATION_NBYTES
        return bool(self.call("cuDeviceCanAccessPeer", self.device, others[0]))

    def leave(self, name: str, handle: Any) -> None:
        """Have call `name` end that handle, later: this thread may be the driver's own, which must call nothing."""
        self._left.append((name, handle))

    def new_event(self) -> Any:
        """An event that takes no times."""
        self._end_left()
        return self.call("cuEventCreate", self.cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def new_stream(self) -> Any:
        """A stream that waits for no other, the default stream among them."""
        self._end_left()
        return self.call("cuStreamCreate", self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    @contextlib.contextmanager
    def finished(self) -> Iterator[Any]:
        """A stream of the caller's own; what it queues there is done on leaving."""
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = self.new_stream()
        try:
            yield stream
            self.call("cuStreamSynchronize", stream)
        finally:
            self._idle.append(stream)

    def _end_left(self) -> None:
        with contextlib.suppress(IndexError, OperationError):  # none is left, or the device has failed
            while True:
                self.call(*self._left.popleft())


def _current_device(cuda: Any) -> int | None:
    """Of the context that the calling thread has made current, if any."""
    if not int(_succeed(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        return None
    return int(_succeed(cuda.cuCtxGetDevice(), "cuCtxGetDevice"))
