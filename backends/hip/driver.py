"""The HIP runtime of this process, as hip-python finds it: what is here, and calls that raise.

The bindings can be imported anywhere; they load the library at the first call, which raises RuntimeError without one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from commrt.backend import Probe
from commrt.devices import own_device
from commrt.errors import OperationError, Unavailable

_LIBRARY = "libamdhip64.so"
_NAME_NBYTES, _LOCATION_NBYTES = 256, 16


def probe() -> Probe:
    """The GPUs that this process sees, or why there are none."""
    try:
        return _look(bindings())
    except ImportError:
        return Probe(reason="hip-python is not installed")
    except RuntimeError as error:
        return Probe(reason=_unloadable(str(error)))
    except Exception as error:  # whatever bindings and libraries of other versions may do
        return Probe(reason=f"hip-python can't use the HIP runtime: {type(error).__name__}: {error}")


def bindings() -> Any:
    """hip-python. Raises ImportError."""
    from hip import hip

    untyped: Any = hip
    return untyped


def _look(hip: Any) -> Probe:
    error, count = hip.hipGetDeviceCount()
    if int(error) or not count:
        said = error.name if int(error) else "it counts none"
        return Probe(reason=f"the HIP runtime finds no AMD GPU ({said})")
    names = [str(hip.hipDeviceGetName(_NAME_NBYTES, device)[1]) for device in range(count)]
    devices = tuple(f"{name}, {_architecture(hip, device)}" for device, name in enumerate(names))
    return Probe(devices, level=names[0])


def _architecture(hip: Any, device: int) -> str:
    """Such as gfx942. Code that names no further features runs with and without them."""
    error, properties = hip.hipGetDeviceProperties(device)
    if int(error):
        raise RuntimeError(f"hipGetDeviceProperties: {error.name}")
    name: str = properties.gcnArchName
    return name.partition(":")[0]


def _unloadable(said: str) -> str:
    if f"{_LIBRARY}: cannot open shared object file: No such file" in said:
        return f"no HIP runtime ({_LIBRARY}) is installed"
    return f"the HIP runtime can't be used: {' '.join(said.split())}"


class Driver:
    """Calls of the HIP runtime on one device. Callable from any thread; leaves each thread's own device as it was."""

    def __init__(self, hip: Any, device: int) -> None:
        self.hip, self.device = hip, device
        self.architecture = _architecture(hip, device)
        attribute = hip.hipDeviceAttribute_t.hipDeviceAttributeMultiprocessorCount
        self.multiprocessors: int = self.call("hipDeviceGetAttribute", attribute, device)
        self._idle: list[Any] = []
        self._left: deque[tuple[str, Any]] = deque()

    @classmethod
    def load(cls) -> Driver:
        """On this rank's device. Raises Unavailable. A thread has not chosen that which is current from the start."""
        found = probe()
        if not found.devices:
            raise Unavailable(found.reason)
        hip = bindings()
        chosen: int = hip.hipGetDevice()[1]
        return cls(hip, own_device(len(found.devices), chosen or None))

    def attempt(self, name: str, *arguments: Any) -> tuple[Any, Any]:
        """The error (an enumeration; 0 is none) and the results: None, one, or a tuple."""
        before: int = self.hip.hipGetDevice()[1]
        if before == self.device:
            error, *results = getattr(self.hip, name)(*arguments)
        else:
            self.hip.hipSetDevice(self.device)
            error, *results = getattr(self.hip, name)(*arguments)
            self.hip.hipSetDevice(before)
        return error, results[0] if len(results) == 1 else tuple(results) or None

    def call(self, name: str, *arguments: Any) -> Any:
        """The results. Raises MemoryError where memory is short, else OperationError."""
        error, results = self.attempt(name, *arguments)
        if int(error) == int(self.hip.hipError_t.hipErrorOutOfMemory):
            raise MemoryError(f"{name}: no memory left on AMD GPU {self.device}")
        if int(error):
            raise OperationError(f"{name} failed on AMD GPU {self.device}: {error.name} ({int(error)})")
        return results

    def location(self, device: int | None = None) -> bytes:
        """The device's own identity, the same to all processes."""
        return bytes(self.call("hipDeviceGetUuid", self.device if device is None else device).bytes)

    def reaches(self, location: bytes) -> bool:
        """Whether kernels can be at that device's memory. Of one that is not seen here, the runtime decides later."""
        count = self.call("hipGetDeviceCount")
        others = [device for device in range(count) if self.location(device) == location]
        if not others or others[0] == self.device:
            return len(location) == _LOCATION_NBYTES
        return bool(self.call("hipDeviceCanAccessPeer", self.device, others[0]))

    def leave(self, name: str, handle: Any) -> None:
        """Have call `name` end that handle, later: this thread may be the driver's own, which must call nothing."""
        self._left.append((name, handle))

    def new_event(self) -> Any:
        """An event that takes no times."""
        self._end_left()
        return self.call("hipEventCreateWithFlags", self.hip.hipEventDisableTiming)

    def new_stream(self) -> Any:
        """A stream that waits for no other."""
        self._end_left()
        return self.call("hipStreamCreateWithFlags", self.hip.hipStreamNonBlocking)

    @contextlib.contextmanager
    def finished(self) -> Iterator[Any]:
        """A stream of the caller's own; what it queues there is done on leaving."""
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = self.new_stream()
        try:
            yield stream
            self.call("hipStreamSynchronize", stream)
        finally:
            self._idle.append(stream)

    def _end_left(self) -> None:
        with contextlib.suppress(IndexError, OperationError):  # none is left, or the device has failed
            while True:
                self.call(*self._left.popleft())
