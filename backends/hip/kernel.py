"""Kernels on AMD GPUs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from commrt.backend import Stream
from commrt.backends.hip.compile import code_object
from commrt.backends.hip.driver import Driver
from commrt.backends.hip.stream import HipStream
from commrt.devices import pointers
from commrt.errors import InvalidArgument

THREADS = 512  # of a block: within what the executor's registers allow everywhere


class HipKernel:
    """A function `CR_KERNEL symbol(...)` of a loaded code object."""

    def __init__(self, driver: Driver, function: Any) -> None:
        self._driver, self._function = driver, function

    def launch(self, blocks: int, arguments: Sequence[Any], stream: Stream | None = None) -> None:
        """Run it with `arguments` (ctypes values), which are copied before this returns."""
        if blocks < 1:
            raise InvalidArgument(f"a kernel needs at least one block, not {blocks}")
        if stream is not None and not isinstance(stream, HipStream):
            raise InvalidArgument("a kernel of the hip backend runs on a stream of the hip backend")
        if stream is not None:
            self._enqueue(blocks, pointers(arguments), stream.handle)
            return
        with self._driver.finished() as queue:
            self._enqueue(blocks, pointers(arguments), queue)

    def _enqueue(self, blocks: int, parameters: Any, queue: Any) -> None:
        grid, block, at = (blocks, 1, 1), (THREADS, 1, 1), ctypes.addressof(parameters)
        self._driver.call("hipModuleLaunchKernel", self._function, *grid, *block, 0, queue, at, None)

    def resident_blocks(self) -> int:
        """Of THREADS threads, on the whole device."""
        name = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
        blocks: int = self._driver.call(name, self._function, THREADS, 0)
        return blocks * self._driver.multiprocessors


class Modules:
    """The loaded code of one device. Never unloaded, as kernels may outlive who built them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loaded: dict[str, Any] = {}
        self._lock = threading.Lock()

    def kernel(self, source: str, symbol: str) -> HipKernel:
        """Of compiled source. Raises Unavailable or InvalidArgument."""
        with self._lock:
            module = self._loaded.get(source)
            if module is None:
                code = code_object(source, self._driver.architecture)
                module = self._loaded[source] = self._driver.call("hipModuleLoadData", code)
        error, function = self._driver.attempt("hipModuleGetFunction", module, symbol.encode())
        if int(error) == int(self._driver.hip.hipError_t.hipErrorNotFound):
            raise InvalidArgument(f"the kernel's source defines no kernel {symbol!r}")
        if int(error):
            raise InvalidArgument(f"the kernel {symbol!r} can't be loaded: {error.name}")
        return HipKernel(self._driver, function)
