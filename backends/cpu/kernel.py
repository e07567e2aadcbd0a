"""Users' kernels on a CPU: compiled by the host's compiler, one OS thread a block."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commrt.backend import Stream
from commrt.errors import InvalidArgument, Unavailable

HEADERS = Path(__file__).resolve().parents[2] / "algorithms" / "device"

_one_at_a_time = threading.Lock()


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> ctypes.CDLL:
    """The files are gone when this returns; what was loaded stays."""
    compiler = next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("no C++ compiler (g++, clang++ or c++) on PATH to build a kernel with")
    with tempfile.TemporaryDirectory(prefix="commrt-kernel-") as folder:
        code, shared = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        code.write_text(source)
        flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", f"-I{HEADERS}"]
        command = [compiler, *flags, str(code), "-o", str(shared)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise InvalidArgument(f"the kernel does not compile:\n{built.stderr.strip()}")
        return ctypes.CDLL(str(shared))


class CpuKernel:
    """A function `CR_KERNEL symbol(...)` of a shared object; see algorithms/device/kernel.h."""

    def __init__(self, library: ctypes.CDLL, symbol: str) -> None:
        self._library = library
        self._function = getattr(library, symbol)
        self._function.restype = None
        self._enter = library.commrt_enter_block
        self._enter.argtypes, self._enter.restype = (ctypes.c_uint32, ctypes.c_uint32), None

    @classmethod
    def build(cls, source: str, symbol: str) -> CpuKernel:
        """Compile, unless the same source was not long ago, and load."""
        with _one_at_a_time:
            library = _compile(source)
        if not hasattr(library, symbol):
            raise InvalidArgument(f'the kernel\'s source defines no extern "C" function {symbol!r}')
        if not hasattr(library, "commrt_enter_block"):
            raise InvalidArgument('the kernel\'s source does not include "kernel.h"')
        return cls(library, symbol)

    def launch(self, blocks: int, arguments: Sequence[Any], stream: Stream | None = None) -> None:
        """Call the function once a block with `arguments` (ctypes values)."""
        if blocks < 1:
            raise InvalidArgument(f"a kernel needs at least one block, not {blocks}")
        if stream is not None:
            stream.submit(lambda: self._run(blocks, arguments))
        else:
            self._run(blocks, arguments)

    def _run(self, blocks: int, arguments: Sequence[Any]) -> None:
        def block(number: int) -> None:
            self._enter(number, blocks)
            self._function(*arguments)

        threads = [threading.Thread(target=block, args=(number,)) for number in range(1, blocks)]
        for thread in threads:
            thread.start()
        block(0)
        for thread in threads:
            thread.join()
