"""Kernels on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from commrt.backend import Stream
from commrt.backends.cuda.compile import cubin
from commrt.backends.cuda.driver import Driver
from commrt.backends.cuda.stream import CudaStream
from commrt.devices import pointers
from commrt.errors import InvalidArgument

THREADS = 512  # of a block
_LOADS_FUNCTIONS = 12040  # the driver that brought cuFuncLoad


class CudaKernel:
    """A function `CR_KERNEL symbol(...)` of a loaded cubin."""

    def __init__(self, driver: Driver, function: Any) -> None:
        self._driver, self._function = driver, function

    def launch(self, blocks: int, arguments: Sequence[Any], stream: Stream | None = None) -> None:
        """Run it with `arguments` (ctypes values), which are copied before this returns."""
        if blocks < 1:
            raise InvalidArgument(f"a kernel needs at least one block, not {blocks}")
        if stream is not None and not isinstance(stream, CudaStream):
            raise InvalidArgument("a kernel of the cuda backend runs on a stream of the cuda backend")
        array = pointers(arguments)
        if stream is not None:
            self._launch(blocks, array, stream.handle)
            return
        with self._driver.finished() as queue:
            self._launch(blocks, array, queue)

    def resident_blocks(self) -> int:
        """Of THREADS threads, on the whole device."""
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        blocks: int = self._driver.call(name, self._function, THREADS, 0)
        return blocks * self._driver.multiprocessors

    def _launch(self, blocks: int, array: Any, queue: Any) -> None:
        grid, block = (blocks, 1, 1), (THREADS, 1, 1)
        self._driver.call("cuLaunchKernel", self._function, *grid, *block, 0, queue, ctypes.addressof(array), 0)


class Modules:
    """The loaded code of one device. Never unloaded, as kernels may outlive who built them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loaded: dict[str, Any] = {}
        self._lock = threading.Lock()

    def kernel(self, source: str, symbol: str) -> CudaKernel:
        """Of compiled source, all on the device by now. Raises Unavailable or InvalidArgument."""
        with self._lock:
            module = self._loaded.get(source)
            if module is None:
                code = cubin(source, self._driver.capability)
                module = self._loaded[source] = self._driver.call("cuModuleLoadData", code)
        error, function = self._driver.attempt("cuModuleGetFunction", module, symbol.encode())
        if error == self._driver.cuda.CUresult.CUDA_ERROR_NOT_FOUND:
            raise InvalidArgument(f"the kernel's source defines no kernel {symbol!r}")
        if int(error):
            raise InvalidArgument(f"the kernel {symbol!r} can't be loaded: {error.name}")
        self._load(function)
        return CudaKernel(self._driver, function)

    def _load(self, function: Any) -> None:
        """Now: drivers put it off until the first launch, which then waits for kernels that may wait for this one."""
        if self._driver.version >= _LOADS_FUNCTIONS:
            self._driver.call("cuFuncLoad", function)
