"""From source to a cubin, by NVRTC. A cubin and not PTX: an older driver of the same major version loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commrt.devices import HEADERS, KernelCache
from commrt.errors import InvalidArgument, Unavailable

# Rounded as written, denormals kept: the bits that a CPU computes.
_FLAGS = ("--std=c++17", "-default-device", "--fmad=false", "--ftz=false", "--prec-div=true", f"-I{HEADERS}")

_cache = KernelCache("cuda")


def cubin(source: str, capability: tuple[int, int]) -> bytes:
    """Compiled now or before. Raises Unavailable without a compiler, InvalidArgument with its errors."""
    nvrtc = _nvrtc()
    architecture = _architecture(nvrtc, capability)
    version = "NVRTC {}.{}".format(*_succeed(nvrtc.nvrtcVersion()))
    return _cache.get((source, architecture, version, *_FLAGS), lambda: _compile(nvrtc, source, architecture))


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        bindings: Any = nvrtc
        bindings.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"no NVRTC (nvidia-cuda-nvrtc) to build a kernel with: {error}") from error
    return bindings


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> str:
    """The newest that both the compiler and the device know: code runs on later ones of the same major number."""
    major, minor = capability
    known = [divmod(int(one), 10) for one in _succeed(nvrtc.nvrtcGetSupportedArchs())]
    fit = [one for one in known if one[0] == major and one[1] <= minor]
    if not fit:
        raise Unavailable(f"the NVRTC that is installed does not compile for sm_{major}{minor}")
    return "sm_{}{}".format(*max(fit))


def _compile(nvrtc: Any, source: str, architecture: str) -> bytes:
    program = _succeed(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_FLAGS)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(error):
            log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            said = log.rstrip(b"\0").decode(errors="replace").strip()
            raise InvalidArgument(f"the kernel does not compile for {architecture}:\n{said}")
        return _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(size: Callable[[Any], Any], content: Callable[[Any, bytes], Any], program: Any) -> bytes:
    buffer = bytes(_succeed(size(program)))
    _succeed(content(program, buffer))  # writes into it
    return buffer


def _succeed(answer: tuple[Any, ...]) -> Any:
    error, *results = answer
    if int(error):
        raise Unavailable(f"NVRTC: {error.name}")
    return results[0] if len(results) == 1 else tuple(results)
