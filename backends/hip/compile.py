"""From source to a code object: by hiprtc where there is one, else by clang, ROCm's or any with its AMDGPU target."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commrt.devices import HEADERS, KernelCache
from commrt.errors import InvalidArgument, Unavailable

_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", f"-I{HEADERS}")
_CLANG_FLAGS = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc")
_VERSIONS = range(30, 16, -1)
_LIMIT_S = 300

_cache = KernelCache("hip")


def code_object(source: str, architecture: str) -> bytes:
    """Compiled now or before. Raises Unavailable without a compiler, InvalidArgument with its errors."""
    name, compile = _compiler()
    return _cache.get((source, architecture, name, *_FLAGS), lambda: compile(source, architecture))


@functools.cache
def _compiler() -> tuple[str, Callable[[str, str], bytes]]:
    """Its name, which changes when it does, and how to call it."""
    try:
        from hip import hiprtc

        bindings: Any = hiprtc
        _, major, minor = bindings.hiprtcVersion()
        return f"hiprtc {major}.{minor}", functools.partial(_by_hiprtc, bindings)
    except (ImportError, RuntimeError):
        clang = _clang()
    if clang is None:
        raise Unavailable("neither hiprtc nor a clang++ for AMD GPUs is here to build a kernel with")
    found = Path(clang).resolve().stat()
    return f"{clang} {found.st_size} {found.st_mtime_ns}", functools.partial(_by_clang, clang)


def _clang() -> str | None:
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm", "bin", "clang++")
    names = [str(rocm), "amdclang++", *(f"clang++-{version}" for version in _VERSIONS), "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _by_clang(clang: str, source: str, architecture: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="commrt-kernel-") as folder:
        code, built = Path(folder, "kernel.hip"), Path(folder, "kernel.co")
        code.write_text(source)
        command = [clang, *_CLANG_FLAGS, f"--offload-arch={architecture}", *_FLAGS, "-o", str(built), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
        if done.returncode:
            raise InvalidArgument(f"the kernel does not compile for {architecture}:\n{done.stderr.strip()}")
        return built.read_bytes()


def _by_hiprtc(hiprtc: Any, source: str, architecture: str) -> bytes:
    error, program = hiprtc.hiprtcCreateProgram(source.encode(), b"kernel.hip", 0, None, None)
    if int(error):
        raise Unavailable(f"hiprtcCreateProgram: {error.name}")
    try:
        options = [option.encode() for option in (f"--offload-arch={architecture}", *_FLAGS)]
        (error,) = hiprtc.hiprtcCompileProgram(program, len(options), options)
        if int(error):
            log = _fetch(hiprtc.hiprtcGetProgramLogSize, hiprtc.hiprtcGetProgramLog, program)
            said = log.rstrip(b"\0").decode(errors="replace").strip()
            raise InvalidArgument(f"the kernel does not compile for {architecture}:\n{said}")
        return _fetch(hiprtc.hiprtcGetCodeSize, hiprtc.hiprtcGetCode, program)
    finally:
        hiprtc.hiprtcDestroyProgram(program.createRef())


def _fetch(size: Any, content: Any, program: Any) -> bytes:
    buffer = bytearray(size(program)[1])
    content(program, buffer)
    return bytes(buffer)
